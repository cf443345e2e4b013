"""What is remembered of a user."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.http.shape import Shape
from shared.contracts import Sentiment, Winner


class Engram(Shape):
    id: str
    response_id: str | None
    query_id: str | None
    session_id: str | None
    kind: Literal["turn", "note", "topic"]
    respondent_id: str | None
    time: int = Field(description="Milliseconds since the epoch")
    age_seconds: int
    query: str
    answer: str
    content: str | None
    topic: str | None
    intent: str | None
    entities: list[str]
    tainted: bool = Field(description="Whether it holds text from the web")
    score: int | None
    winner: Winner | None = Field(description="The older name of `pairwise_verdict`")
    pairwise_winner: bool | None = Field(
        description="Whether it is the better of the two respondents' answers; null after a tie, and when not compared"
    )
    pairwise_verdict: Winner | None = Field(description="Of the comparison of the two respondents; null: not compared")
    reward: float | None
    sentiment: Sentiment | None


class EngramPage(Shape):
    engrams: list[Engram]
    cursor: str | None = Field(description="Of the next page")
    total: int


class WholeEngram(Engram):
    generator_id: str | None
    model: str | None
    options: dict[str, Any]
    tool_calls: list[dict[str, Any]]
    finish_reason: str | None
    echo: bool
    recorded: int
    metadata: dict[str, Any]
    annotations: dict[str, dict[str, Any]]


class Hit(Engram):
    relevance: float
    mark: str | None
    why: dict[str, Any] = Field(description="What the relevance was made of")
    metadata: dict[str, Any]


class Rerank(Shape):
    by: str = Field(description="Who chose: model or cross-encoder; none where the setting has nobody")
    of: int = Field(description="From how many it was chosen")
    trouble: str | None = Field(description="Why the hits stand in the order in which they were found")


class HitList(Shape):
    query: str
    hits: list[Hit]
    text: str = Field(description="As the model reads it")
    degraded: str | None = Field(description="Why it may be less than there is")
    rerank: Rerank | None = Field(description="null: not asked for")
    log: list[Engram] | None = Field(description="What was said round the hits, in order; null: not asked for")


class Forgotten(Shape):
    id: str
    deleted: bool


class AllForgotten(Shape):
    deleted: int
    files: int


class TopicShown(Shape):
    topic: str
    content: str
    time: int = Field(description="Milliseconds since the epoch")


class TopicList(Shape):
    topics: list[TopicShown]


class TopicForgotten(Shape):
    topic: str
    deleted: bool


class EngramLine(Shape):
    """A line of an export: query and answer, or content; with `topic` a topic."""

    time: int = Field(description="Milliseconds since the epoch")
    user_id: str
    metadata: dict[str, Any]
    query: str = ""
    answer: str = ""
    content: str = ""
    topic: str = ""
    session_id: str = ""


class LineError(Shape):
    line: int = Field(ge=1)
    message: str


class ImportTally(Shape):
    imported: int
    there: int = Field(description="Of these, what had been taken before")
    errors: list[LineError] = Field(description="The first hundred")
    failed: int
