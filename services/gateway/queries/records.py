"""The record of an accepted query, with its user and its deadline, and the sessions of a user."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal, digest
from shared.bus.keys import record_key
from shared.errors import BusUnavailable
from shared.records.lanes import number, pairs
from shared.records.sessions import SessionInfo

# Stream ids that Redis accepts, with room for arithmetic.
_ENTRY_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")
_QUERY_ID = re.compile(r"[0-9]{1,15}-[0-9]{1,10}")
# The end of a session's name that is reserved for one user.
_ASIDE = re.compile(r"@[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """The record of an accepted query.

    asked: the digest of the whole request.
    given: what else the route stores of the request, as JSON.
    after: the previous turn is the newest that was not accepted after this one; empty: the newest of all.
    accepted, deadline: in ms since the epoch, by the clock of the bus.
    """

    query_id: str
    user_id: str = ""
    session_id: str = ""
    query: str = ""
    mode: str = "chat"
    asked: str = ""
    given: str = ""
    after: str = ""
    accepted: int = 0
    deadline: int = 0

    def stored(self) -> dict[str, str]:
        """Return the fields of the record's hash; the bus adds the times."""
        return {name: value for name in _STORED if (value := getattr(self, name))}

    @classmethod
    def parse(cls, query_id: str, values: Mapping[str, str]) -> Self:
        """Return the record of a hash, with defaults for missing and unreadable fields."""
        found: dict[str, Any] = {name: values[name] for name in _STORED if name in values}
        found |= {name: number(values, name) for name in _TIMES}
        return cls(query_id, **found)


_TIMES = ("accepted", "deadline")
_STORED = tuple(one.name for one in fields(QueryRecord) if one.name not in ("query_id", *_TIMES))


async def load(gateway: Gateway, query_id: str) -> QueryRecord | None:
    raw = await gateway.bus.link.call("HGETALL", record_key(query_id))
    return QueryRecord.parse(query_id, pairs(raw)) if raw else None


async def forgotten(gateway: Gateway, query_id: str) -> bool:
    """Return whether a query's record is gone: its session was deleted, or Redis lost its data."""
    try:
        async with gateway.reachable():
            return not await gateway.bus.link.call("EXISTS", record_key(query_id))
    except BusUnavailable:
        return False


async def owned(gateway: Gateway, principal: Principal, query_id: str, what: str = "query") -> QueryRecord:
    """Return the user's own query. Raises ApiError 404 for all others, existing or not. what: the word in the error."""
    record = await load(gateway, query_id) if is_query_id(query_id) else None
    if record is None or record.user_id != principal.user_id:
        raise not_found(f"{what}, or its time of keeping is over")
    return record


def checked_entry_id(value: str | None, name: str) -> str | None:
    """Return a client's stream entry id. Raises ApiError 400 for a malformed one."""
    if value is None or _ENTRY_ID.fullmatch(value):
        return value
    raise ApiError(400, "bad_event_id", f"{name} must be the id of an event, like 1-15")


async def own_session(gateway: Gateway, principal: Principal, name: str) -> SessionInfo | None:
    """Return the user's session of that name; None if there is none.

    Clients choose names. If another user has the name already, this user's session is stored under a name made of both,
    which no other user can open.
    """
    found = await asyncio.gather(gateway.sessions.info(aside(principal, name)), gateway.sessions.info(name))
    return next((info for info in found if info is not None and info.user_id == principal.user_id), None)


async def open_session(gateway: Gateway, principal: Principal, name: str, title: str) -> str:
    """Return the id of the user's session of that name; create a missing session."""
    return (await opened(gateway, principal, name, title))[0]


async def opened(gateway: Gateway, principal: Principal, name: str, title: str) -> tuple[str, SessionInfo | None]:
    """Return the same id, and the session as it was before; None if it is new."""
    known, other = await own_session(gateway, principal, name), aside(principal, name)
    usual = [other] if _ASIDE.search(name) else [name, other]
    for session_id in [known.session_id] if known else usual:
        if await gateway.sessions.open(session_id, principal.user_id, title) == principal.user_id:
            return session_id, known
    raise not_found("session")


def aside(principal: Principal, name: str) -> str:
    return f"{name[:60]}@{digest(f'{principal.user_id} {name}')}"


def is_query_id(value: str) -> bool:
    return _QUERY_ID.fullmatch(value) is not None
