"""Blocking reads in a Redis Cluster, where one command cannot wait for streams of different hash slots.

A consumer has one connection per work stream: as many as it has routes. A tail waits for its inbox on a connection of
its own and looks at the few event streams now and then, over the connections for commands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from shared.bus.cluster import ClusterLink, Lines, NodeLink
from shared.bus.hash_slots import slot_of_key
from shared.bus.port import Command, ConnectionLost, Reply, ReplyError, checked
from shared.errors import BusUnavailable

_RETRY_UNBLOCK = 0.005
_UNBLOCK_PATIENCE = 0.25
# What an event stream says is heard this much later, at most, than with a blocking read.
_LOOK = 0.25


def _split(command: Command) -> tuple[Command, list[str], list[str]]:
    """A read's beginning up to STREAMS, its streams and their positions."""
    place = command.index("STREAMS") + 1
    count = (len(command) - place) // 2
    return command[:place], list(command[place : place + count]), list(command[place + count :])


class ClusterReader:
    """The group reads of a consumer. Entries may have been lost on their way whenever `generation` has changed."""

    def __init__(self, cluster: ClusterLink) -> None:
        self._cluster = cluster
        self._lines: dict[str, Lines] = {}
        self._current: set[str] = set()
        self.connected = cluster.connected
        self.generation = 1

    async def __aenter__(self) -> ClusterReader:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for lines in self._lines.values():
            await lines.close()

    async def call(self, *command: Any, retry: bool = False, block: float = 0.0) -> Reply:
        """XREADGROUP over any streams; what one command for all of them would answer. Raises ConnectionLost.

        As soon as one stream has entries, the waiting for the others is ended; no read is given up whose entries may
        be on their way.
        """
        head, streams, ids = _split(command)
        reads = {
            asyncio.create_task(self._read((*head, stream, position), block)): stream
            for stream, position in zip(streams, ids, strict=True)
        }
        self._current = set(streams)
        try:
            _, late = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            while late:
                for task in late:
                    if not self._on_its_way(reads[task]):
                        task.cancel()
                await self._unblock({reads[task] for task in late})
                _, late = await asyncio.wait(late, timeout=_RETRY_UNBLOCK)
        finally:
            self._current = set()
            for task in reads:
                task.cancel()
        return self._merged(list(reads))

    async def _read(self, command: Command, block: float) -> Reply:
        stream = command[-2]
        lines = self._lines.get(stream)
        if lines is None:
            lines = self._lines[stream] = self._cluster.line("groups")
        (reply,) = await self._cluster.carry(lines, [command], retry=False, block=block)
        return checked(reply)

    def _merged(self, reads: Sequence[asyncio.Task[Reply]]) -> Reply:
        found: list[Any] = []
        errors: list[BaseException] = []
        for task in reads:
            if task.cancelled():
                # its answer may have come in the very same moment
                self.generation += 1
                continue
            error = task.exception()
            if error is None:
                found += task.result() or ()
                continue
            if isinstance(error, ConnectionLost):
                self.generation += 1
            errors.append(error)
        if errors and not found:
            raise errors[0]
        # an error that stays comes up again with the next read
        return found or None

    def _on_its_way(self, stream: str) -> bool:
        """Whether a read of the stream may have been sent."""
        lines = self._lines.get(stream)
        return lines is not None and any(link.connected.is_set() for link in lines.all())

    async def unblock(self) -> bool:
        """Ends the read in progress; False when it does not wait in Redis."""
        return await self._unblock(self._current)

    async def _unblock(self, streams: set[str]) -> bool:
        links = [link for stream in streams if stream in self._lines for link in self._lines[stream].all()]
        ended = await asyncio.gather(*(self._end(link) for link in links if link.connected.is_set()))
        return any(ended)

    async def _end(self, link: NodeLink) -> bool:
        with contextlib.suppress(TimeoutError, ConnectionLost, ReplyError, BusUnavailable):
            async with asyncio.timeout(_UNBLOCK_PATIENCE):
                return await self._cluster.commands.to(link.address).unblock(link)
        return False


class ClusterTailer:
    """The reads of a tail: its first stream blocks, the others are looked at now and then."""

    def __init__(self, cluster: ClusterLink) -> None:
        self._cluster = cluster
        self._lines = cluster.line("tail")
        self._inbox: asyncio.Task[Reply] | None = None
        self._inbox_after: tuple[str, str] = ("", "")
        self._interrupted: asyncio.Future[None] | None = None
        # when to look at the others again
        self._due = 0.0

    async def __aenter__(self) -> ClusterTailer:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._inbox is not None:
            self._inbox.cancel()
            await asyncio.gather(self._inbox, return_exceptions=True)
        await self._lines.close()

    async def call(self, *command: Any, retry: bool = False, block: float = 0.0) -> Reply:
        """XREAD over any streams, until one has something or `block` is over. Raises ConnectionLost, ReplyError."""
        head, streams, ids = _split(command)
        inbox, after = streams[0], ids[0]
        plain = _without_block(head)
        wanted = dict(zip(streams[1:], ids[1:], strict=True))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + block
        self._interrupted = interrupted = loop.create_future()
        while not interrupted.done():
            reading = self._inbox_read((*head, inbox, after), (inbox, after), block)
            if reading.done():
                self._inbox = None
                if found := reading.result():
                    return found
                continue
            if wanted and loop.time() >= self._due:
                self._due = loop.time() + _LOOK
                if found := await self._look(plain, wanted):
                    # there may be more than one page
                    self._due = 0.0
                    return found
            now = loop.time()
            if now >= deadline:
                return None
            following = min(deadline, self._due) if wanted else deadline
            either: set[asyncio.Future[Any]] = {reading, interrupted}
            await asyncio.wait(either, timeout=following - now, return_when=asyncio.FIRST_COMPLETED)
        return None

    async def unblock(self) -> bool:
        """Ends the call in progress; False when there is none."""
        if self._interrupted is None or self._interrupted.done():
            return False
        self._interrupted.set_result(None)
        return True

    def _inbox_read(self, command: Command, after: tuple[str, str], block: float) -> asyncio.Task[Reply]:
        """The blocking read in progress; it outlives calls that end for another stream."""
        if self._inbox is not None and self._inbox_after != after:
            # reading takes nothing away: whatever it brings comes again
            self._inbox.cancel()
            self._inbox = None
        if self._inbox is None:
            self._inbox_after = after
            self._inbox = asyncio.create_task(self._wait_for(command, block))
        return self._inbox

    async def _wait_for(self, command: Command, block: float) -> Reply:
        (reply,) = await self._cluster.carry(self._lines, [command], retry=True, block=block)
        return checked(reply)

    async def _look(self, head: Command, wanted: Mapping[str, str]) -> list[Any]:
        """What is new in the streams whose nodes answer."""
        reads = [(*head, stream, after) for stream, after in wanted.items() if self._reachable(stream)]
        found: list[Any] = []
        if reads:
            until = asyncio.get_running_loop().time() + _LOOK
            for reply in await self._cluster.carry(self._cluster.commands, reads, retry=False, until=until):
                found += checked(reply) or ()
        return found

    def _reachable(self, stream: str) -> bool:
        owner = self._cluster.owner(slot_of_key(stream))
        return owner is not None and self._cluster.commands.to(owner).connected.is_set()


def _without_block(head: Command) -> Command:
    """The beginning of a read that answers at once."""
    place = head.index("BLOCK")
    return (*head[:place], *head[place + 2 :])
