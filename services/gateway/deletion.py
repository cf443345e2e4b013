"""Deleting a session: everything of all its queries goes, whatever became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.gateway.cancel import cancel_all
from services.gateway.gateway import Gateway
from shared.bus import Bus, order
from shared.bus.keys import cancel_key, queries_key
from shared.contracts import QUERY_RECEIVED
from shared.records import lanes
from shared.records.erasing import erase, erase_dead_letters, erase_entries
from shared.records.lanes import RESPONDENTS, lane_keys
from shared.records.sessions import SessionInfo

# Seconds that a deletion may take beyond what any request may ask of the bus.
STEP = 30.0
# A respondent that is told to stop does so at once; one that is away finds out later what became of its query.
_STOPPING = 1.0
_LOOK = 0.02
_PAGE = 200


async def delete_session(gateway: Gateway, info: SessionInfo) -> list[str]:
    """Removes a session; the ids of the queries that were not answered yet, and are cancelled.

    Until its last step the session is there, so that an interrupted deletion can be repeated.
    """
    bus, session_id = gateway.bus, info.session_id
    open_ids = await lanes.unfinished(bus, session_id, "A")
    queries = await _forget(gateway, session_id)
    await gateway.sessions.delete(info)
    # what was accepted meanwhile
    late = await _forget(gateway, session_id)
    await bus.link.pipe([("UNLINK", key) for key in lane_keys(session_id)])
    if known := sorted({*queries, *late}, key=order):
        await erase_entries(bus, "session_id", session_id, known[0])
    await erase_dead_letters(bus, session_id)
    return open_ids


async def _forget(gateway: Gateway, session_id: str) -> list[str]:
    """Stops what is not finished and removes what is kept of the session's queries; their ids."""
    bus = gateway.bus
    queries = await _queries(gateway, session_id)
    if not queries:
        return []
    waiting = await _still_read(bus, queries)
    await cancel_all(gateway, waiting)
    done = set(queries) - set(waiting)
    await bus.link.pipe([("UNLINK", cancel_key(query_id)) for query_id in done])
    # a client that follows the answer is told its end
    until = asyncio.get_running_loop().time() + _STOPPING
    while waiting and await lanes.running(bus, session_id) and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(_LOOK)
    await erase(bus, queries)
    return queries


async def _queries(gateway: Gateway, session_id: str) -> list[str]:
    """All of which something may be kept; of those accepted by an earlier release, the newest answered ones."""
    bus = gateway.bus
    found = {query_id.decode() for query_id in await bus.link.call("ZRANGE", queries_key(session_id), 0, -1)}
    for respondent in RESPONDENTS:
        found.update(await lanes.unfinished(bus, session_id, respondent))
        found.update(turn.query_id for turn in await gateway.sessions.turns(session_id, respondent))
    return sorted(found, key=order)


async def _still_read(bus: Bus, queries: Sequence[str]) -> list[str]:
    """The queries whose entry a respondent may read, or is at work on."""
    await bus.trim(QUERY_RECEIVED)
    found: list[str] = []
    for start in range(0, len(queries), _PAGE):
        page = queries[start : start + _PAGE]
        there = await bus.link.pipe([("XRANGE", QUERY_RECEIVED.stream, one, one) for one in page])
        found += [query_id for query_id, entry in zip(page, there, strict=True) if entry]
    return found
