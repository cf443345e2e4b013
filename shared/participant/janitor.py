"""Keeping the bus's streams short: one replica of all does it."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.bus import Bus, BusFull, ReplyError
from shared.bus.claims import Watch
from shared.bus.keys import JANITOR
from shared.bus.letters import drop_forged
from shared.contracts import DEAD_LETTER, TOOL_REQUEST, Subject
from shared.errors import TransientError
from shared.participant.quota import enforce_quota
from shared.participant.registry import outside
from shared.telemetry.logging import get_logger

log = get_logger()

# Who looks at a work stream with XRANGE, or reconnects to it, finds what was finished in the last minute; of a stream
# that one group reads alone, who looks four times a second as observers do.
_SPARE_MS = 60_000
_SPARE_OF_ONE_MS = 1_000
# A group of which a consumer gave a sign of life within this time is there; a consumer that gave none is removed.
_SILENT_MS = 60_000
# A group that one janitor has watched absent for this long no longer holds entries back …
ABANDONED_MS = 3_600_000
# … except the one that answers: its backlog is bounded by the gateway.
ALWAYS_HELD = frozenset({"generator"})
# Longer than this between two rounds, and the janitor was away itself.
_GAP_MS = 60_000


class Janitor:
    """Trims every stream, `period` seconds after the last round.

    It believes only what it has seen itself without a gap, by the bus's clock: whoever starts first after a night, or
    wakes up first, finds everybody else silent for hours.
    """

    def __init__(self, bus: Bus, period: float) -> None:
        self._bus = bus
        self._period = period
        self._watch = Watch(max(_GAP_MS, int(3 * period * 1000)))
        # stream, group → the bus's time since which it has been absent
        self._absent: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Until cancelled, or until it turns out that this participant's user of Redis may not."""
        while True:
            try:
                if await self._elected():
                    await self.round()
                else:
                    self._absent.clear()
            except ReplyError as exc:
                if exc.code == "NOPERM":
                    # others do it
                    return
                log.warning("janitor.failed", reason=str(exc))
            except TransientError as exc:
                log.warning("janitor.failed", reason=str(exc))
            await asyncio.sleep(self._period)

    async def _elected(self) -> bool:
        """One keeps the office as long as it lives: what it has watched is not known to another."""
        try:
            return await self._bus.lease(JANITOR, self._bus.source, int(3 * self._period * 1000))
        except BusFull as exc:
            # nobody has the office, and nobody can be given it before there is room: each round makes some
            if not str(exc).startswith("OOM"):
                raise
            return True
        except ReplyError as exc:
            if exc.code == "WRONGTYPE":
                # nobody's: it would stay for ever
                await self._bus.link.call("DEL", JANITOR)
            raise

    async def round(self) -> None:
        """Trims every stream once, and puts it right."""
        await self._bus.tell_time()
        now = self._bus.now_ms()
        if self._watch.look(now) <= 0:
            self._absent.clear()
        await enforce_quota(self._bus)
        subjects = await self._bus.subjects()
        for subject in subjects:
            try:
                if subject.kind == "event":
                    await self._bus.unblock_stream(subject.stream)
                if subject.name == DEAD_LETTER.name:
                    await drop_forged(self._bus)
                abandoned = await self._abandoned(subject, now) if subject.kind == "work" else ()
                spare = _SPARE_OF_ONE_MS if subject.single_group else _SPARE_MS
                await self._bus.trim(subject, spare_ms=spare, abandoned=abandoned)
                if _untrusted(subject.name):
                    await self._bus.drop_excess_consumers(subject.stream)
            except BusFull as exc:
                # what cannot be noted must not keep the others from being trimmed, which makes room
                log.warning("janitor.full", stream=subject.stream, reason=str(exc))
            except ReplyError as exc:
                # one key that is no stream must not keep the others from being trimmed
                if exc.code != "WRONGTYPE":
                    raise
                log.error("bus.not_a_stream", stream=subject.stream, error=str(exc))

    async def _abandoned(self, subject: Subject[Any], now: int) -> list[str]:
        absent = set(await self._bus.absent(subject, _SILENT_MS)) - ALWAYS_HELD
        for known in [key for key in self._absent if key[0] == subject.stream and key[1] not in absent]:
            del self._absent[known]
        return [
            group for group in absent if now - self._absent.setdefault((subject.stream, group), now) >= ABANDONED_MS
        ]


def _untrusted(subject: str) -> bool:
    """Return whether an untrusted worker reads a subject: a web worker, or mcp with its `server__tool`."""
    tool = subject.removeprefix(f"{TOOL_REQUEST.name}.")
    return tool != subject and (outside(tool) or "__" in tool)
