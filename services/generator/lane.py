"""Waiting for the turn in a session: its queries are answered in the order accepted, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from shared.contracts import QUERY_RECEIVED
from shared.participant.service import Context
from shared.records.sessions import Sessions

# A look without being woken; a wake may be lost with its sender.
_RECHECK = 1.0
# The gateway is about to publish an earlier query, or its ticket is about to run out.
_TICKET_RECHECK = 0.02


class Lanes:
    def __init__(self, context: Context[Any], sessions: Sessions, respondent_id: str) -> None:
        self._context = context
        self._sessions = sessions
        self._respondent = respondent_id
        self._waiters: dict[str, set[asyncio.Event]] = {}
        context.on_inbox("wake", self._wake)

    def _wake(self, raw: Mapping[bytes, bytes]) -> None:
        for event in self._waiters.get(raw.get(b"session", b"").decode(), ()):
            event.set()

    async def mine(self, session_id: str, query_id: str, ticket: str | None) -> bool:
        """True when the query may run now."""
        return await self._ask(session_id, query_id, ticket) is None

    async def wait(self, session_id: str, query_id: str, ticket: str | None) -> None:
        """Returns when the query may run."""
        # an event of its own for each waiting query: shared, the first to wake would take it from the others
        event = asyncio.Event()
        waiters = self._waiters.setdefault(session_id, set())
        waiters.add(event)
        try:
            while (before := await self._ask(session_id, query_id, ticket)) is not None:
                if before and await self._gone(before):
                    await self._sessions.release(session_id, self._respondent, before)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECHECK if before else _TICKET_RECHECK):
                        await event.wait()
                event.clear()
        finally:
            waiters.discard(event)
            if not waiters:
                del self._waiters[session_id]

    async def leave(self, session_id: str, query_id: str) -> None:
        """Gives the turn to the next; its replica is woken."""
        await self._sessions.release(session_id, self._respondent, query_id)

    async def _ask(self, session_id: str, query_id: str, ticket: str | None) -> str | None:
        return await self._sessions.turn(session_id, self._respondent, query_id, ticket, self._context.inbox)

    async def _gone(self, query_id: str) -> bool:
        """True when the query before is finished for our group, but never left the lane."""
        return await self._context.bus.finished(QUERY_RECEIVED.stream, self._context.participant, query_id)
