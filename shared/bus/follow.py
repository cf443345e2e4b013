"""Following a stream: every entry once, in order, however slow the reader is and whoever tells it of new ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from shared.bus.endpoint import Server
from shared.bus.port import ConnectionLost, ReplyError
from shared.bus.streams import BEFORE_TOO_LATE, Bus, Entry, entries, order, size_of
from shared.errors import BusUnavailable
from shared.telemetry.logging import get_logger

log = get_logger()

START = "0-0"
Id = tuple[int, int]

# So many streams are looked at in one write.
_BATCH = 500
# A read is answered at once where an entry is left out: it is not asked more often than this (seconds).
_GLANCE = 0.1
# What is kept for a reader that does not come for it, in bytes. Beyond that it finds the rest in the stream itself, so
# that a slow client costs no more.
_BEHIND = 262_144
# Pages begin small, because an entry may be large; they grow as long as they stay below so many bytes.
_FIRST_PAGE = 16
_LARGEST_PAGE = 512
_PAGE_BYTES = 262_144


class Tail:
    """Tells the followers of streams what is new. One server has a read that waits for all of them. In a cluster, where
    none can, they are looked at now and then, all of them in one write.

    pause: seconds between two looks, and after which what somebody has begun to follow is waited for too. Who hears of
    something sooner tells the followers, and notes it (see Bell).
    """

    pause = 0.25

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._followers: dict[str, list[Follower]] = {}
        # stream → the newest entry of which its followers have been told, or behind which the last to come begins
        self._told: dict[str, str] = {}
        self._followed = asyncio.Event()

    def follow(self, stream: str, after: str = START, *, new: bool = False) -> Follower:
        """A follower of a stream from just after an id; close it when done. new: nothing is expected to be there; a
        read is saved when that is so."""
        return Follower(self, stream, after, new=new)

    def join(self, follower: Follower) -> None:
        """The follower has read its stream to the end: from now on it is told of what comes."""
        stream, position = follower.stream, follower.position
        self._followers.setdefault(stream, []).append(follower)
        self._told[stream] = min(self._told.get(stream, position), position, key=order)
        self._followed.set()

    def leave(self, follower: Follower) -> None:
        """It wants nothing more, and may never have joined."""
        followers = self._followers.get(follower.stream, [])
        if follower in followers:
            followers.remove(follower)
            if not followers:
                del self._followers[follower.stream], self._told[follower.stream]
        if not self._followers:
            self._followed.clear()

    def look(self, stream: str) -> bool:
        """There may be something new in the stream; False when nobody follows it."""
        followers = self._followers.get(stream, ())
        for follower in followers:
            follower.look()
        return bool(followers)

    async def run(self) -> NoReturn:
        """Reads until cancelled."""
        if not self.bus.link.one_server:
            await self.watch()
        async with self.bus.line("", "tail") as line:
            while True:
                await self._followed.wait()
                block = int(1000 * self.pause)
                read = ("XREAD", "COUNT", _FIRST_PAGE, "BLOCK", block, "STREAMS", *self._told, *self._told.values())
                try:
                    reply = await line.call(*read, retry=False, block=self.pause)
                except ConnectionLost:
                    continue
                except ReplyError:
                    # one of them is no stream: each is asked by itself
                    await asyncio.sleep(self.pause)
                    await self._look_around()
                    continue
                told = [self._tell(name.decode(), self.bus.sane(entries(rows))) for name, rows in reply or ()]
                if reply and not any(told):
                    # what its readers leave out
                    await asyncio.sleep(_GLANCE)

    async def watch(self) -> NoReturn:
        """Looks until cancelled."""
        while True:
            await self._followed.wait()
            await asyncio.sleep(self.pause)
            await self._look_around()

    async def _look_around(self) -> None:
        servers: dict[Server | None, list[str]] = {}
        for stream in self._told:
            servers.setdefault(self.bus.link.server_of(stream), []).append(stream)
        # a node that does not answer must not keep the others from being asked
        await asyncio.gather(*(self._ask(streams) for streams in servers.values()))

    async def _ask(self, streams: Sequence[str]) -> None:
        with contextlib.suppress(TimeoutError, BusUnavailable, ConnectionLost):
            async with asyncio.timeout(self.bus.block):
                for start in range(0, len(streams), _BATCH):
                    await self._ask_some(streams[start : start + _BATCH])

    async def _ask_some(self, streams: Sequence[str]) -> None:
        told = {stream: self._told[stream] for stream in streams if stream in self._told}
        newest = [("XREVRANGE", stream, BEFORE_TOO_LATE, f"({after}", "COUNT", 1) for stream, after in told.items()]
        until = asyncio.get_running_loop().time() + self.pause
        for stream, reply in zip(told, await self.bus.link.submit(newest, False, until=until), strict=True):
            # a key that is no stream has nothing to say
            if not isinstance(reply, ReplyError):
                self._tell(stream, entries(reply))

    def _tell(self, stream: str, found: Sequence[Entry]) -> bool:
        """Has the followers of a stream look at it, for the newest entries; False when there are none."""
        if found and stream in self._told:
            self._told[stream] = found[-1][0]
            self.look(stream)
        return bool(found)


class Follower:
    """One reader's position in one stream, which goes on without gaps or repeats. new: the stream is not read before
    the tail has been joined, which has it looked at then."""

    def __init__(self, tail: Tail, stream: str, after: str, *, new: bool = False) -> None:
        self._tail = tail
        self.stream = stream
        # what was handed out last
        self.position = after
        self._at = order(after)
        # what was offered: entries that follow each other directly
        self._offered: deque[tuple[Id, Entry]] = deque()
        self._bytes = 0
        # the stream may hold what nobody has offered
        self._missing = not new
        self._joined = False
        self._waiter: asyncio.Future[None] | None = None
        self._page = _FIRST_PAGE
        # the page on its way, and whether something was offered before it was asked for
        self._reading: asyncio.Task[list[Entry]] | None = None
        self._expected = False

    @property
    def reading(self) -> bool:
        """A page of the stream is on its way; not while Redis is away."""
        return self._reading is not None and not self._tail.bus.link.trouble

    def offer(self, at: Id, entry: Entry, size: int) -> None:
        """Called with an entry as it is added, where ids are dense (see Bell). `size`: its bytes."""
        if self._missing:
            return
        if self._offered and self._offered[-1][0] != directly_before(at):
            self._clear()
        self._offered.append((at, entry))
        self._bytes += size
        if self._bytes > _BEHIND and len(self._offered) > 1:
            self._clear()
            self._missing = True
        self._wake()

    def look(self) -> None:
        """Called when there may be something in the stream."""
        self._missing = True
        self._clear()
        self._wake()

    def _wake(self, *_: object) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, within: float = math.inf) -> list[Entry]:
        """The entries since the last call; waits for them. Empty when none came within so many seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        while not (found := self._taken()) and loop.time() < until:
            if self._reading is None and (self._missing or self._offered):
                self._read()
            elif self._reading is None and not self._joined:
                self._joined = True
                self._tail.join(self)
                continue
            self._waiter = loop.create_future()
            limit = loop.call_at(until, self._wake) if until < math.inf else None
            try:
                await self._waiter
            finally:
                if limit is not None:
                    limit.cancel()
        return found

    def _taken(self) -> list[Entry]:
        """The page that has come, or what was offered, unless something before it is missing."""
        if self._reading is not None:
            return self._page_read(self._reading) if self._reading.done() else []
        if not self._offered or directly_before(self._offered[0][0]) > self._at:
            return []
        found = [entry for at, entry in self._offered if at > self._at]
        if found:
            self._at, self.position = self._offered[-1][0], found[-1][0]
        self._clear()
        return found

    def _read(self) -> None:
        """Asks for the next page of the stream. Where its reader does not wait so long, it is there next time: a large
        one on a slow line would never come, asked for anew each time."""
        self._missing, self._expected = False, bool(self._offered)
        page = self._tail.bus.range(self.stream, f"({self.position}", count=self._page)
        self._reading = asyncio.create_task(page)
        self._reading.add_done_callback(self._wake)

    def _page_read(self, reading: asyncio.Task[list[Entry]]) -> list[Entry]:
        self._reading = None
        try:
            found = self._tail.bus.sane(reading.result())
        except ReplyError as exc:
            # no stream: whatever has taken its place, there is nothing to read
            log.error("bus.not_a_stream", stream=self.stream, error=str(exc))
            found = []
        except BaseException:
            self._missing = True
            raise
        if not found:
            if self._expected:
                # gone again; what came while this was read is found by the next read
                self.look()
            return []
        if len(found) == self._page:
            self._missing = True
        self._page = next_page(found, self._page)
        self.position = found[-1][0]
        self._at = order(self.position)
        return found

    def _clear(self) -> None:
        self._offered.clear()
        self._bytes = 0

    def close(self) -> None:
        if self._reading is not None and not self._reading.cancel() and not self._reading.cancelled():
            # what came of it, nobody asks any more
            self._reading.exception()
        self._tail.leave(self)


def directly_before(at: Id) -> Id:
    """The id behind which an entry comes directly. A journal's first entry is 1-1."""
    epoch, number = at
    return (0, 0) if at == (1, 1) else (epoch, number - 1)


def next_page(found: Sequence[Entry], count: int) -> int:
    """How many entries to ask for next, after a page of so many at most."""
    size = sum([size_of(entry) for entry in found])
    wanted = count * 4 if len(found) == count else count
    return max(1, min(_LARGEST_PAGE, wanted, _PAGE_BYTES * len(found) // (size + 1)))
