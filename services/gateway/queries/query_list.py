"""A user's queries: the running ones, and the outcome of the others while their data is stored."""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal
from services.gateway.http.session_ids import is_session_id
from services.gateway.queries.records import QueryRecord, load, own_session
from services.gateway.queries.view import error_of
from shared.bus import order
from shared.bus.keys import journal_key, queries_key
from shared.records import lanes
from shared.records.events import Failed
from shared.records.journal import TERMINAL, EntryType, read_end
from shared.records.sessions import SessionInfo, words_of
from shared.records.steps import read_unanswered

# The latest used sessions that are searched for running queries.
_RECENT = 50
# The most queries of one session that are read.
_MOST = 200


async def listed(
    gateway: Gateway, user: Principal, session_id: str | None, state: str | None, limit: int
) -> list[dict[str, Any]]:
    """Return the newest queries, at most `limit`, oldest first; none of another user's session."""
    if session_id is None:
        recent = await gateway.sessions.of_user(user.user_id, _RECENT)
        ids = await lanes.unfinished_of(gateway.bus, [info.session_id for info in recent], "A")
        kept: list[dict[str, Any]] = []
    else:
        info = await own_session(gateway, user, session_id) if is_session_id(session_id) else None
        if info is None:
            return []
        session_id = info.session_id
        ids, kept = await _of(gateway, info, state)
    shown = await asyncio.gather(*(_shown(gateway, user, session_id, query_id) for query_id in ids[-_MOST:]))
    found = {one["query_id"]: one for one in [*kept, *shown] if one is not None and _is(one["state"], state)}
    return sorted(found.values(), key=lambda one: order(one["query_id"]))[-limit:]


def _is(state: str, wanted: str | None) -> bool:
    return wanted is None or state == wanted or (wanted == "running" and state == "queued")


async def _of(gateway: Gateway, info: SessionInfo, state: str | None) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the session's queries that may have records, and its unanswered queries, which the session stores."""
    bus, session_id = gateway.bus, info.session_id
    waiting = set(await lanes.unfinished(bus, session_id, "A"))
    if state == "running":
        return sorted(waiting, key=order), []
    waiting |= {raw.decode() for raw in await bus.link.call("ZRANGE", queries_key(session_id), 0, -1)}
    unanswered = await read_unanswered(bus, session_id)
    kept = [{"query_id": query_id, "session_id": session_id, "accepted": order(query_id)[0], **why.model_dump(),
             "query": words_of(why.query)}
            for query_id, why in unanswered.items()]  # fmt: skip
    return sorted(waiting, key=order), kept


async def _shown(gateway: Gateway, user: Principal, session_id: str | None, query_id: str) -> dict[str, Any] | None:
    """Return a query for a client; None if its record has expired, and for background queries of a session."""
    record, end = await asyncio.gather(load(gateway, query_id), read_end(gateway.bus, journal_key(query_id, "A")))
    if record is None or record.user_id != user.user_id or session_id not in (None, record.session_id):
        return None
    shown = _told(record)
    if not end:
        # Its journal may have expired before the record.
        return shown if gateway.bus.left(record.deadline, query_id) >= 0 else None
    first = end[0]
    shown["state"] = str(first.type) if first.type in TERMINAL else "running"
    if first.type is EntryType.FAILED and isinstance(failed := first.typed().event, Failed):
        shown["error"] = error_of(failed)
    return shown


def _told(record: QueryRecord) -> dict[str, Any]:
    return {
        "query_id": record.query_id,
        "session_id": record.session_id,
        "state": "queued",
        "query": words_of(record.query),
        "mode": record.mode,
        "accepted": record.accepted,
        "after": record.after or None,
    }
