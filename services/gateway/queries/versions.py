"""A question that replaces another one of its session.

The same words again are a further version: both stay in the session, each with its later turns, and the conversation
continues from the newer one. Other words are a correction: the other question is removed, with its later turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway
from services.gateway.http.participant_rpc import there_still
from services.gateway.queries.cancel import cancel_all
from services.gateway.queries.deletion import STOPPING, forget_queries
from services.gateway.queries.event_log import happened
from services.gateway.queries.history import normal
from services.gateway.queries.records import QueryRecord, is_query_id, load
from shared.bus import order
from shared.bus.keys import queries_key
from shared.records import lanes
from shared.records.journal import EntryType
from shared.records.sessions import SessionInfo, Turn, before
from shared.records.steps import read_unanswered

_LOOK = 0.02


def parents(turns: Sequence[Turn]) -> dict[str, str]:
    """Return the turn before each turn; empty if it begins a conversation. turns: all of a session, oldest first."""
    found: dict[str, str] = {}
    last = ""
    for at, turn in enumerate(turns):
        if turn.after:
            bound = order(turn.after)
            last = next((one.query_id for one in reversed(turns[:at]) if order(one.query_id) <= bound), "")
        found[turn.query_id] = last
        last = turn.query_id
    return found


def replacements_of(turns: Sequence[Turn], query_id: str) -> list[str]:
    """Return a turn with its versions and all their later turns; [] for an unknown turn."""
    known = parents(turns)
    if query_id not in known:
        return []
    gone = {one for one, parent in known.items() if parent == known[query_id]}
    for one, parent in known.items():
        # Each turn is newer than its predecessor, so one pass is enough.
        if parent in gone:
            gone.add(one)
    return [one for one in known if one in gone]


def tip_of(turns: Sequence[Turn], query_id: str) -> str | None:
    """Return the newest turn of the conversations that continue a turn; None for an unknown turn."""
    known = parents(turns)
    if query_id not in known:
        return None
    behind = {query_id}
    for one, parent in known.items():
        if parent in behind:
            behind.add(one)
    return max(behind, key=order)


async def branch_point(gateway: Gateway, session_id: str, user_id: str, instead_of: str) -> str:
    """Return the id of the query before the one that is replaced. Raises ApiError 400, 404 and BusUnavailable."""
    if not is_query_id(instead_of):
        raise ApiError(400, "bad_query_id", "instead_of must be the id of a query, like 1700000000000-0")
    asked = await _asked(gateway, session_id, user_id, instead_of)
    if asked is None:
        raise not_found("query in this session")
    return asked[1]


async def files_of_query(gateway: Gateway, info: SessionInfo, query_id: str) -> list[dict[str, Any]] | None:
    """Return the files of a query of the session, without deleted ones. Raises ApiError 503 while the memory is away,
    and BusUnavailable."""
    turn = await gateway.sessions.turn(info.session_id, "A", query_id)
    attached = list(turn.attachments) if turn is not None else []
    if turn is None and (found := await happened(gateway, info, query_id)) is not None:
        # A query without an answer has its files in the journal.
        claims = [entry["data"] for entry in found["journal"] if entry["event"] == EntryType.CLAIMED]
        attached = list(claims[0].get("attachments") or ()) if claims else []
    return await there_still(gateway, info.user_id, [str(file["id"]) for file in attached]) or None


async def _asked(gateway: Gateway, session_id: str, user_id: str, query_id: str) -> tuple[str, str] | None:
    """Return the text of a query of the session and the id after which it was asked; None for another query."""
    turn, record, unanswered = await asyncio.gather(
        gateway.sessions.turn(session_id, "A", query_id),
        load(gateway, query_id),
        read_unanswered(gateway.bus, session_id),
    )
    if record is not None and (record.session_id, record.user_id) != (session_id, user_id):
        record = None
    found = turn or record or unanswered.get(query_id)
    return (found.query, found.after or before(query_id)) if found else None


async def supersede(gateway: Gateway, record: QueryRecord, instead_of: str) -> None:
    """Cancel the unanswered queries from the replaced one on, and remove the turns that had other words.

    A turn that another question has replaced meanwhile is found by its successor. A repeat changes nothing. Raises
    BusUnavailable.
    """
    bus, session_id = gateway.bus, record.session_id
    between = (order(instead_of), order(record.query_id))
    waiting = [one for one in await lanes.unfinished(bus, session_id, "A") if between[0] <= order(one) < between[1]]
    await cancel_all(gateway, waiting)
    asked = await _asked(gateway, session_id, record.user_id, instead_of)
    said = normal(record.query)
    if asked is not None and normal(asked[0]) == said:
        return
    # A stopped answer becomes an interrupted turn: wait for it.
    until = asyncio.get_running_loop().time() + STOPPING
    while late := set(waiting) & set(await lanes.unfinished(bus, session_id, "A")):
        if asyncio.get_running_loop().time() >= until:
            # First: respondents that end a query after this remove its data. Check again for those that ended before.
            await gateway.sessions.take_back(sorted(late))
            late &= set(await lanes.unfinished(bus, session_id, "A"))
            break
        await asyncio.sleep(_LOOK)
    # The new question may be answered by now, and has the same place.
    turns = [one for one in await gateway.sessions.every_turn(session_id) if order(one.query_id) < between[1]]
    there = [one.query_id for one in turns if one.after and one.after == record.after and normal(one.query) != said]
    gone = replacements_of(turns, next(iter(there), instead_of))
    # Questions without an answer, in its place or after it.
    listed = {raw.decode() for raw in await bus.link.call("ZRANGE", queries_key(session_id), 0, -1)}
    listed |= (await read_unanswered(bus, session_id)).keys()
    loose = [one for one in listed - {turn.query_id for turn in turns} if between[0] <= order(one) < between[1]]
    # A query that has left its queue may not be acknowledged yet.
    if leaving := [*gone, *(set(loose) - (await lanes.awaited(bus, loose) - set(waiting)))]:
        await forget_queries(gateway, record.user_id, session_id, leaving, late)
        # The turns last: until then an interrupted change can be repeated.
        await gateway.sessions.bring(session_id, leaving, [])
