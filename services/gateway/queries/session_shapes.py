"""A user's sessions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.http.schemas import ChatSettings
from services.gateway.http.shape import Shape
from services.gateway.queries.file_shapes import AttachedNow
from services.gateway.queries.query_shapes import EventLog
from shared.contracts import ChatTurnMessage


class Session(Shape):
    session_id: str
    title: str
    created: int = Field(description="Milliseconds since the epoch")
    updated: int = Field(description="Milliseconds since the epoch")
    pinned: bool = Field(description="It stands before the others")


class SessionTitle(Shape):
    session_id: str
    title: str
    made: bool = Field(description="false: it had been given before, by you or by the model")


class SessionListed(Session):
    query_id: str = Field(default="", description="Of a search: the newest turn that has the words; empty: the title")
    excerpt: str = Field(default="", description="Of a search: that turn, around the words")


class SessionPage(Shape):
    sessions: list[SessionListed]
    limit: int
    offset: int
    complete: bool = Field(description="false: a search did not look at everything; more words find the rest")


class TurnShown(Shape):
    query_id: str
    after: str | None = Field(
        description="The turn before it is the newest one that was not accepted after this query; null: the one before "
        "it in the session. Turns with the same one before them are versions of each other"
    )
    query: str = Field(description="Empty: the message consisted of its files alone")
    answer: str
    time: int = Field(description="Milliseconds since the epoch")
    interrupted: bool
    attachments: list[AttachedNow] = Field(description="The files of the question; deleted ones stay listed")


class SessionChanged(Session):
    settings: ChatSettings = Field(description="How this chat is asked")


class SessionShown(SessionChanged):
    tip: str | None = Field(
        description="The last turn of the conversation that is shown: it, and from each the one before it"
    )
    turns: list[TurnShown]
    total: int = Field(description="Turns of the whole session")
    earlier: str | None = Field(description="`before` of the next page; null at the beginning")
    messages: list[ChatTurnMessage] | None = Field(
        description="As the model will get them before the next query of chat mode: with system prompt and date, "
        "without thinking; `attachments` are the images that it gets. null: see `messages_missing`"
    )
    messages_missing: str | None = Field(description="Why `messages` is null")


class JournalKept(Shape):
    """An entry of a journal, as `JournalEvent` has it; pieces of text are joined, and what is very long is cut."""

    id: str
    event: str = Field(description="Its type. Ignore unknown ones")
    data: dict[str, Any]


class TurnTold(Shape):
    query_id: str
    session_id: str
    open_to_votes: bool = Field(
        description="Whether a vote on it can be cast or withdrawn: as long as GET /queries/{query_id} knows it"
    )
    journal: list[JournalKept] = Field(
        description="What happened, oldest first, and what was thought of it later; nothing where nothing is kept"
    )
    event_log: EventLog


class SessionDeleted(Shape):
    session_id: str
    deleted: bool
    cancelled: list[str] = Field(description="Queries that were open")


class SessionTaken(Shape):
    session_id: str = Field(description="Where it is kept")
    state: Literal["added", "there", "different"] = Field(
        description="there: it was there whole; different: it has turns of another import, and stays as it is"
    )
    turns_added: int
    turns: int = Field(description="Of the import")


class SessionsTaken(Shape):
    sessions: list[SessionTaken] = Field(description="In the order of the request")
