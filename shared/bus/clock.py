"""The bus's own clock: what processes compare with each other is told by it, whatever their hosts believe."""

from __future__ import annotations

import time
from collections.abc import Sequence

# A reply that took longer (seconds) says too little about the moment it was given.
_SLOW = 0.25


class BusClock:
    """Redis' clock, as learned from its replies to TIME; the host's until the first of them.

    Between two replies it goes on with the host's monotonic clock, which nobody sets.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._told = False

    def learn(self, reply: Sequence[bytes], asked: float) -> None:
        """`reply`: TIME's seconds and microseconds. `asked`: the monotonic time at which it was asked for."""
        answered = time.monotonic()
        if self._told and answered - asked > _SLOW:
            return
        self._told = True
        self._offset = int(reply[0]) + int(reply[1]) / 1e6 - (asked + answered) / 2

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return int((time.monotonic() + self._offset) * 1000)
