"""Delete a session, or queries of it, with all their data."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from services.gateway.http.gateway import Gateway
from services.gateway.queries.cancel import cancel_all
from shared.bus import Bus, order
from shared.bus.keys import cancel_key, queries_key
from shared.contracts import MEMORY_FORGET, QUERY_FORGET, QUERY_RECEIVED, MemoryForget, QueryForget
from shared.records import lanes
from shared.records.erasing import erase, erase_dead_letters, erase_entries
from shared.records.lanes import RESPONDENTS, lane_keys
from shared.records.sessions import SessionInfo

# Seconds that a deletion may take in addition to the usual time of a request.
STEP = 30.0
# Seconds to wait for respondents to stop. One that is away finds the deletion when it returns.
STOPPING = 1.0
_LOOK = 0.02
_PAGE = 200


async def end_session(gateway: Gateway, info: SessionInfo) -> list[str]:
    """Remove a session and the data that participants store of it; return the ids of the cancelled queries."""
    bus, session_id = gateway.bus, info.session_id
    # First, and on the bus: a participant that is away now reads it when it returns.
    ended = MemoryForget(user_id=info.user_id, session_id=session_id, at=await bus.server_time())
    await bus.publish(MEMORY_FORGET.of(ended, user_id=info.user_id, session_id=session_id))
    return await delete_session(gateway, info)


async def delete_session(gateway: Gateway, info: SessionInfo) -> list[str]:
    """Remove a session; return the ids of the unanswered queries, which are cancelled."""
    return await delete_sessions(gateway, [info])


async def delete_sessions(gateway: Gateway, infos: Sequence[SessionInfo]) -> list[str]:
    """Remove sessions; return the ids of their unanswered queries, which are cancelled.

    Reading the streams is most of the work, so one pass serves all sessions. Each session stays until its data is
    removed: an interrupted deletion can be repeated.
    """
    bus, session_ids = gateway.bus, [info.session_id for info in infos]
    open_ids = await lanes.unfinished_of(bus, session_ids, "A")
    queries = await _forget(gateway, session_ids)
    await _sweep(bus, session_ids, queries)
    for info in infos:
        await gateway.sessions.delete(info)
    # A gateway may have accepted queries during the deletion.
    if late := sorted(set(await _forget(gateway, session_ids)) - set(queries), key=order):
        await _sweep(bus, session_ids, late)
    await bus.link.pipe([("UNLINK", key) for session_id in session_ids for key in lane_keys(session_id)])
    return open_ids


async def _sweep(bus: Bus, session_ids: Sequence[str], queries: Sequence[str]) -> None:
    """Remove the streams' entries of sessions, as far as possible. queries: those of the sessions, oldest first."""
    if queries:
        await erase_entries(bus, "session_id", session_ids, queries[0])
    await erase_dead_letters(bus, "session_id", session_ids)


async def forget_queries(
    gateway: Gateway, user_id: str, session_id: str, query_ids: Sequence[str], late: Collection[str] = ()
) -> None:
    """Cancel queries of a session and remove their data, except the turns. A repeat changes nothing.

    First a message asks the other participants to remove their data. late: queries that do not stop; their respondent
    removes the data when it finds that they were taken back.
    """
    bus = gateway.bus
    queries = sorted(query_ids, key=order)
    # One message has as many queries as every store can remove.
    for start in range(0, len(queries), _PAGE):
        gone = QueryForget(
            user_id=user_id, session_id=session_id, queries=queries[start : start + _PAGE], at=bus.now_ms()
        )
        await bus.publish(QUERY_FORGET.of(gone, user_id=user_id, session_id=session_id))
    await cancel_all(gateway, await still_read(bus, queries))
    await gateway.sessions.take_back(queries)
    await bus.link.call("ZREM", queries_key(session_id), *queries)
    if ended := [query_id for query_id in queries if query_id not in late]:
        await erase(bus, ended)
        await erase_entries(bus, "correlation_id", ended, ended[0])
        await erase_dead_letters(bus, "correlation_id", ended)


async def _forget(gateway: Gateway, session_ids: Sequence[str]) -> list[str]:
    """Stop unfinished queries, close the sessions, remove the data of their queries; return the ids, oldest first."""
    bus = gateway.bus
    queries = sorted({one for session_id in session_ids for one in await _queries(gateway, session_id)}, key=order)
    if queries:
        waiting = await still_read(bus, queries)
        await cancel_all(gateway, waiting)
        await bus.link.pipe([("UNLINK", cancel_key(query_id)) for query_id in set(queries) - set(waiting)])
        # Let subscribed clients read the end of the answer: in a closed session the respondent removes it at once.
        until = asyncio.get_running_loop().time() + STOPPING
        while waiting and await _running(bus, session_ids) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK)
        await gateway.sessions.take_back(waiting)
    for session_id in session_ids:
        await gateway.sessions.close(session_id)
    await erase(bus, queries)
    return queries


async def _running(bus: Bus, session_ids: Sequence[str]) -> bool:
    """Return whether a respondent is answering a query of these sessions."""
    for session_id in session_ids:
        if await lanes.running(bus, session_id):
            return True
    return False


async def _queries(gateway: Gateway, session_id: str) -> list[str]:
    """Return the session's queries that may have data; of other programs' queries, the newest answered ones."""
    bus = gateway.bus
    found = {query_id.decode() for query_id in await bus.link.call("ZRANGE", queries_key(session_id), 0, -1)}
    for respondent in RESPONDENTS:
        found.update(await lanes.unfinished(bus, session_id, respondent))
        found.update(turn.query_id for turn in (await gateway.sessions.page(session_id, respondent)).turns)
    return sorted(found, key=order)


async def still_read(bus: Bus, queries: Sequence[str]) -> list[str]:
    """Return the queries whose entry a respondent works on or may still read."""
    await bus.trim(QUERY_RECEIVED)
    found: list[str] = []
    for start in range(0, len(queries), _PAGE):
        page = queries[start : start + _PAGE]
        there = await bus.link.pipe([("XRANGE", QUERY_RECEIVED.stream, one, one) for one in page])
        found += [query_id for query_id, entry in zip(page, there, strict=True) if entry]
    return found
