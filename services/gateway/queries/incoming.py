"""Import conversations of other products. A second import of the same conversation changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal
from services.gateway.http.schemas import Body
from services.gateway.http.session_ids import SESSION_RULE, is_session_id
from services.gateway.queries.records import aside, own_session
from shared.bus import order
from shared.contracts import MAX_QUERY_CHARS
from shared.records.session_records import SessionRecord, TurnRecord, write_sessions

# Sequence numbers of imported turns. Redis counts the entries of a millisecond from 0, so no query of ours has such a
# number: the id of an imported turn cannot reach or remove anything of a query.
_FIRST, _LAST = 1_000_000_000, 9_999_999_999
MOST_SESSIONS, MOST_TURNS = 200, 5_000

Words = Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUERY_CHARS)]
State = Literal["added", "there", "different"]


class IncomingTurn(Body):
    query: Words
    answer: Words
    time: int = Field(ge=0, lt=10**14, description="In ms since the epoch")


class IncomingSession(Body):
    session_id: str = Field(description=f"The same each time it is imported: {SESSION_RULE}")
    title: str = Field(default="", max_length=200)
    turns: list[IncomingTurn] = Field(
        min_length=1, max_length=MOST_TURNS, description="Oldest first, each with a later time"
    )

    @field_validator("session_id")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        if not is_session_id(value):
            raise ValueError(f"must be {SESSION_RULE}")
        return value

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        times = [turn.time for turn in self.turns]
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("turns must stand in their order, each with a later time than the one before")
        return self


class IncomingSessions(Body):
    sessions: list[IncomingSession] = Field(min_length=1, max_length=MOST_SESSIONS)


async def take_in(gateway: Gateway, user: Principal, sessions: Sequence[IncomingSession]) -> list[dict[str, object]]:
    """Add the turns that are missing; return the result for each session.

    `different`: the session has imported turns that this import lacks, for example after another branch was chosen.
    It stays unchanged, because two histories would be mixed.
    """
    told: list[dict[str, object]] = []
    for session in sessions:
        known = await own_session(gateway, user, session.session_id)
        name = known.session_id if known else session.session_id
        added, name = await _write(gateway, user, name, session)
        if added == -1:
            # Another user has a session of this name, as can happen with every name that a client chooses.
            added, name = await _write(gateway, user, aside(user, session.session_id), session)
        state: State = "different" if added is None else "added" if added else "there"
        told.append({"session_id": name, "state": state, "turns_added": added or 0, "turns": len(session.turns)})
    return told


async def _write(gateway: Gateway, user: Principal, name: str, session: IncomingSession) -> tuple[int | None, str]:
    """Return the number of turns added (-1: another user's session, None: `different`) and the session's id."""
    record = _record(user, name, session)
    ours = {turn.query_id for turn in record.turns["A"]}
    info = await gateway.sessions.info(name)
    if info is not None and info.user_id == user.user_id:
        turns = await gateway.sessions.every_turn(name)
        there = {one.query_id for one in turns if order(one.query_id)[1] >= _FIRST}
        if there - ours:
            return None, name
    (added,) = await write_sessions(gateway.bus, [record])
    return added, name


def _record(user: Principal, name: str, session: IncomingSession) -> SessionRecord:
    first, last = session.turns[0], session.turns[-1]
    return SessionRecord(
        session_id=name,
        user_id=user.user_id,
        title=(session.title or first.query)[:80],
        created=first.time,
        updated=last.time,
        used=last.time,
        turns={
            "A": [
                TurnRecord(query_id=_name(turn), query=turn.query, answer=turn.answer, time=turn.time)
                for turn in session.turns
            ]
        },
    )


def _name(turn: IncomingTurn) -> str:
    """Return the id of a turn, which is the same in every import."""
    said = sha256(f"{turn.time}\0{turn.query}\0{turn.answer}".encode()).digest()
    return f"{turn.time}-{_FIRST + int.from_bytes(said[:8]) % (_LAST - _FIRST)}"
