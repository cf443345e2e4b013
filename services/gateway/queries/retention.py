"""What the gateway keeps how long: sessions, with all that was said in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from services.gateway.http.gateway import Gateway
from services.gateway.queries.deletion import end_session
from shared.bus import Bus, order
from shared.bus.keys import session_key
from shared.llm.preemption import answering
from shared.participant.retention import Census, Kind, Retention
from shared.records import lanes
from shared.records.lanes import pairs
from shared.records.session_records import session_ids
from shared.records.sessions import SessionInfo


def retention(gateway: Gateway) -> Retention:
    sessions = Kind("sessions", "keep_days_sessions", partial(_census, gateway), partial(_remove, gateway))
    return Retention(gateway.context, [sessions], answering(gateway.bus))


async def _census(gateway: Gateway, before: int) -> Census:
    """Pinned ones are kept, and never due."""
    kept, due, oldest = 0, 0, list[int]()
    async for page in _sessions(gateway.bus):
        kept += len(page)
        due += sum(_due(info, before) for info in page)
        oldest = [min([*oldest, *(info.updated for info in page)])] if page or oldest else []
    return Census(kept, min(oldest, default=None), due)


async def _remove(gateway: Gateway, before: int) -> AsyncGenerator[int, None]:
    async for page in _sessions(gateway.bus):
        for found in page:
            # as it is now: somebody may have come back to it
            info = await gateway.sessions.info(found.session_id) if _due(found, before) else None
            if info is None or not _due(info, before) or await _in_use(gateway, info, before):
                continue
            await end_session(gateway, info)
            yield 1


async def _in_use(gateway: Gateway, info: SessionInfo, before: int) -> bool:
    """Whether something waits for its answer, or was asked later than the session says: its time is that of a host's
    clock, which may have been wrong."""
    if await lanes.unfinished(gateway.bus, info.session_id, "A"):
        return True
    page = await gateway.sessions.page(info.session_id, "A", 1)
    return any(order(turn.query_id)[0] >= before for turn in page.turns)


def _due(info: SessionInfo, before: int) -> bool:
    # what cannot be read of it makes nothing due
    return bool(info.user_id) and not info.pinned and 0 < info.updated < before


async def _sessions(bus: Bus) -> AsyncIterator[list[SessionInfo]]:
    """All sessions of all users, each once."""
    seen = set[str]()
    async for ids in session_ids(bus):
        fresh = [one for one in dict.fromkeys(ids) if one not in seen]
        seen.update(fresh)
        # one key that is no hash must not keep the others from being read
        raw = await bus.link.pipe_raw([("HGETALL", session_key(one)) for one in fresh])
        found = [(one, values) for one, values in zip(fresh, raw, strict=True) if isinstance(values, list) and values]
        yield [SessionInfo.parse(one, pairs(values)) for one, values in found]
