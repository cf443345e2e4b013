"""An event loop whose clock jumps to the next timer: hours pass in an instant, and no test waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Returns at once, and adds the time that it should have waited to its clock (s)."""

    now = 0.0
    waits = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.now += timeout
            self.waits += 1
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for code that waits for timers only, never for another process."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @property
    def waits(self) -> int:
        """How often the loop has waited for a timer."""
        return self._jumping.waits


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that runs in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
