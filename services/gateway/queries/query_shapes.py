"""Queries and what became of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.http.shape import Shape
from shared.contracts import Deliberation, Sentiment, Usage, VotePart
from shared.records.events import ClientCall, CritiqueShown, PairwiseShown, RewardShown

State = Literal["queued", "running", "completed", "failed", "cancelled"]


class Accepted(Shape):
    query_id: str
    session_id: str
    state: Literal["queued"]


class Stopping(Shape):
    query_id: str
    session_id: str
    state: Literal["cancelling", "completed", "failed", "cancelled"]


class ShownCall(Shape):
    """A call of one of the agent's tools; while it runs, without its outcome."""

    tool: str
    args: dict[str, Any]
    result: str | None = Field(description="The text that the model reads; null while the tool runs")
    call_id: str = ""
    error: str | None = None
    data: Any = Field(default=None, description="The result for programs: hits, scores, ages")
    duration_ms: int = Field(default=0, description="Milliseconds")
    persona: str = Field(default="", description="Of a committee: whose call it is")
    round: int = Field(default=0, description="Of a committee: in which round")


class Notice(Shape):
    """Something about the answer that its reader should know."""

    code: str
    message: str


class LoggedMessage(Shape):
    """A message on the bus for this query."""

    subject: str
    t: float = Field(description="Seconds since the query was accepted, by the clock of the bus")
    stream: str = Field(description="The Redis stream that it was written to")
    id: str = Field(description="Its entry there")


_EVENT_LOG = (
    "With `event_log=true`: the messages of all participants that are on the bus for the query, in the order of their "
    "ids. Messages that retention has removed are absent"
)
EventLog = Annotated[list[LoggedMessage], Field(default=[], description=_EVENT_LOG)]


class FailureShown(Shape):
    code: str
    message: str


class QueryResult(Shape):
    """A query and all that is known of its answer. The same fields are there from the first moment to the last.

    `events` and `event_log` are there if the request asks for them.
    """

    query_id: str
    session_id: str
    state: State
    query: str
    answer: str
    said_before: list[str] = Field(description="What was said to the user before calls of tools")
    thinking: str
    tool_calls: list[ShownCall]
    usage: Usage
    model: str | None
    finish_reason: str | None
    notices: list[Notice]
    events: list[str] = Field(default=[], description="The subjects of `event_log`; left out with it")
    event_log: EventLog
    client_calls: list[ClientCall] = Field(default=[])
    deliberations: list[Deliberation] = Field(default=[], description="Of a committee")
    critique: CritiqueShown | None = None
    pairwise: PairwiseShown | None = None
    reward: RewardShown | None = None
    error: FailureShown | None = Field(default=None, description="Of a failed query")


class QueryListed(Shape):
    query_id: str
    session_id: str
    state: State
    query: str
    mode: str
    accepted: int = Field(description="Milliseconds since the epoch")
    after: str | None = Field(
        default=None, description="The turn before it is the newest one that was not accepted after this query"
    )
    error: FailureShown | None = Field(default=None, description="Of a failed query")


class QueryPage(Shape):
    queries: list[QueryListed] = Field(description="The oldest first")


class Rated(Shape):
    query_id: str
    sentiment: Sentiment
    stars: int | None = Field(ge=1, le=5)


class VoteWithdrawn(Shape):
    query_id: str
    withdrawn: list[VotePart] = Field(description="What of the vote no longer counts")
