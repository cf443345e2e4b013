"""Follow streams: every entry once and in order, however slow the reader is."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from shared.bus.replies import ConnectionLost, ReplyError
from shared.bus.streams import BEFORE_POISONED, Bus, Entry, drop_poisoned_ids, entries, size_of
from shared.envelope import order
from shared.errors import BusUnavailable
from shared.telemetry.logging import get_logger

log = get_logger()

START = "0-0"
Id = tuple[int, int]

# Streams that are polled in one write.
_BATCH = 500
# Seconds to the next read after one whose entries were all dropped.
_SHORT_WAIT_S = 0.1
# Bytes of offered entries that a follower stores. Beyond that it reads them from the stream, so that a slow client
# costs no more memory.
_MAX_OFFERED_BYTES = 262_144
# Entries of a page. Pages begin small, because an entry may be large, and grow while they are below _PAGE_BYTES.
_FIRST_PAGE = 16
_LARGEST_PAGE = 512
_PAGE_BYTES = 262_144


class StreamTailer:
    """Report new entries of streams to their followers: one read waits for all streams of a process.

    pause: seconds after which the read begins again, with the streams that were added meanwhile.
    """

    pause = 0.25

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._followers: dict[str, list[Follower]] = {}
        # stream → the newest entry that was reported to its followers, or that after which the newest follower begins
        self._cursor: dict[str, str] = {}
        self._followed = asyncio.Event()

    def follow(self, stream: str, after: str = START, *, new: bool = False) -> Follower:
        """Return a follower of a stream from just after an id; close it when done.

        new: the stream is expected to be empty, which saves a read.
        """
        return Follower(self, stream, after, new=new)

    def add(self, follower: Follower) -> None:
        """Report new entries to a follower, which has read its stream to the end."""
        stream, position = follower.stream, follower.position
        self._followers.setdefault(stream, []).append(follower)
        self._cursor[stream] = min(self._cursor.get(stream, position), position, key=order)
        self._followed.set()

    def remove(self, follower: Follower) -> None:
        """Stop reporting to a follower, also to one that was never added."""
        followers = self._followers.get(follower.stream, [])
        if follower in followers:
            followers.remove(follower)
            if not followers:
                del self._followers[follower.stream], self._cursor[follower.stream]
        if not self._followers:
            self._followed.clear()

    def wake(self, stream: str) -> None:
        """Make the followers of a stream read it: there may be new entries."""
        for follower in self._followers.get(stream, ()):
            follower.wake()

    async def run(self) -> NoReturn:
        """Read until cancelled."""
        async with self.bus.dedicated("tail") as connection:
            while True:
                await self._followed.wait()
                block = int(1000 * self.pause)
                read = ("XREAD", "COUNT", _FIRST_PAGE, "BLOCK", block, "STREAMS", *self._cursor, *self._cursor.values())
                try:
                    reply = await connection.call(*read, retry=False, block=self.pause)
                except ConnectionLost:
                    continue
                except ReplyError:
                    # One of the keys is not a stream: read each by itself.
                    await asyncio.sleep(self.pause)
                    await self.poll()
                    continue
                found = [self._report(name.decode(), drop_poisoned_ids(entries(rows))) for name, rows in reply or ()]
                if reply and not any(found):
                    # All entries were dropped: the next read would return at once, too.
                    await asyncio.sleep(_SHORT_WAIT_S)

    async def poll(self) -> None:
        """Ask for the newest entry of every followed stream, without waiting for new ones."""
        streams = list(self._cursor)
        with contextlib.suppress(TimeoutError, BusUnavailable, ConnectionLost):
            async with asyncio.timeout(self.bus.block):
                for start in range(0, len(streams), _BATCH):
                    await self._poll(streams[start : start + _BATCH])

    async def _poll(self, streams: Sequence[str]) -> None:
        cursors = {stream: self._cursor[stream] for stream in streams if stream in self._cursor}
        newest = [("XREVRANGE", stream, BEFORE_POISONED, f"({after}", "COUNT", 1) for stream, after in cursors.items()]
        until = asyncio.get_running_loop().time() + self.pause
        for stream, reply in zip(cursors, await self.bus.link.submit(newest, False, until=until), strict=True):
            # A key that is not a stream has no entries.
            if not isinstance(reply, ReplyError):
                self._report(stream, entries(reply))

    def _report(self, stream: str, found: Sequence[Entry]) -> bool:
        """Wake the followers of a stream for its newest entries. Return False when there are none."""
        if found and stream in self._cursor:
            self._cursor[stream] = found[-1][0]
            self.wake(stream)
        return bool(found)


class Follower:
    """One reader's position in one stream: every entry once and in order.

    new: the stream is first read when the tailer wakes this follower.
    """

    def __init__(self, tailer: StreamTailer, stream: str, after: str, *, new: bool = False) -> None:
        self._tailer = tailer
        self.stream = stream
        # the id of the last entry that `next` returned
        self.position = after
        self._at = order(after)
        # offered entries, each the direct successor of the one before
        self._offered: deque[tuple[Id, Entry]] = deque()
        self._bytes = 0
        # whether the stream may have entries that were not offered
        self._missing = not new
        self._added = False
        self._waiter: asyncio.Future[None] | None = None
        self._page = _FIRST_PAGE
        # the page that is being read, and whether entries had been offered before that
        self._reading: asyncio.Task[list[Entry]] | None = None
        self._expected = False

    @property
    def reading(self) -> bool:
        """Whether a page of the stream is being read; False while Redis is away."""
        return self._reading is not None and not self._tailer.bus.link.trouble

    def offer(self, at: Id, entry: Entry, size: int) -> None:
        """Take an entry as it is written to a stream with dense ids (see JournalSubscriber). size: in bytes."""
        if self._missing:
            return
        if self._offered and self._offered[-1][0] != directly_before(at):
            self._clear()
        self._offered.append((at, entry))
        self._bytes += size
        if self._bytes > _MAX_OFFERED_BYTES and len(self._offered) > 1:
            self._clear()
            self._missing = True
        self._resume()

    def wake(self) -> None:
        """Read the stream: it may have new entries."""
        self._missing = True
        self._clear()
        self._resume()

    def _resume(self, *_: object) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, within: float = math.inf) -> list[Entry]:
        """Wait for entries and return those since the last call; empty when none came within so many seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        while not (found := self._take()) and loop.time() < until:
            if self._reading is None and (self._missing or self._offered):
                self._read()
            elif self._reading is None and not self._added:
                self._added = True
                self._tailer.add(self)
                continue
            self._waiter = loop.create_future()
            limit = loop.call_at(until, self._resume) if until < math.inf else None
            try:
                await self._waiter
            finally:
                if limit is not None:
                    limit.cancel()
        return found

    def _take(self) -> list[Entry]:
        """Return the page that was read, or the offered entries unless an earlier one is missing."""
        if self._reading is not None:
            return self._take_page(self._reading) if self._reading.done() else []
        if not self._offered or directly_before(self._offered[0][0]) > self._at:
            return []
        found = [entry for at, entry in self._offered if at > self._at]
        if found:
            self._at, self.position = self._offered[-1][0], found[-1][0]
        self._clear()
        return found

    def _read(self) -> None:
        """Begin to read the next page. A later call of `next` returns it if this one ends first.

        If each call began a read of its own, a large page on a slow link would never arrive.
        """
        self._missing, self._expected = False, bool(self._offered)
        page = self._tailer.bus.range(self.stream, f"({self.position}", count=self._page)
        self._reading = asyncio.create_task(page)
        self._reading.add_done_callback(self._resume)

    def _take_page(self, reading: asyncio.Task[list[Entry]]) -> list[Entry]:
        self._reading = None
        try:
            found = drop_poisoned_ids(reading.result())
        except ReplyError as exc:
            # The key has another type: it has no entries.
            log.error("bus.not_a_stream", stream=self.stream, error=str(exc))
            found = []
        except BaseException:
            self._missing = True
            raise
        if not found:
            if self._expected:
                # The offered entries are gone again; the next read finds those that were written meanwhile.
                self.wake()
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
            # Mark its error as seen.
            self._reading.exception()
        self._tailer.remove(self)


def directly_before(at: Id) -> Id:
    """Return the id of the entry directly before another one. The first entry of a journal is 1-1."""
    epoch, number = at
    return (0, 0) if at == (1, 1) else (epoch, number - 1)


def next_page(found: Sequence[Entry], count: int) -> int:
    """Return how many entries the next page should have, after a page of at most `count`."""
    size = sum([size_of(entry) for entry in found])
    wanted = count * 4 if len(found) == count else count
    return max(1, min(_LARGEST_PAGE, wanted, _PAGE_BYTES * len(found) // (size + 1)))
