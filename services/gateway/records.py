"""What the gateway keeps of an accepted query: whose it is and until when it must be answered."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.errors import ApiError, not_found
from services.gateway.gateway import Gateway
from services.gateway.keys import Principal
from shared.bus import Command
from shared.contracts import PREFIX
from shared.errors import BusUnavailable

# What Redis takes as a stream id, with room for the arithmetic on it.
_ENTRY_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")
_QUERY_ID = re.compile(r"[0-9]{1,15}-[0-9]{1,10}")
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")
SESSION_RULE = "1 to 128 letters, digits and . _ : @ + = -, beginning with a letter or digit"


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """`accepted` and `deadline` are in ms since the epoch."""

    query_id: str
    user_id: str
    session_id: str
    query: str
    mode: str
    accepted: int
    deadline: int


def record_key(query_id: str) -> str:
    return f"{PREFIX}query:{query_id}"


def cancel_key(query_id: str) -> str:
    """Set when the query was cancelled: for owners that were away when it was announced."""
    return f"{PREFIX}cancel:{query_id}"


def storing(record: QueryRecord, retention: int) -> list[Command]:
    key = record_key(record.query_id)
    seconds = max(1, (record.deadline - record.accepted) // 1000) + retention
    return [
        (
            *("HSET", key, "user_id", record.user_id, "session_id", record.session_id, "query", record.query),
            *("mode", record.mode, "accepted", record.accepted, "deadline", record.deadline),
        ),
        ("EXPIRE", key, seconds),
    ]


async def load(gateway: Gateway, query_id: str) -> QueryRecord | None:
    raw = await gateway.bus.link.call("HGETALL", record_key(query_id))
    if not raw:
        return None
    values = {name.decode(): value.decode() for name, value in zip(raw[::2], raw[1::2], strict=True)}
    return QueryRecord(
        query_id=query_id,
        user_id=values.get("user_id", ""),
        session_id=values.get("session_id", ""),
        query=values.get("query", ""),
        mode=values.get("mode", "chat"),
        accepted=int(values.get("accepted", 0)),
        deadline=int(values.get("deadline", 0)),
    )


async def forgotten(gateway: Gateway, query_id: str) -> bool:
    """True when nothing is kept of a query any more: its session was deleted, or Redis lost its data."""
    try:
        async with gateway.reachable():
            return not await gateway.bus.link.call("EXISTS", record_key(query_id))
    except BusUnavailable:
        return False


async def owned(gateway: Gateway, principal: Principal, query_id: str) -> QueryRecord:
    """The user's own query. Raises ApiError 404 for every other one, existing or not."""
    record = await load(gateway, query_id) if _QUERY_ID.fullmatch(query_id) else None
    if record is None or record.user_id != principal.user_id:
        raise not_found("query, or its time of keeping is over")
    return record


def checked_entry_id(value: str | None, name: str) -> str | None:
    """A stream entry id as given by a client. Raises ApiError 400."""
    if value is None or _ENTRY_ID.fullmatch(value):
        return value
    raise ApiError(400, "bad_event_id", f"{name} must be the id of an event, like 1-15")


def is_session_id(value: str) -> bool:
    return _SESSION_ID.fullmatch(value) is not None
