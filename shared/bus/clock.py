"""The bus's clock: Redis' time, for times that processes compare. The clocks of their hosts may differ."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

# A reply to TIME that took longer (seconds) is too inexact.
_SLOW_S = 0.25
# A clock that goes forward by more than this (seconds) at once was set. The first reply may be that inexact.
_LEAP_S = 5.0


class BusClock:
    """Redis' clock, by its replies to TIME; the host's clock until the first reply.

    Between two replies it advances with the host's monotonic clock, which cannot be set.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._known = False
        # forward jumps of Redis' clock: its time (s) before the jump, and the size of the jump (s)
        self._leaps: deque[tuple[float, float]] = deque(maxlen=16)

    def learn(self, reply: Sequence[bytes], asked: float) -> None:
        """Set the clock. reply: TIME's seconds and microseconds. asked: the monotonic time at which TIME was sent."""
        answered, server_time = time.monotonic(), int(reply[0]) + int(reply[1]) / 1e6
        # A slow reply is ignored, unless it contradicts the known time: then the server's clock was set.
        agrees = server_time - answered <= self._offset <= server_time - asked
        if self._known and agrees and answered - asked > _SLOW_S:
            return
        offset = server_time - (asked + answered) / 2
        if self._known and not agrees and offset - self._offset > _LEAP_S:
            self._leaps.append((answered + self._offset, offset - self._offset))
        self._known = True
        self._offset = offset

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""
        return int((time.monotonic() + self._offset) * 1000)

    def left(self, deadline: int, stamped: str | int) -> int:
        """Return the milliseconds until a deadline (ms) that was set at the bus time `stamped` (see Bus.left).

        A forward jump of the clock since then, in the life of this process, does not shorten that time.
        """
        now = self.now_ms()
        left = deadline - now
        if self._leaps:
            if not isinstance(stamped, int):
                at, _, _ = stamped.partition("-")
                stamped = int(at) if at.isdecimal() else now
            left += int(sum(leap for at, leap in self._leaps if stamped < (at + leap / 2) * 1000) * 1000)
        return left
