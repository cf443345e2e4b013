"""Waiting for the turn in a session: its queries are answered in the order accepted, one at a time."""

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

# A look without being woken; a wake may be lost with its sender.
_RECHECK = 1.0


class Lanes:
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

    async def mine(self, session_id: str, query_id: str) -> bool:
        """True when the query may run now."""
        return await lanes.turn(self._bus, session_id, self._respondent, query_id, self._context.inbox) is None

    async def wait(self, session_id: str, query_id: str) -> None:
        """Returns when the query may run."""
        # an event of its own for each waiting query: shared, the first to wake would take it from the others
        event = asyncio.Event()
        waiters = self._waiters.setdefault(session_id, set())
        waiters.add(event)
        try:
            while not await self.mine(session_id, query_id):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECHECK):
                        await event.wait()
                event.clear()
        finally:
            waiters.discard(event)
            if not waiters:
                del self._waiters[session_id]

    async def leave(self, session_id: str, query_id: str) -> None:
        """Gives the turn to the next; its replica is woken. What was written of a query that was deleted meanwhile is
        removed."""
        asked = deletion(session_id, query_id)
        await self._clear(
            session_id, query_id, await lanes.leave(self._bus, session_id, self._respondent, query_id, *asked)
        )

    async def clear(self, session_id: str, query_id: str) -> None:
        """Removes what was written of a query that was taken back, or whose session was deleted, meanwhile."""
        await self._clear(session_id, query_id, await self._bus.link.pipe(deletion(session_id, query_id)))

    async def _clear(self, session_id: str, query_id: str, told: Sequence[Reply]) -> None:
        if was_deleted(query_id, *told):
            await erase(self._bus, [query_id])
            await self._sessions.bring(session_id, [query_id], [])
            await erase_entries(self._bus, "correlation_id", [query_id], query_id)
