"""The bus's own clock: what processes compare with each other is told by it, whatever their hosts believe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

# A reply that took longer (seconds) says too little about the moment it was given.
_SLOW = 0.25
# A clock that goes forward by more than this (seconds) at once was set: the first reply may say that much too little.
_LEAP = 5.0


class BusClock:
    """Redis' clock, as learned from its replies to TIME; the host's until the first of them.

    Between two replies it goes on with the host's monotonic clock, which nobody sets.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._told = False
        # until which second of the bus stamps are by the clock as it was, and how far it was set forward then
        self._leaps: deque[tuple[float, float]] = deque(maxlen=16)

    def learn(self, reply: Sequence[bytes], asked: float) -> None:
        """`reply`: TIME's seconds and microseconds. `asked`: the monotonic time at which it was asked for."""
        answered, told = time.monotonic(), int(reply[0]) + int(reply[1]) / 1e6
        # on a slow line every reply is late: one that contradicts all the same tells of a clock that was set
        agrees = told - answered <= self._offset <= told - asked
        if self._told and agrees and answered - asked > _SLOW:
            return
        offset = told - (asked + answered) / 2
        if self._told and not agrees and offset - self._offset > _LEAP:
            self._leaps.append((answered + self._offset, offset - self._offset))
        self._told = True
        self._offset = offset

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return int((time.monotonic() + self._offset) * 1000)

    def left(self, deadline: int, stamped: str | int) -> int:
        """Milliseconds until a deadline (ms) that was set when the clock said `stamped` (see Bus.left). A clock that
        went forward since, while this process watched, takes nothing of them away: what was stamped by the one before
        lies nearer to that, also when another process has heard of it later."""
        now = self.now_ms()
        left = deadline - now
        if self._leaps:
            if not isinstance(stamped, int):
                at, _, _ = stamped.partition("-")
                stamped = int(at) if at.isdecimal() else now
            left += int(sum(leap for at, leap in self._leaps if stamped < (at + leap / 2) * 1000) * 1000)
        return left
