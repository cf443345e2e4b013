"""Group reads in a Redis Cluster, where one command cannot wait for streams of different hash slots.

A consumer has one connection per work stream: as many as it has routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from shared.bus.cluster import ClusterLink
from shared.bus.cluster_map import StreamLink
from shared.bus.port import ConnectionLost, Reply, ReplyError, checked
from shared.errors import BusUnavailable, Local2Error

_RETRY_UNBLOCK = 0.005
_UNBLOCK_PATIENCE = 0.25


class ClusterReader:
    """The group reads of a consumer. Entries may have been lost on their way whenever `generation` has changed."""

    def __init__(self, cluster: ClusterLink, *, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._links: dict[str, StreamLink] = {}
        # those of the read in progress
        self._reads: dict[asyncio.Future[list[Reply]], StreamLink] = {}
        self.connected = cluster.connected

    async def __aenter__(self) -> ClusterReader:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for link in self._links.values():
            await link.__aexit__()

    @property
    def generation(self) -> int:
        return sum(link.generation for link in self._links.values())

    async def call(self, *command: Any, retry: bool = False, block: float = 0.0, now: bool = False) -> Reply:
        """XREADGROUP over any streams; what one command for all of them would answer. Raises ConnectionLost.

        As soon as one stream has entries, the waiting for the others is ended; no read is given up whose entries may
        be on their way.
        """
        place = command.index("STREAMS") + 1
        count = (len(command) - place) // 2
        self._reads = reads = {}
        for stream, position in zip(command[place : place + count], command[place + count :], strict=True):
            link = self._link(stream)
            reads[link.read((*command[:place], stream, position), block, now)] = link
        try:
            _, late = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            while late:
                for read in late:
                    if not reads[read].connected.is_set():
                        # it has not been sent
                        read.cancel()
                await self.unblock()
                _, late = await asyncio.wait(late, timeout=_RETRY_UNBLOCK)
        finally:
            self._reads = {}
            for read in reads:
                read.cancel()
        return _merged(reads)

    def _link(self, stream: str) -> StreamLink:
        link = self._links.get(stream)
        if link is None:
            link = self._links[stream] = self._cluster.line(stream, self._name)
            link.open()
        return link

    async def unblock(self) -> bool:
        """Ends the read in progress; False when it does not wait in Redis."""
        waiting = [link for read, link in self._reads.items() if not read.done()]
        return any(await asyncio.gather(*map(self._end, waiting)))

    async def _end(self, link: StreamLink) -> bool:
        with contextlib.suppress(TimeoutError, ConnectionLost, ReplyError, BusUnavailable):
            async with asyncio.timeout(_UNBLOCK_PATIENCE):
                if link.connected.is_set() and link.node is not None:
                    return bool(await link.node.call("CLIENT", "UNBLOCK", link.client_id))
        return False


def _merged(reads: Iterable[asyncio.Future[list[Reply]]]) -> Reply:
    found: list[Any] = []
    errors: list[Local2Error] = []
    for read in reads:
        if read.cancelled():
            continue
        try:
            found += checked(read.result()[-1]) or ()
        except Local2Error as exc:
            errors.append(exc)
    if errors and not found:
        raise errors[0]
    # an error that stays comes up again with the next read
    return found or None
