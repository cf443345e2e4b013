"""Many limits of time with one timer: a timer of its own for each call would cost more than the call's bookkeeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# Limits are kept to this many seconds.
TICK = 0.05


class Deadlines(Generic[T]):
    """Calls `expired` for each thing whose time is over, at most a twentieth of a second late: so often all of them are
    looked at, which costs less than keeping them in order, for most are taken back before anybody looks."""

    def __init__(self, expired: Callable[[T], None]) -> None:
        self._expired = expired
        self._limits: dict[T, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, thing: T, at: float) -> None:
        """Sets a thing's limit, in the loop's time."""
        self._limits[thing] = at
        if self._timer is None:
            self._timer = self._loop.call_later(TICK, self._look)

    def drop(self, thing: T) -> None:
        """Takes a limit back, where there is one."""
        self._limits.pop(thing, None)

    def __iter__(self) -> Iterator[T]:
        return iter(self._limits)

    def _look(self) -> None:
        now = self._loop.time()
        for thing in [thing for thing, at in self._limits.items() if at <= now]:
            # one before it may have taken it back
            if self._limits.pop(thing, None) is not None:
                self._expired(thing)
        self._timer = self._loop.call_later(TICK, self._look) if self._limits else None
