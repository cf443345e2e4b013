"""Waiting in a session's queue: queries of a session are answered one at a time, in the order accepted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from shared.bus import Reply
from shared.participant.service import Context
from shared.records import lanes
from shared.records.erasing import erase, erase_entries
from shared.records.sessions import Sessions, deletion, was_deleted

# Seconds between two checks of the queue: a wake-up is lost if its sender dies.
_RECHECK = 1.0


class SessionQueues:
    """The queues of all sessions, for the queries of one respondent at this replica."""

    def __init__(self, context: Context[Any], sessions: Sessions, respondent_id: str) -> None:
        self._context = context
        self._bus = context.bus
        self._sessions = sessions
        self._respondent = respondent_id
        self._waiters: dict[str, set[asyncio.Event]] = {}
        context.on_inbox("wake", self._wake)

    def _wake(self, _entry_id: str, raw: Mapping[bytes, bytes]) -> None:
        for event in self._waiters.get(raw.get(b"session", b"").decode(), ()):
            event.set()

    async def is_head(self, session_id: str, query_id: str) -> bool:
        """Return whether the query is first in its queue."""
        return await lanes.turn(self._bus, session_id, self._respondent, query_id, self._context.inbox) is None

    async def wait(self, session_id: str, query_id: str) -> None:
        """Wait until the query is first in its queue."""
        # One event per query: a shared one would be cleared by the first query that wakes.
        event = asyncio.Event()
        waiters = self._waiters.setdefault(session_id, set())
        waiters.add(event)
        try:
            while not await self.is_head(session_id, query_id):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECHECK):
                        await event.wait()
                event.clear()
        finally:
            waiters.discard(event)
            if not waiters:
                del self._waiters[session_id]

    async def release(self, session_id: str, query_id: str) -> None:
        """Remove the query from its queue, wake the next one, and erase the query if it was deleted meanwhile."""
        checks = deletion(session_id, query_id)
        await self._erase_if_deleted(
            session_id, query_id, await lanes.leave(self._bus, session_id, self._respondent, query_id, *checks)
        )

    async def erase_deleted(self, session_id: str, query_id: str) -> None:
        """Erase a query that was withdrawn, or whose session was deleted, meanwhile."""
        await self._erase_if_deleted(session_id, query_id, await self._bus.link.pipe(deletion(session_id, query_id)))

    async def _erase_if_deleted(self, session_id: str, query_id: str, replies: Sequence[Reply]) -> None:
        if was_deleted(query_id, *replies):
            await erase(self._bus, [query_id])
            await self._sessions.bring(session_id, [query_id], [])
            await erase_entries(self._bus, "correlation_id", [query_id], query_id)
