"""The visibility timeout: after this silence of a replica, other replicas take over its entries.

One setting, `heartbeat`, decides. Every other time here follows from it, so that claims, registry entries and the
janitor's lease agree about who is alive.
"""

from __future__ import annotations

from dataclasses import dataclass

MISSED_HEARTBEATS = 3

# After a pause, other replicas may take this many gaps to come back, at most.
_MAX_RETURN_GAPS = 15


@dataclass(frozen=True, slots=True)
class Visibility:
    """The times that follow from the heartbeat. heartbeat: seconds between two signs of life of a replica."""

    heartbeat: float

    @property
    def timeout(self) -> float:
        """Seconds of silence after which a replica counts as dead."""
        return MISSED_HEARTBEATS * self.heartbeat

    @property
    def timeout_ms(self) -> int:
        """The same in milliseconds."""
        return int(self.timeout * 1000)

    @property
    def certain(self) -> float:
        """Seconds after a renewal in which a claim cannot have been taken over: one heartbeat less than the timeout."""
        return self.timeout - self.heartbeat

    @property
    def gap_ms(self) -> int:
        """Milliseconds between two observations above which a replica was away itself (see Watch)."""
        return int(self.certain * 1000)


class Watch:
    """How long this process has observed the bus without a gap, by the bus's clock.

    After a pause, idle times are no evidence of a dead consumer: other replicas were paused too. They may return as
    late as the pause lasted, because their intervals between attempts to connect grow.

    gap: the longest time (ms) between two observations that is no pause. back: the bus's time (ms) until which others
    may still come back, at most fifteen gaps after the end of the last pause; 0 if there was none.
    """

    def __init__(self, gap: int) -> None:
        self._gap = gap
        self._began = self.back = 0
        self._last: int | None = None

    def observe(self, now: int) -> int:
        """Note an observation at `now` (bus time, ms).

        Return the milliseconds since all replicas could be back; 0 or less when the watch starts again.
        """
        if self._last is None:
            self._began = now
        elif not 0 <= now - self._last <= self._gap:
            # The server's clock may have gone back, even to before the first observation.
            self._began = now
            self.back = min(now + _MAX_RETURN_GAPS * self._gap, max(self.back, now, 2 * now - self._last))
        self._last = now
        return now - max(self._began, self.back)
