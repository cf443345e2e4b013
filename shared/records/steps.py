"""The record of each query of a session, which stays as long as the session; journals expire after a day.

One hash of the session has, by query id, the compacted journal (`shared.records.compaction`). Beside it are the later
judgements of the answer. A record is written once, with the journal's terminal entry. It is removed with the turn or
the session, and nothing restores it later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict

from shared.bus import Bus, Command, order
from shared.bus.keys import deleted_key, journal_key, session_key, steps_key, turns_key
from shared.contracts import QueryReceived
from shared.errors import DecodeError
from shared.records.compaction import Event, bounded, compacted, parse
from shared.records.events import LATE, TERMINAL, Completed, Failed, KnownEvent, Unknown, shown
from shared.records.journal import (
    append_after,
    read_journal,
)
from shared.records.lanes import padded
from shared.records.lua import script
from shared.records.response_state import replay
from shared.records.sessions import Sessions, Turn
from shared.telemetry.unread import not_understood

# Users see only A's answers.
_SHOWN = "A"
_UNANSWERED = "unanswered"
# More than a session has unanswered queries: one HSCAN returns them all.
_SCAN = 100_000

_KEEP = script("store_steps", "before", "deleted")

_JUDGE = script("store_judgement", "before", "deleted")


class Unanswered(BaseModel):
    """A question without an answer. error: the failure's code and message."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    query: str
    mode: str = "chat"
    after: str | None = None
    state: Literal["failed", "cancelled"]
    error: dict[str, str] | None = None


def keeping(session_id: str, query_id: str, events: Sequence[Event], why: Unanswered | None = None) -> Command:
    """Return the command that stores the record of a query; a repeat changes nothing. why: if there is no answer."""
    keys = (session_key(session_id), deleted_key(session_id), steps_key(session_id))
    return _KEEP(keys, query_id, bounded(events), why.model_dump_json() if why else "")


def unanswered(query: QueryReceived, end: KnownEvent) -> Unanswered | None:
    """Return the question as unanswered; None if it has an answer, or if its client has the history."""
    if isinstance(end, Completed) or query.messages is not None:
        return None
    said = {"query": query.query, "mode": query.mode, "after": query.after}
    if isinstance(end, Failed):
        return Unanswered(state="failed", error={"code": end.code, "message": end.message}, **said)
    return Unanswered(state="cancelled", **said)


async def keep_ended(bus: Bus, query: QueryReceived, query_id: str) -> None:
    """Store the record of a query whose journal has ended: its owner may have died before it stored the record."""
    journal = await read_journal(bus, journal_key(query_id, _SHOWN))
    state = replay(entry.typed() for entry in journal if entry.type not in LATE)
    if state.end is None or isinstance(state.end.event, Unknown):
        return
    turn = await Sessions(bus).turn(query.session_id, _SHOWN, query_id)
    why = None if turn else unanswered(query, state.end.event)
    if turn or why:
        events = compacted(state, turn.answer if turn else None)
        await bus.link.call(*keeping(query.session_id, query_id, events, why))


async def tell_after(
    bus: Bus,
    session_id: str,
    response: str,
    event: KnownEvent,
    *,
    message_id: str,
    once: str,
) -> None:
    """Append a later judgement of a response (critique, pairwise, reward) to its journal, and store it in its session.

    The session has the newest judgement of each type, for respondent A only. message_id: the entry id of the message
    that the participant published; judgements are ordered by it. once: the idempotency key in the journal.
    """
    query_id, _, respondent = response.rpartition(":")
    await append_after(bus, journal_key(query_id, respondent), event, once=once)
    if respondent != _SHOWN:
        return
    # The answer of another program is in no session.
    with contextlib.suppress(ValueError, DecodeError):
        keys = (session_key(session_id), deleted_key(session_id), steps_key(session_id), turns_key(session_id, _SHOWN))
        place, value = f"{padded(query_id)} ", orjson.dumps([shown(event), message_id])
        await bus.link.call(*_JUDGE(keys, query_id, place, event.type.value, value))


async def read_steps(bus: Bus, session_id: str, turn: Turn | None, query_id: str) -> list[Event] | None:
    """Return the stored events of a query and its later judgements, oldest first; None if nothing is stored.

    turn: the query's turn, which has the answer's text.
    """
    fields = [query_id, *(f"{query_id} {kind.value}" for kind in _LATE)]
    record, *late = await bus.link.call("HMGET", steps_key(session_id), *fields)
    try:
        events = parse(record) if record is not None else []
    except ValueError as exc:
        not_understood(steps_key(session_id), query_id, str(exc), record)
        events = []
    if turn is not None:
        events = [(one, kind, {"answer": turn.answer, **data} if kind in TERMINAL else data)
                  for one, kind, data in events]  # fmt: skip
    judged = [(kind, *said) for kind, raw in zip(_LATE, late, strict=True) if (said := _said(query_id, raw))]
    place = (0, 0)
    for kind, data, message_id in sorted(judged, key=lambda one: order(one[2])):
        # Messages of two streams may have the same id.
        place = max((place[0], place[1] + 1), order(message_id))
        events.append((f"{place[0]}-{place[1]}", kind.value, data))
    return events or None


_LATE = tuple(sorted(LATE))


def _said(query_id: str, raw: bytes | None) -> tuple[dict[str, Any], str] | None:
    if raw is None:
        return None
    try:
        data, message = orjson.loads(raw)
        # Earlier releases stored the message's subject, too.
        message_id = message if isinstance(message, str) else message[1]
        order(message_id)
        return dict(data), message_id
    except (TypeError, ValueError, LookupError, AttributeError) as exc:
        not_understood("the steps of a session", query_id, type(exc).__name__, raw)
        return None


async def read_unanswered(bus: Bus, session_id: str) -> dict[str, Unanswered]:
    """Return the session's unanswered questions by their ids."""
    _, raw = await bus.link.call("HSCAN", steps_key(session_id), 0, "MATCH", f"* {_UNANSWERED}", "COUNT", _SCAN)
    found: dict[str, Unanswered] = {}
    for name, value in zip(raw[::2], raw[1::2], strict=True):
        query_id = name.decode(errors="replace").partition(" ")[0]
        try:
            order(query_id)
            found[query_id] = Unanswered.model_validate_json(value)
        except ValueError as exc:
            not_understood("the steps of a session", query_id, type(exc).__name__, value)
    return found
