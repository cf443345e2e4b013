"""Keeping what a replica holds, and taking over what nobody keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from shared.bus.port import ReplyError
from shared.bus.scripts import COUNT, HAND_OVER, KEEP, UNOWNED_CONSUMER
from shared.bus.slots import Delivery, Slots
from shared.bus.streams import Bus, Entry, entries, grouping
from shared.errors import Fenced, TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

HEIR = UNOWNED_CONSUMER
MISSED = 3
# So many gaps after the end of a pause, at most, somebody may still come back from it.
_LATE = 15


class Watch:
    """How long somebody has watched the bus without a gap, by the bus's own clock.

    Whoever was away, asleep or cut off does not know who else was: what he has not watched himself proves nothing. Nor
    does what he sees at once: others come back as much later as the pause was long, for they wake up one after the
    other, and connect again at intervals that grow with it.
    `gap`: milliseconds between two looks that are too long. back: the bus's time (ms) until which others may still come
    back, at most fifteen gaps behind the end of the last pause; 0 when there was none.
    """

    def __init__(self, gap: int) -> None:
        self._gap = gap
        self._began = self.back = 0
        self._last: int | None = None

    def look(self, now: int) -> int:
        """Milliseconds for which it has been watched, with everybody back, at a look at `now` (bus time, ms); 0 or less
        when it begins anew."""
        if self._last is None:
            self._began = now
        elif not 0 <= now - self._last <= self._gap:
            # the clock may have gone back, to before the first look
            self._began = now
            self.back = min(now + _LATE * self._gap, max(self.back, now, 2 * now - self._last))
        self._last = now
        return now - max(self._began, self.back)


class Found(NamedTuple):
    """An entry to be worked on; `deliveries` counts this time in."""

    stream: str
    entry: Entry
    deliveries: int


class Claims:
    """One replica's claims in a group, on the streams that it reads.

    They are renewed with every beat. What was silent for three heartbeats is taken over, by a replica that has itself
    watched for so long: after an outage everybody's claims look old, and those who are there renew theirs first, also
    when they come back later than others (see Watch).
    """

    def __init__(self, bus: Bus, group: str, replica: str, streams: Sequence[str], heartbeat: float) -> None:
        self._bus = bus
        self._group = group
        self._replica = replica
        self._streams: list[str] = []
        self._heartbeat = heartbeat
        self._idle = int(heartbeat * MISSED * 1000)
        self._watches: dict[str, Watch] = {}
        self.add(streams)
        # the loop's time until which everything held is certainly ours
        self.certain_until = 0.0
        # streams with something to take over: from whom nobody has heard, or from those who left
        self.orphaned: dict[str, bool] = {}
        # what has a key of another type in its place: nothing of it can be read or kept, and everything of the others
        self.broken: set[str] = set()

    def add(self, streams: Sequence[str]) -> None:
        """More streams to read; `begin` makes their groups."""
        self._streams += streams
        gap = int(self._heartbeat * (MISSED - 1) * 1000)
        self._watches.update((stream, Watch(gap)) for stream in streams)

    async def begin(self) -> None:
        """Makes the groups, or finds that they are there where this user of Redis may make none. Notes which streams
        are none, or are one again.

        Raises TransientError when somebody else has still to make one.
        """
        # the first time there is nothing to be renewed; later this renews nothing
        self.certain_until = self.certain_until or asyncio.get_running_loop().time() + 2 * self._heartbeat
        made = await self._bus.pulse.pipe_raw([grouping(name, self._group) for name in self._streams])
        for stream, reply in zip(self._streams, made, strict=True):
            if not isinstance(reply, ReplyError) or reply.code != "WRONGTYPE":
                self.broken.discard(stream)
            elif stream not in self.broken:
                self.broken.add(stream)
                log.error("bus.not_a_stream", stream=stream, error=str(reply))
            if isinstance(reply, ReplyError) and reply.code == "NOPERM":
                if self._group not in await self._bus.groups(stream):
                    raise TransientError(f"its group on {stream} has still to be made by a participant who may")
            elif isinstance(reply, ReplyError) and reply.code not in ("BUSYGROUP", "WRONGTYPE"):
                raise reply

    async def beat(self, slots: Slots) -> list[Delivery]:
        """Renews all claims; the deliveries that are lost, which know it."""
        started = asyncio.get_running_loop().time()
        if self.broken:
            await self.begin()
        held: dict[str, list[str]] = {stream: [] for stream in self._streams}
        for stream, entry_id in slots.held:
            held[stream].append(entry_id)
        lost: list[Delivery] = []
        for stream, ids in held.items():
            for entry_id in ids if stream in self.broken else await self._keep(stream, ids):
                delivery = slots.held.get((stream, entry_id))
                if delivery is not None and not delivery.settling:
                    # at once: its handler may end before this heartbeat does, or swallow a cancellation
                    delivery.lost = True
                    lost.append(delivery)
        self.certain_until = started + 2 * self._heartbeat
        return lost

    async def _keep(self, stream: str, ids: Sequence[str]) -> list[str]:
        """Renews claims on one stream; those that are lost. Notes whether there is something to take over."""
        try:
            reply = await self._bus.pulse.call(*KEEP((stream,), self._group, self._replica, HEIR, self._idle, *ids))
        except ReplyError as exc:
            if "NOGROUP" not in str(exc) and exc.code != "WRONGTYPE":
                raise
            await self.begin()
            return list(ids)
        now, left, silent, lost = reply
        watched = self._watches[stream].look(now) >= self._idle
        if left or (silent and watched):
            self.orphaned[stream] = watched
        return [entry_id.decode() for entry_id in lost]

    async def ask(self, delivery: Delivery) -> float:
        """After a long pause: the loop's time until which an entry is certainly ours. Raises Fenced; BusFull when Redis
        takes no writes at all: nobody can renew a claim or take one over."""
        now = asyncio.get_running_loop().time()
        if delivery.entry_id in await self._keep(delivery.stream, [delivery.entry_id]):
            raise Fenced(f"{delivery.entry_id} was taken over")
        return now + 2 * self._heartbeat

    async def count(self, delivery: Delivery, deliveries: int) -> None:
        """Sets how often an entry was delivered, as whoever takes it over will see it."""
        with suppress(TransientError, ReplyError):
            await self._bus.link.call(
                *COUNT((delivery.stream,), self._group, self._replica, delivery.entry_id, deliveries)
            )

    # ── taking over ──────────────────────────────────────────────────────────────────────────────────────────

    async def unseen(self, stream: str, after: str, count: int, slots: Slots) -> tuple[list[Found], str | None]:
        """Entries that are pending for this replica but that it does not hold: they got lost on their way. With the
        position to go on from, None at the end."""
        # on the connection of the acknowledgements: behind them, what has just been finished is not seen
        rows = await self._bus.link.call("XPENDING", stream, self._group, after, "+", count, self._replica)
        alike: dict[int, list[bytes]] = {}
        for entry_id, _owner, _idle, deliveries in rows:
            if (stream, entry_id.decode()) not in slots.held:
                alike.setdefault(deliveries, []).append(entry_id)
        found: list[Found] = []
        for deliveries, ids in alike.items():
            found += await self._claim(stream, 0, dict.fromkeys(ids, deliveries), "RETRYCOUNT", deliveries)
        return found, f"({rows[-1][0].decode()}" if rows else None

    async def orphans(self, stream: str, watched: bool, count: int, slots: Slots) -> list[Found]:
        """Takes over at most `count` entries that nobody keeps."""
        left = await self._bus.link.call("XPENDING", stream, self._group, "-", "+", count, HEIR)
        found = await self._take(stream, left, 0, slots)
        if watched and len(left) < count:
            pending = ("XPENDING", stream, self._group, "IDLE", self._idle, "-", "+", count - len(left))
            silent = await self._bus.link.call(*pending)
            # since it was seen that there are some, everybody may have been asleep, and all look silent
            now, *_ = await self._bus.pulse.call(*KEEP((stream,), self._group, self._replica, HEIR, self._idle))
            if self._watches[stream].look(now) >= self._idle:
                found += await self._take(stream, silent, self._idle, slots)
        return found

    async def _take(self, stream: str, rows: Sequence[Any], idle: int, slots: Slots) -> list[Found]:
        wanted: dict[bytes, int] = {}
        alone = slots.last_chance
        for entry_id, _owner, _idle, deliveries in rows:
            # beside what is at its last attempt, nothing is taken that is not to be given up anyway
            if (stream, entry_id.decode()) not in slots.held and not (alone and deliveries < slots.last):
                wanted[entry_id] = deliveries + 1
                alone = alone or deliveries + 1 == slots.last > 1
        return await self._claim(stream, idle, wanted)

    async def _claim(self, stream: str, idle: int, wanted: Mapping[bytes, int], *options: str | int) -> list[Found]:
        """Entries with their deliveries, without those that somebody has acknowledged or renewed meanwhile."""
        if not wanted:
            return []
        claim = ("XCLAIM", stream, self._group, self._replica, idle, *wanted, *options)
        return [Found(stream, entry, wanted[entry[0].encode()]) for entry in entries(await self._bus.link.call(*claim))]

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Makes some of what is held anybody's. The interrupted delivery does not count as an attempt."""
        await self._bus.pulse.pipe_raw(
            [
                ("XCLAIM", one.stream, self._group, HEIR, 0, one.entry_id, "RETRYCOUNT", one.deliveries - 1, "JUSTID")
                for one in deliveries
                if not one.lost
            ]
        )

    async def hand_over(self) -> None:
        """Makes what is still held anybody's at once, and leaves no consumer behind."""
        leaving = self._streams
        while leaving:
            scripts = [HAND_OVER((stream,), self._group, self._replica, HEIR) for stream in leaving]
            moved = await self._bus.link.pipe_raw(scripts)
            leaving = [name for name, count in zip(leaving, moved, strict=True) if isinstance(count, int) and count]
