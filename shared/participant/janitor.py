"""Trimming the bus's streams: one replica of all participants does it."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.bus import Bus, BusFull, ReplyError
from shared.bus.dead_letters import drop_forged
from shared.bus.keys import JANITOR
from shared.bus.visibility import Visibility, Watch
from shared.contracts import DEAD_LETTER, TOOL_REQUEST, Subject, is_untrusted
from shared.errors import TransientError
from shared.participant.quota import enforce_quota
from shared.telemetry.logging import get_logger

log = get_logger()

# Finished entries of a work stream stay this long for observers, who read with XRANGE or reconnect. Observers of a
# stream with a single group read four times a second.
_SPARE_MS = 60_000
_SPARE_OF_ONE_MS = 1_000
# A group is present if one of its consumers was active within this time; an inactive consumer is removed.
_SILENT_MS = 60_000
# A group that one janitor has observed absent for this long no longer holds entries back …
ABANDONED_MS = 3_600_000
# … except the generator's: the gateway bounds its backlog.
ALWAYS_HELD = frozenset({"generator"})
# Above this time between two rounds, the janitor was away itself.
_GAP_MS = 60_000


class Janitor:
    """Trims every stream, `period` seconds after the last round, while this replica has the lease.

    A group counts as absent only while the janitor itself has observed the bus without a gap, by the bus's clock: the
    first replica that wakes up after a night finds every other one silent for hours.
    """

    def __init__(self, bus: Bus, period: float) -> None:
        self._bus = bus
        self._period = period
        # A leader that misses three rounds loses the lease.
        self._lease_ms = Visibility(period).timeout_ms
        self._watch = Watch(max(_GAP_MS, self._lease_ms))
        # (stream, group) → the bus's time since which the group has been absent
        self._absent: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Run until cancelled, or until Redis denies this participant's user the right."""
        while True:
            try:
                if await self._has_lease():
                    await self.round()
                else:
                    self._absent.clear()
            except ReplyError as exc:
                if exc.code == "NOPERM":
                    # Other participants may.
                    return
                log.warning("janitor.failed", reason=str(exc))
            except TransientError as exc:
                log.warning("janitor.failed", reason=str(exc))
            await asyncio.sleep(self._period)

    async def _has_lease(self) -> bool:
        """Acquire or renew the lease. The leader keeps it as long as it lives: its observations are not shared."""
        try:
            return await self._bus.lease(JANITOR, self._bus.source, self._lease_ms)
        except BusFull as exc:
            # No replica has the lease or can acquire it before there is room: each round makes some.
            if not str(exc).startswith("OOM"):
                raise
            return True
        except ReplyError as exc:
            if exc.code == "WRONGTYPE":
                # A key of another type never expires.
                await self._bus.link.call("DEL", JANITOR)
            raise

    async def round(self) -> None:
        """Trim every stream once, and repair blocked ones."""
        await self._bus.learn_time()
        now = self._bus.now_ms()
        if self._watch.observe(now) <= 0:
            self._absent.clear()
        await enforce_quota(self._bus)
        subjects = await self._bus.subjects()
        for subject in subjects:
            try:
                if subject.kind == "event":
                    await self._bus.reset_exhausted_ids(subject.stream)
                if subject.name == DEAD_LETTER.name:
                    await drop_forged(self._bus)
                abandoned = await self._abandoned(subject, now) if subject.kind == "work" else ()
                spare = _SPARE_OF_ONE_MS if subject.single_group else _SPARE_MS
                await self._bus.trim(subject, spare_ms=spare, abandoned=abandoned)
                tool = subject.name.removeprefix(f"{TOOL_REQUEST.name}.")
                if tool != subject.name and is_untrusted(tool):
                    await self._bus.drop_excess_consumers(subject.stream)
            except BusFull as exc:
                # Trimming the other streams makes room.
                log.warning("janitor.full", stream=subject.stream, reason=str(exc))
            except ReplyError as exc:
                # A key of another type must not stop the other streams from being trimmed.
                if exc.code != "WRONGTYPE":
                    raise
                log.error("bus.not_a_stream", stream=subject.stream, error=str(exc))

    async def _abandoned(self, subject: Subject[Any], now: int) -> list[str]:
        absent = set(await self._bus.idle_groups(subject, _SILENT_MS)) - ALWAYS_HELD
        for known in [key for key in self._absent if key[0] == subject.stream and key[1] not in absent]:
            del self._absent[known]
        return [
            group for group in absent if now - self._absent.setdefault((subject.stream, group), now) >= ABANDONED_MS
        ]
