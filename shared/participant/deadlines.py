"""Many limits of time with one timer: a timer of its own for each call would cost more than the call's bookkeeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Limits are kept to this many seconds.
TICK = 0.05


class Deadlines(Generic[T]):
    """Calls `expired` for each thing whose time is over, at most a twentieth of a second late (a timing wheel: Varghese
    and Lauck, 1987)."""

    def __init__(self, expired: Callable[[T], None]) -> None:
        self._expired = expired
        self._slots: dict[int, dict[T, None]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, thing: T, at: float) -> int:
        """Sets a limit, in the loop's time; what it returns takes it back."""
        slot = int(at / TICK) + 1
        self._slots.setdefault(slot, {})[thing] = None
        if self._timer is None:
            self._timer = self._loop.call_later(TICK, self._turn)
        return slot

    def drop(self, thing: T, slot: int) -> None:
        things = self._slots.get(slot)
        if things is not None:
            things.pop(thing, None)
            if not things:
                del self._slots[slot]

    def _turn(self) -> None:
        now = int(self._loop.time() / TICK)
        for slot in [slot for slot in self._slots if slot <= now]:
            for thing in self._slots.pop(slot):
                self._expired(thing)
        self._timer = self._loop.call_later(TICK, self._turn) if self._slots else None
