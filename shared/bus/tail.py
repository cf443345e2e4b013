"""Following streams as they grow: one blocking read serves every follower of a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from shared.bus.link import ConnectionLost, ReplyError
from shared.bus.streams import Bus, Entry, entries, order
from shared.errors import BusUnavailable
from shared.telemetry.logging import get_logger

log = get_logger()

START = "0-0"
# More than a replica ever has calls under way: what it has read is of no use to anybody.
INBOX_LENGTH = 1_000
_PAUSE = 2.0
_PAGE = 500
# A follower that is this far behind is dropped from the live feed and catches up by itself, so that a slow client
# costs no memory.
_BEHIND = 2_000


class Follower:
    """One reader's position in one stream; an asynchronous iterator of entries, without gaps or repeats."""

    def __init__(self, tail: Tail, stream: str, after: str) -> None:
        self._tail = tail
        self.stream = stream
        self.position = after
        self._live: deque[Entry] = deque()
        self._arrived = asyncio.Event()
        self._attached = False

    def offer(self, found: list[Entry]) -> bool:
        """Called by the tail with new entries; False when the follower is too far behind to be fed."""
        if len(self._live) > _BEHIND:
            self._attached = False
            self._arrived.set()
            return False
        self._live.extend(found)
        self._arrived.set()
        return True

    async def next(self) -> list[Entry]:
        """The entries since the last call, at least one; waits for them."""
        while True:
            if self._live:
                found = [entry for entry in self._live if order(entry[0]) > order(self.position)]
                self._live.clear()
            elif self._attached:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            else:
                found = await self._catch_up()
            if found:
                self.position = found[-1][0]
                return found

    async def _catch_up(self) -> list[Entry]:
        """Reads what was written up to where the live feed stands; joins the feed when nothing is missing."""
        live = self._tail.position(self.stream)
        if live is None:
            # the feed begins no later than the stream ends: others will join it, whatever this one asks for
            live = min(self.position, await self._tail.newest(self.stream), key=order)
            if self._tail.position(self.stream) is not None:
                return []
        if order(live) <= order(self.position):
            self._tail.attach(self, live)
            self._attached = True
            return []
        found = await self._tail.bus.range(self.stream, f"({self.position}", live, count=_PAGE)
        if not found:
            # what was there has been trimmed
            self.position = live
        return found

    def close(self) -> None:
        self._tail.detach(self)


class Tail:
    """The process's one blocking read. `inbox` is a stream of this replica; writing to it also wakes the reader."""

    def __init__(self, bus: Bus, inbox: str) -> None:
        self.bus = bus
        self.inbox = inbox
        self._followers: dict[str, list[Follower]] = {}
        self._positions: dict[str, str] = {inbox: START}
        self._waking: asyncio.Task[None] | None = None
        # versions of the set of streams: as wanted now, and as the read in progress knows it
        self._version = 0
        self._reading = 0

    def follow(self, stream: str, after: str = START) -> Follower:
        """A follower of a stream from just after an id; close it when done."""
        return Follower(self, stream, after)

    async def newest(self, stream: str) -> str:
        """The id after which only entries written from now on come."""
        found = await self.bus.latest(stream, 1)
        return found[0][0] if found else START

    def position(self, stream: str) -> str | None:
        return self._positions.get(stream)

    def attach(self, follower: Follower, live: str) -> None:
        """Feeds a follower from now on. `live`: where its stream's feed stands, or shall begin."""
        self._followers.setdefault(follower.stream, []).append(follower)
        if follower.stream not in self._positions:
            self._positions[follower.stream] = live
            self._version += 1
            self._wake()

    def detach(self, follower: Follower) -> None:
        followers = self._followers.get(follower.stream, [])
        if follower in followers:
            followers.remove(follower)
        if not followers and self._followers.pop(follower.stream, None) is not None and follower.stream != self.inbox:
            del self._positions[follower.stream]

    def _wake(self) -> None:
        """Interrupts the blocking read, which does not know of a new stream yet."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._send_wake())

    async def _send_wake(self) -> None:
        with contextlib.suppress(BusUnavailable, ReplyError):
            while self._reading != self._version:
                await self.bus.link.call("XADD", self.inbox, "MAXLEN", "~", INBOX_LENGTH, "*", "type", "wake")

    async def run(self) -> None:
        """Reads until cancelled."""
        while True:
            wanted = dict(self._positions)
            self._reading = self._version
            try:
                reply = await self.bus.tailer.call(
                    *("XREAD", "COUNT", _PAGE, "BLOCK", int(self.bus.block * 1000)),
                    *("STREAMS", *wanted, *wanted.values()),
                    retry=False,
                    block=self.bus.block,
                )
            except ConnectionLost:
                continue
            except ReplyError as exc:
                log.error("bus.tail_failed", error=str(exc))
                await asyncio.sleep(_PAUSE)
                continue
            for name, items in reply or ():
                self._deliver(name.decode(), entries(items), wanted)

    def _deliver(self, stream: str, found: list[Entry], wanted: dict[str, str]) -> None:
        # a stream that was left and joined again meanwhile stands elsewhere
        if self._positions.get(stream) != wanted[stream]:
            return
        self._positions[stream] = found[-1][0]
        followers = self._followers.get(stream, [])
        slow = [follower for follower in followers if not follower.offer(found)]
        for follower in slow:
            self.detach(follower)
