"""Following the few streams that a process always listens to: one blocking read serves all its followers of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from shared.bus.follow import START, Feed, Follower
from shared.bus.port import ConnectionLost, ReplyError
from shared.bus.streams import Bus, entries, order, size_of
from shared.errors import BusUnavailable
from shared.telemetry.logging import get_logger

log = get_logger()

_PAGE = 200
# A stream that cannot be read (its key holds something else) is left out for so long.
_PAUSE = 2.0
_FIRST_RETRY = 0.005
# A stream with an entry that is left out has its readers come back at once: not more often than this.
_GLANCE = 0.1


class Tail(Feed):
    """The process's one blocking read: of its `inbox`, and of what else is followed."""

    def __init__(self, bus: Bus, inbox: str) -> None:
        super().__init__(bus)
        self.inbox = inbox
        self._positions: dict[str, str] = {inbox: START}
        self._unreadable: dict[str, float] = {}
        self._interrupting: asyncio.Task[None] | None = None
        # versions of the set of streams: as wanted now, and as the read in progress knows it
        self._version = 0
        self._reading = 0

    def position(self, stream: str) -> str | None:
        """How far a stream has been read; None when nobody follows it."""
        return self._positions.get(stream)

    def join(self, follower: Follower) -> None:
        super().join(follower)
        read = self._positions.get(follower.stream)
        if read is None:
            self._positions[follower.stream] = follower.position
            self._version += 1
            self._interrupt()
        elif order(read) > order(follower.position):
            follower.look()

    def _left(self, stream: str) -> None:
        if stream != self.inbox:
            del self._positions[stream]

    def _interrupt(self) -> None:
        """Ends the read in progress, which does not know of a new stream yet."""
        if self._interrupting is None or self._interrupting.done():
            self._interrupting = asyncio.create_task(self._end_read())

    async def _end_read(self) -> None:
        # It may be on its way, and not wait in Redis yet. It ends by itself soon: when nobody answers, that will do.
        pause = _FIRST_RETRY
        with contextlib.suppress(BusUnavailable, ConnectionLost, ReplyError):
            while self._reading != self._version and pause < self.bus.block:
                ended = await self.bus.end_tailing()
                pause = _FIRST_RETRY if ended else pause * 2
                await asyncio.sleep(pause)

    async def run(self) -> None:
        """Reads until cancelled."""
        try:
            while True:
                await self._read()
        finally:
            if self._interrupting is not None:
                self._interrupting.cancel()

    async def _read(self) -> None:
        now = asyncio.get_running_loop().time()
        wanted = {name: at for name, at in self._positions.items() if self._unreadable.get(name, now) <= now}
        self._reading = self._version
        if not wanted:
            await asyncio.sleep(_PAUSE)
            return
        try:
            reply = await self.bus.tailer.call(
                *("XREAD", "COUNT", _PAGE, "BLOCK", int(self.bus.block * 1000)),
                *("STREAMS", *wanted, *wanted.values()),
                retry=False,
                block=self.bus.block,
            )
        except ConnectionLost:
            return
        except ReplyError as exc:
            log.error("bus.tail_failed", error=str(exc))
            await self._leave_out(wanted)
            return
        for name, items in reply or ():
            stream = name.decode()
            # a stream that was left and joined again meanwhile stands elsewhere
            if self._positions.get(stream) == wanted[stream]:
                read = entries(items)
                found = self.bus.sane(read)
                if found is not read:
                    # it is put right before long (`Bus.unblock_stream`)
                    await asyncio.sleep(_GLANCE)
                if not found:
                    # Redis 7.0 wakes readers for an entry that was trimmed as it was added, too
                    continue
                self._positions[stream] = found[-1][0]
                placed = [(order(entry[0]), entry) for entry in found]
                size = sum([size_of(entry) for entry in found])
                for follower in self._followers.get(stream, ()):
                    follower.offer(order(wanted[stream]), placed, size)

    async def _leave_out(self, streams: Iterable[str]) -> None:
        """One key that is no stream must not keep all the others from being read."""
        names = list(streams)
        lengths = await self.bus.link.pipe_raw([("XLEN", name) for name in names])
        until = asyncio.get_running_loop().time() + _PAUSE
        unreadable = {
            name: until for name, length in zip(names, lengths, strict=True) if isinstance(length, ReplyError)
        }
        self._unreadable = unreadable
        if not unreadable:
            await asyncio.sleep(_PAUSE)
