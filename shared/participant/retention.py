"""What is kept how long: whoever keeps a kind of thing removes what is older than its setting says.

Nothing is removed unasked: 0 days, the default of every kind, is for ever. How old something is is told by the bus's
clock, and that is believed only after it has been watched for a while beside one that nobody sets: a clock that was put
wrong and right again makes nothing due.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.telemetry.logging import get_logger

if TYPE_CHECKING:
    from shared.participant.service import Context

log = get_logger()

DAY_MS = 86_400_000
_LOOK_SECONDS = 60.0
_ROUND_SECONDS = 6 * 3_600.0
# A clock is believed that went as time goes for so many seconds, …
_WATCHED = 600.0
# … and that is a clock which never was so many seconds away from where it had to be.
_ASTRAY = 60.0
# While somebody is being answered, a step waits so many seconds at most, and looks again after so many.
_PATIENCE, _REST = 30.0, 0.5


@dataclass(frozen=True, slots=True)
class Census:
    """How many there are, since when the oldest is there (ms since the epoch; None: there are none), and how many of
    them are due."""

    kept: int
    oldest: int | None
    due: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Things of one kind that a participant keeps.

    setting: the run-time setting with the days that they are kept. census, remove: of what is older than a moment in ms
    since the epoch; `remove` removes a few at a time, and says each time how many those were.
    """

    name: str
    setting: str
    census: Callable[[int], Awaitable[Census]]
    remove: Callable[[int], AsyncGenerator[int, None]]


class WatchedClock:
    """For how long another clock has gone as time goes.

    monotonic: seconds of a clock that nobody sets.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since = self._ahead = float("inf")

    def look(self, now: int) -> float:
        """Seconds for which it has, at a look at which it shows `now` (ms); 0 when it begins anew."""
        at = self._monotonic()
        ahead = now / 1000 - at
        # a machine that slept looks the same, and is watched again
        if not abs(ahead - self._ahead) <= _ASTRAY:
            self._since, self._ahead = at, ahead
        return at - self._since


class Retention:
    """Removes what is due, in one replica of the participant.

    answering: how many people wait for an answer just now; while any does, the next step waits a while.
    """

    def __init__(
        self,
        context: Context[Any],
        kinds: Sequence[Kind],
        answering: Callable[[], Awaitable[int]],
        clock: WatchedClock | None = None,
    ) -> None:
        self._context = context
        self._kinds = kinds
        self._answering = answering
        self._clock = clock or WatchedClock()
        self._next = float("-inf")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Looks at the clock, and removes what is due when it is time for that."""
        bus = self._context.bus
        await bus.learn_time()
        now = bus.now_ms()
        watched = self._clock.look(now)
        if watched < _WATCHED:
            # whatever was due before the clock was put anew
            self._next = float("-inf")
            return
        if watched >= self._next and await self._first():
            for kind in self._kinds:
                await self._remove(kind, now)
            self._next = watched + _ROUND_SECONDS

    async def shown(self, days: int | None = None) -> list[dict[str, Any]]:
        """Each kind with what there is, and what would go now, or if its setting were `days`."""
        bus = self._context.bus
        await bus.learn_time()
        found = []
        for kind in self._kinds:
            kept = self._days(kind)
            asked = kept if days is None else days
            census = await kind.census(bus.now_ms() - asked * DAY_MS)
            found.append(
                {
                    "kind": kind.name,
                    "participant": self._context.participant,
                    "setting": kind.setting,
                    "keep_days": kept,
                    "kept": census.kept,
                    "oldest": census.oldest,
                    "due": census.due if asked else 0,
                }
            )
        return found

    def _days(self, kind: Kind) -> int:
        days: int = getattr(self._context.settings, kind.setting)
        return days

    async def _first(self) -> bool:
        """One of several replicas does it; two that both believe so remove the same."""
        me = self._context.replica
        replicas = await self._context.registry.replicas()
        others = [one.replica for one in replicas if one.participant == self._context.participant]
        return me == min([me, *others])

    async def _remove(self, kind: Kind, now: int) -> None:
        days, count = self._days(kind), 0
        if not days:
            return
        async with contextlib.aclosing(kind.remove(now - days * DAY_MS)) as steps:
            async for removed in steps:
                count += removed
                # somebody may just have thought better of it
                if self._days(kind) != days:
                    break
                await self._courtesy()
        if count:
            log.info("retention.removed", kind=kind.name, days=days, count=count)

    async def _courtesy(self) -> None:
        now = asyncio.get_running_loop().time
        until = now() + _PATIENCE
        while await self._answering() and now() < until:
            await asyncio.sleep(_REST)
