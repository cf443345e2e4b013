"""Who answers users has the machine first: what memory takes in meanwhile is done in short turns with long rests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shared.bus import ReplyError
from shared.errors import TransientError
from shared.participant.service import Context

Answering = Callable[[], Awaitable[bool]]
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

ANSWERERS = frozenset({"generator", "respondent-b"})
# Meanwhile a turn has at most so many engrams. A rest is so many times as long as the turn before it, but no longer
# than these seconds.
FEW = 16
REST = 3.0
LONGEST = 0.5


def answering(context: Context[Any]) -> Answering:
    """Whether somebody answers a user just now, as far as the registry knows (a heartbeat late)."""

    async def any_in_flight() -> bool:
        try:
            replicas = await context.registry.replicas()
        except (TransientError, ReplyError):
            return False
        return any(one.in_flight for one in replicas if one.participant in ANSWERERS)

    return any_in_flight


class Pace:
    """Turns and rests of everybody who shares it. What comes when no rest is due does not wait."""

    def __init__(self, answering: Answering, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep) -> None:
        self._answering = answering
        self._clock = clock
        self._sleep = sleep
        self._rests_until = 0.0

    async def turn(self, most: int) -> tuple[int, float]:
        """Waits until the rest is over; how many engrams the turn may have (of `most`), and when it began."""
        while (left := self._rests_until - self._clock()) > 0:
            await self._sleep(left)
        return min(most, FEW) if await self._answering() else most, self._clock()

    async def done(self, began: float) -> None:
        """Call it after the turn."""
        if await self._answering():
            now = self._clock()
            # for turns at the same time the rests are one after the other
            self._rests_until = max(self._rests_until, now) + min(REST * (now - began), LONGEST)
