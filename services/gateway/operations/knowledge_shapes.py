"""What is known of a user's life."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.gateway.http.shape import Shape

Kind = Literal["person", "place", "organisation", "thing", "time"]
State = Literal["is", "was", "doubted"]
Speaker = Literal["user", "assistant"]
ReadBy = Literal["model", "rules", "person"]


class Entity(Shape):
    id: str = Field(description="Who or what it is, whatever name is used")
    name: str
    kind: Kind


class FactSource(Shape):
    source: str = Field(description="The response that it was read from; `person:…` when it was entered by hand")
    session_id: str
    time: int = Field(description="Milliseconds since the epoch")
    speaker: Speaker
    by: ReadBy = Field(description="Who read it")
    quote: str


class Fact(Shape):
    id: str
    subject: Entity
    relation: str
    object: Entity
    state: State = Field(description="doubted: the user said something else")
    since: str | None = Field(description="2026, 2026-05 or 2026-05-03")
    until: str | None
    said: str = Field(description="The day on which it was told last")
    time: int = Field(description="The same, in milliseconds since the epoch")
    confidence: float
    text: str = Field(description="As the model reads it")
    why: list[str] = Field(description="What it rests on, and what ended it, as sentences")
    sources: list[FactSource] = Field(description="The newest fifty")


class FactPage(Shape):
    facts: list[Fact]
    cursor: str | None = Field(description="Of the next page")
    total: int


class FactForgotten(Shape):
    id: str
    deleted: bool


class NamedEntity(Entity):
    names: list[str] = Field(description="Its names as they are searched: without case, marks and punctuation")
    facts: int


class EntityPage(Shape):
    entities: list[NamedEntity]
    total: int


class Edge(Shape):
    id: str = Field(description="The fact's")
    from_: str = Field(alias="from")
    to: str
    relation: str
    state: State
    since: str | None
    until: str | None
    confidence: float


class KnowledgeGraph(Shape):
    nodes: list[Entity]
    edges: list[Edge]


class ClaimLine(Shape):
    """A line of an export: what somebody said once."""

    user_id: str
    id: str
    source: str
    session_id: str
    said: int = Field(description="Milliseconds since the epoch")
    subject_key: str
    subject: str
    subject_kind: Kind
    relation: str
    object_key: str
    object: str
    object_kind: Kind
    holds: Literal["is", "was"]
    since: str
    until: str
    speaker: Speaker
    by: ReadBy
    quote: str
