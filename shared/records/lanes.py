"""Accepting queries, and the session queues, in which a session's queries are answered one at a time.

One script accepts a query with its record, its place in the session's list and its places in the queues, or not at all.
A queue is a sorted set with the ids of unfinished queries, per session and respondent. A query that enters an empty
queue is its head, and its entry says so (`turn`). An entry without a place gets one when it is read. The replica that
finds a stale place at the head removes it: its entry is finished or gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus import Bus, Command, order
from shared.bus.keys import lane_key, once_key, queries_key, record_key, waiting_key
from shared.bus.replies import Reply, checked
from shared.contracts import QUERY_RECEIVED, Outgoing, RespondentId
from shared.records.lua import script
from shared.telemetry.unread import not_understood

RESPONDENTS: tuple[RespondentId, ...] = ("A", "B")
# The consumer group of each respondent.
GROUPS: dict[str, str] = {"A": "generator", "B": "respondent-b"}

_STREAM = QUERY_RECEIVED.stream
# The prefix of the records' keys.
_RECORDS = record_key("")

_ACCEPT = script("accept_query", "before", "finished")

_TURN = script("take_turn", "before", "finished")

_OPEN = script("list_unfinished", "before", "finished")

_LEAVE = script("leave_lane")


def lane_keys(session_id: str) -> list[str]:
    """Return the keys of a session's queues and of its list of queries."""
    lanes = [key(session_id, respondent) for respondent in RESPONDENTS for key in (lane_key, waiting_key)]
    return [queries_key(session_id), *lanes]


def padded(query_id: str) -> str:
    """Return an id in a form whose lexical order is the order of ids."""
    ms, seq = order(query_id)
    return f"{ms:015d}-{seq:010d}"


def plain(member: bytes) -> str:
    ms, _, seq = member.decode().partition("-")
    return f"{int(ms)}-{int(seq)}"


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted query.

    earlier: the record of an earlier query with the same once-key, if there is one: no new query was accepted then. It
    is empty if that record was deleted. unfinished: the unfinished queries of all sessions, this one included; None if
    Redis cannot count them. accepted, deadline: in ms, by Redis' clock.
    """

    query_id: str
    earlier: dict[str, str] | None = None
    unfinished: int | None = None
    accepted: int = 0
    deadline: int = 0


async def accept(
    bus: Bus,
    message: Outgoing,
    record: Mapping[str, str],
    *,
    left: float,
    seconds: int,
    session_id: str | None = None,
    respondents: Sequence[str] = (),
    limit: int = 1,
    also: Sequence[Command] = (),
) -> Accepted | None:
    """Publish a query once, with its record and its places; None if the session has `limit` unfinished queries.

    message: a query.received with its once-key. left: seconds for its answer. record: the fields of its record, which
    the script completes with the times. seconds: the record's lifetime.
    session_id, respondents: the queues in which the query gets a place; the limit counts the queue of A only.
    also: commands sent in the same write; Redis runs them even when the query is not accepted.
    """
    assert message.once is not None
    keys = [_STREAM, once_key(_STREAM, message.once), _RECORDS]
    if session_id is not None:
        keys += [queries_key(session_id), *(lane_key(respondent, session_id) for respondent in respondents)]
    words = [part for pair in record.items() for part in pair]
    entry = message.envelope.fields(bus.source)
    argv = (limit, seconds, GROUPS["A"], int(left * 1000), len(words), *words, *entry)
    found, *_ = map(checked, await bus.link.submit([_ACCEPT(keys, *argv), *also], True))
    match found:
        case [query_id, int(count), accepted, deadline]:
            unfinished = count if count >= 0 else None
            return Accepted(query_id.decode(), None, unfinished, int(accepted), int(deadline))
        case [query_id, earlier]:
            return Accepted(query_id.decode(), pairs(earlier))
    return None


def pairs(raw: Sequence[bytes]) -> dict[str, str]:
    """Return the fields and values of a hash; bytes that are not UTF-8 are replaced."""
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in zip(raw[::2], raw[1::2], strict=True)
    }


def number(values: Mapping[str, str], name: str) -> int:
    """Return the number in a field of a hash; 0 if there is none."""
    value = values.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


async def turn(bus: Bus, session_id: str, respondent_id: str, query_id: str, inbox: str) -> str | None:
    """Return the query at the head of the queue; None if it is this query.

    inbox: gets a notification when the head leaves the queue.
    """
    keys = (lane_key(respondent_id, session_id), waiting_key(respondent_id, session_id), _STREAM)
    first = await bus.link.call(*_TURN(keys, padded(query_id), inbox, GROUPS[respondent_id]))
    return plain(first) if first else None


async def leave(bus: Bus, session_id: str, respondent_id: str, query_id: str, *also: Command) -> list[Reply]:
    """Remove a query from its queue and notify the next one; return the replies to `also`, sent in the same write."""
    keys = (lane_key(respondent_id, session_id), waiting_key(respondent_id, session_id))
    inbox, *replies = await bus.link.pipe([_LEAVE(keys, padded(query_id)), *also])
    if inbox:
        wake: tuple[Any, ...] = ("type", "wake", "session", session_id, "respondent", respondent_id)
        await bus.link.call("XADD", inbox, "NOMKSTREAM", "*", *wake)
    return replies


async def unfinished(bus: Bus, session_id: str, respondent_id: str) -> list[str]:
    """Return the ids of the queries in a queue, in their order."""
    return await unfinished_of(bus, [session_id], respondent_id)


async def unfinished_of(bus: Bus, session_ids: Sequence[str], respondent_id: str) -> list[str]:
    """Return the ids of the queries in the queues of several sessions, in their order."""
    keys = [lane_key(respondent_id, session_id) for session_id in session_ids]
    lanes = await bus.link.pipe([("ZRANGE", key, 0, -1) for key in keys])
    found: set[str] = set()
    for key, members in zip(keys, lanes, strict=True):
        for member in members:
            try:
                found.add(plain(member))
            except ValueError as exc:
                not_understood(key, member.decode(errors="replace"), str(exc))
    return sorted(found, key=order)


async def awaited(bus: Bus, query_ids: Sequence[str]) -> set[str]:
    """Return the queries that respondent A has not finished, in queues or not. Users do not see B's answers."""
    return {raw.decode() for raw in await bus.link.call(*_OPEN((_STREAM,), GROUPS["A"], *query_ids))}


async def running(bus: Bus, session_id: str) -> bool:
    """Return whether a respondent works on one of the session's queries."""
    counts = await bus.link.pipe([("ZCOUNT", lane_key(r, session_id), "-inf", -1) for r in RESPONDENTS])
    return any(counts)
