"""Following the few streams that a process always listens to: one blocking read serves all its followers of them."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.bus.cluster import ClusterLink
from shared.bus.follow import START, Feed, Follower
from shared.bus.link import Link
from shared.bus.port import ConnectionLost, ReplyError
from shared.bus.streams import Bus, entries, order, size_of
from shared.telemetry.logging import get_logger

log = get_logger()

_PAGE = 200
# What the read does not wait for is heard this much later, at most.
_LOOK = 0.25
# Where one key is no stream, the read waits for the inbox alone for so long.
_PAUSE = 2.0
# A stream with an entry that is left out has its readers come back at once: not more often than this.
_GLANCE = 0.1


class Tail(Feed):
    """The process's one blocking read: of its `inbox`, and of what else is followed.

    What it does not wait for is looked at now and then over the connection for commands: what has come since the read
    began, and in a cluster, where one read cannot wait for streams of different hash slots, everything but the inbox.
    """

    def __init__(self, bus: Bus, inbox: str) -> None:
        super().__init__(bus)
        self.inbox = inbox
        # how far each stream has been read, and from where the read in progress waits
        self._positions: dict[str, str] = {inbox: START}
        self._awaited: dict[str, str] = {}
        # there may be something that it does not wait for
        self._apart = asyncio.Event()
        # by the loop's time
        self._alone_until = 0.0

    def join(self, follower: Follower) -> None:
        super().join(follower)
        read = self._positions.setdefault(follower.stream, follower.position)
        self._apart.set()
        if order(read) > order(follower.position):
            follower.look()

    def _left(self, stream: str) -> None:
        if stream != self.inbox:
            del self._positions[stream]

    async def run(self) -> None:
        """Reads until cancelled."""
        async with self.bus.line(self.inbox) as line, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_forever())
            while True:
                await self._wait(line)

    async def _wait(self, line: Link) -> None:
        now = asyncio.get_running_loop().time()
        alone = isinstance(self.bus.link, ClusterLink) or now < self._alone_until
        self._awaited = wanted = {self.inbox: self._positions[self.inbox]} if alone else dict(self._positions)
        try:
            reply = await line.call(
                *("XREAD", "COUNT", _PAGE, "BLOCK", int(self.bus.block * 1000)),
                *("STREAMS", *wanted, *wanted.values()),
                retry=False,
                block=self.bus.block,
            )
        except ConnectionLost:
            return
        except ReplyError as exc:
            log.error("bus.tail_failed", error=str(exc))
            # one key that is no stream must not keep the others from being read: each is looked at by itself
            self._alone_until = now + _PAUSE
            self._apart.set()
            if len(wanted) == 1:
                self._awaited = {}
                await asyncio.sleep(_PAUSE)
            return
        for name, items in reply or ():
            stream = name.decode()
            if not self._take(stream, wanted[stream], items):
                # it is put right before long (`Bus.unblock_stream`)
                await asyncio.sleep(_GLANCE)

    async def _look_forever(self) -> None:
        while True:
            apart = [(stream, at) for stream, at in self._positions.items() if self._awaited.get(stream) != at]
            if not apart:
                self._apart.clear()
                await self._apart.wait()
                continue
            # where there was something there may be more
            if not any(await asyncio.gather(*(self._look(stream, at) for stream, at in apart))):
                await asyncio.sleep(_LOOK)

    async def _look(self, stream: str, after: str) -> bool:
        """Whether something has come. A node that is away is not waited for."""
        read = ("XREAD", "COUNT", _PAGE, "STREAMS", stream, after)
        until = asyncio.get_running_loop().time() + _LOOK
        try:
            (reply,) = await self.bus.link.submit([read], False, until=until)
        except ConnectionLost:
            return False
        if not reply or isinstance(reply, ReplyError):
            return False
        return self._take(stream, after, reply[0][1])

    def _take(self, stream: str, after: str, items: list[Any]) -> bool:
        """Offers what was read behind a position; False when an entry of it is left out."""
        # a stream that was left and joined again meanwhile stands elsewhere
        if self._positions.get(stream) != after:
            return True
        read = entries(items)
        found = self.bus.sane(read)
        # Redis 7.0 wakes readers for an entry that was trimmed as it was added, too
        if found:
            self._positions[stream] = found[-1][0]
            placed = [(order(entry[0]), entry) for entry in found]
            size = sum([size_of(entry) for entry in found])
            for follower in self._followers.get(stream, ()):
                follower.offer(order(after), placed, size)
        return found is read
