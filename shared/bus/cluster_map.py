"""Which node of a Redis Cluster has which hash slot, and the connections to the nodes.

The map of slots is read again whenever there is doubt about it, and as long as a connection is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, NoReturn, Self

from shared.bus.endpoint import Endpoint, Server
from shared.bus.hash_slots import SLOTS, slot_of_key
from shared.bus.link import CONDITIONS, Link, ended
from shared.bus.port import Command, ConnectionLost, Reply, ReplyError, checked
from shared.bus.wire import Wire
from shared.errors import BusUnavailable
from shared.telemetry.logging import get_logger

log = get_logger()

# The map is read again this often while something is wrong, and all the same when nothing seems to be; and so soon once
# there is somebody to ask.
_UNEASY = 0.2
_ROUTINE = 30.0
_SOON = 0.05
# Seconds that a read stays where a stream is only on its way to: a move that is broken off takes it back.
_VISIT = 2.0
_VISITED = "the visit is over"


class NodeLink(Link):
    """The connection to one node. Every command has its own answer, also when it speaks of the node's condition; none
    waits for a node that is away. One that has lost the scripts is given them by a new connection.

    lost: is told, as often as it happens, that the node is away.
    """

    conditions: ClassVar[tuple[str, ...]] = ("NOSCRIPT",)

    def __init__(self, at: Server, *, name: str, timeout: float, lost: Callable[[str], None]) -> None:
        super().__init__(at, name=name, timeout=timeout)
        self.at = at
        self._lost = lost

    def _report(self, reason: str, served: int) -> None:
        self._reason = reason
        self._lost(f"{self.at}: {reason}")

    def _requeue(self) -> None:
        super()._requeue()
        for unit in self._queue:
            if not unit.future.done():
                unit.future.set_exception(ConnectionLost(f"the connection to {self.at} was lost"))
        self._queue.clear()


class ClusterMap:
    """Who is master of each slot, as the nodes tell it.

    connected: set once that is known. masters: one of the slots of each. trouble: why a node was lost, the last time;
    empty once all is well.
    """

    def __init__(self, endpoint: Endpoint, *, name: str, timeout: float = 5.0) -> None:
        self._endpoint = endpoint
        self._name = name
        self._timeout = timeout
        self._owners: list[NodeLink | None] = [None] * SLOTS
        self.masters: dict[NodeLink, int] = {}
        self.nodes: dict[Server, NodeLink] = {}
        self._doubt = asyncio.Event()
        self._asked = 0
        self._complaint = ""
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.connected = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._learn(), name=f"cluster {self._name}")
        return self

    async def __aexit__(self, *_exc: Any) -> None:
        self._closing = True
        assert self._task is not None
        await ended(self._task)
        # whoever waits for the map is told
        self.connected.set()
        for node in self.nodes.values():
            await node.__aexit__()

    @property
    def trouble(self) -> str:
        return self._complaint

    async def mapped(self) -> None:
        """Waits for the map. Raises BusUnavailable when it will never come."""
        if not self.connected.is_set():
            await self.connected.wait()
        if self._closing:
            raise BusUnavailable("the bus is closed")

    def owner(self, slot: int) -> NodeLink | None:
        """The master of a slot, if it has one just now."""
        return self._owners[slot]

    def doubt(self) -> None:
        """The map may be wrong: it is read again."""
        self._doubt.set()

    def lost(self, reason: str) -> None:
        """A connection to a node is away."""
        self._complain(reason)
        self.doubt()

    def _complain(self, reason: str) -> None:
        """Once per reason, until all is well again."""
        if reason and reason != self._complaint:
            log.warning("bus.connection_lost", link=self._name, reason=reason)
            self._complaint = reason

    def to(self, server: Server) -> NodeLink:
        """The connection to a node, made at its first use."""
        node = self.nodes.get(server)
        if node is None:
            node = self.nodes[server] = NodeLink(server, name=self._name, timeout=self._timeout, lost=self.lost)
            node.open()
        return node

    def named(self, text: str, by: NodeLink) -> NodeLink:
        """The node that another one's answer ends with, `host:port`; who does not know its own name leaves the host
        away."""
        host, _, port = text.rpartition(" ")[2].rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        return self.to(by.at.at(by.at.host if host in ("", "?") else host, int(port)))

    # ── reading it ───────────────────────────────────────────────────────────────────────────────────────────

    async def _learn(self) -> None:
        """Keeps the map. Reads it again when there is doubt, and while a connection is away."""
        while True:
            self._doubt.clear()
            pause = _UNEASY
            try:
                if (asked := self._someone()) is None:
                    pause = _SOON
                elif found := await self._slots(asked):
                    self._apply(found)
                    await self._forget()
                    if None not in self._owners and all(node.connected.is_set() for node in self.masters):
                        pause, self._complaint = _ROUTINE, ""
            except Exception:
                # without the map nothing goes on: whatever a node answers, another may do better
                log.exception("bus.cluster_map_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._doubt.wait()
            # a burst of redirections is one reason
            await asyncio.sleep(0.01)

    def _someone(self) -> NodeLink | None:
        """A node to ask, each time another one; where none is connected, those in the URL are tried."""
        there = [node for node in self.nodes.values() if node.connected.is_set()]
        if not there:
            for server in self._endpoint.several:
                self.to(server)
            return None
        self._asked += 1
        return there[self._asked % len(there)]

    async def _slots(self, asked: NodeLink) -> list[tuple[int, int, NodeLink]]:
        """The map as one node knows it; nothing when it does not answer."""
        try:
            rows = await asked.call("CLUSTER", "SLOTS", retry=False)
        except ReplyError as exc:
            self._complain(f"{asked.at}: {exc}")
            return []
        except (ConnectionLost, BusUnavailable):
            return []
        return [
            (first, last, self.named(f"{(host or b'').decode()}:{port}", asked))
            for first, last, (host, port, *_), *_ in rows
        ]

    def _apply(self, rows: list[tuple[int, int, NodeLink]]) -> None:
        owners: list[NodeLink | None] = [None] * SLOTS
        for first, last, node in rows:
            owners[first : last + 1] = [node] * (last - first + 1)
        masters = {node: first for first, _, node in rows}
        if masters.keys() != self.masters.keys():
            log.info("bus.cluster", masters=[str(node.at) for node in masters])
        self._owners, self.masters = owners, masters
        self.connected.set()

    async def _forget(self) -> None:
        """Gives up the connections to nodes without slots that do not answer.

        One that answers is kept: it tells where its slots are, and may have what has just been moved to it.
        """
        for server, node in list(self.nodes.items()):
            if node not in self.masters and node.trouble:
                await self.nodes.pop(server).__aexit__()


class StreamLink(Link):
    """The connection to whichever node has a stream, for reads that wait there. A read that the node sends elsewhere is
    lost like one on a broken connection: the next one goes there."""

    conditions: ClassVar[tuple[str, ...]] = (*CONDITIONS, "MOVED", "ASK")

    def __init__(self, slots: ClusterMap, stream: str, *, name: str, timeout: float) -> None:
        super().__init__(Server(), name=name, timeout=timeout)
        self._map = slots
        self._slot = slot_of_key(stream)
        # where it is, and where it has been sent
        self.node: NodeLink | None = None
        self._sent: NodeLink | None = None

    async def server(self) -> Server:
        self.node, self._sent = self._sent or self._map.owner(self._slot), None
        if self.node is None:
            raise ConnectionError("the stream has no master")
        return self.node.at

    def _report(self, reason: str, served: int) -> None:
        if self.node is not None and reason.startswith(("MOVED ", "ASK ")):
            self._sent = self._map.named(reason, self.node)
            self._map.doubt()
        elif reason != _VISITED:
            self._map.lost(f"{self.node and self.node.at}: {reason}")

    def _watches(self, wire: Wire) -> list[Coroutine[Any, Any, NoReturn]]:
        return [*super()._watches(wire), self._visit()]

    async def _visit(self) -> NoReturn:
        """Ends the connection to one who is not known to be the master, after a while."""
        await asyncio.sleep(_VISIT)
        while self._map.owner(self._slot) in (self.node, None):
            await asyncio.sleep(_VISIT)
        raise ConnectionError(_VISITED)

    def read(self, command: Command, block: float, now: bool) -> asyncio.Future[list[Reply]]:
        """The reply to come, behind another one: that lets it in where the stream is on its way to."""
        return self.submit((("ASKING",), command), False, block=block, now=now)

    async def call(self, *command: Any, retry: bool = False, block: float = 0.0, now: bool = False) -> Reply:
        return checked((await self.read(command, block, now))[-1])
