"""A Redis Cluster behind the interface of one connection: commands find their node, in their order.

Each master has one connection (`NodeLink`). What a node answers with MOVED, ASK or TRYAGAIN it has not carried out:
that command is sent again where it belongs, also when it must not be repeated after a lost connection. The map of slots
is read again after every such sign, and as long as a connection is away; what waits for a node that is away goes to
whoever has its slots then. A blocking read has a connection of its own, which goes to where its stream is
(`StreamLink`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from shared.bus.endpoint import Address, Endpoint
from shared.bus.hash_slots import SLOTS, slot_of, slot_of_key, stages
from shared.bus.link import CONDITIONS, MOST_TRIES, Link, ended
from shared.bus.port import Command, ConnectionLost, Port, Reply, ReplyError, checked
from shared.bus.wire import Server, Wire
from shared.errors import BusUnavailable, PermanentError
from shared.telemetry.logging import get_logger

log = get_logger()

# Answers of a node that could not carry out a command just now.
_NOT_NOW = ("BUSY", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "UNBLOCKED")
_MAX_BACKOFF = 0.25
# What goes before a command that was sent to another node.
_ASKING: tuple[tuple[Command, ...], ...] = ((), (("ASKING",),))
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
    waits for a node that is away. One that has lost the scripts is given them by a new connection."""

    conditions: ClassVar[tuple[str, ...]] = ("NOSCRIPT",)

    def __init__(self, cluster: ClusterLink, address: Address, *, name: str, timeout: float) -> None:
        super().__init__(cluster.at(address), name=name, timeout=timeout)
        self.address = address
        self._cluster = cluster

    def _report(self, reason: str, served: int) -> None:
        # as often as it happens; whoever is told says it once
        self._cluster.lost(f"{self.address}: {reason}")

    def _requeue(self) -> None:
        super()._requeue()
        for unit in self._queue:
            if not unit.future.done():
                unit.future.set_exception(ConnectionLost(f"the connection to {self.address} was lost"))
        self._queue.clear()


class StreamLink(Link):
    """The connection to whichever node has a stream, for reads that wait there. A read that the node sends elsewhere is
    lost like one on a broken connection: the next one goes there."""

    conditions: ClassVar[tuple[str, ...]] = (*CONDITIONS, "MOVED ", "ASK ")

    def __init__(self, cluster: ClusterLink, stream: str, *, name: str, timeout: float) -> None:
        super().__init__(Server(), name=name, timeout=timeout)
        self._cluster = cluster
        self._slot = slot_of_key(stream)
        # where it is, and where it has been sent
        self.address: Address | None = None
        self._sent: Address | None = None
        self._visiting = False

    async def server(self) -> Server:
        self._visiting = self._sent is not None
        self.address, self._sent = self._sent or self._cluster.owner(self._slot), None
        if self.address is None:
            raise ConnectionError("the stream has no master")
        return self._cluster.at(self.address)

    def _report(self, reason: str, served: int) -> None:
        if self.address is not None and reason.startswith(("MOVED ", "ASK ")):
            self._sent = _address(reason, self.address)
            self._cluster.doubt()
        elif reason != _VISITED:
            self._cluster.lost(f"{self.address}: {reason}")

    async def _serve(self, wire: Wire, client_id: int) -> None:
        leaving = self._loop.call_later(_VISIT, self._leave, wire)
        try:
            await super()._serve(wire, client_id)
        finally:
            leaving.cancel()

    def _leave(self, wire: Wire) -> None:
        if self._visiting and not wire.lost.done():
            wire.lost.set_result(ConnectionError(_VISITED))

    def read(self, command: Command, block: float) -> asyncio.Future[list[Reply]]:
        """The reply to come, behind another one: that lets it in where the stream is on its way to."""
        return self.submit((("ASKING",), command), False, block=block)

    async def call(self, *command: Any, retry: bool = False, block: float = 0.0) -> Reply:
        return checked((await self.read(command, block))[-1])


class ClusterLink(Port):
    """Sends commands to the masters of a cluster (see Port).

    `connected` is set once the map of slots has been read. masters: one of the slots of each.
    """

    transactions: ClassVar[bool] = False

    def __init__(self, endpoint: Endpoint, *, name: str, timeout: float = 5.0) -> None:
        self._endpoint = endpoint
        self._name = name
        self._timeout = timeout
        self._owners: list[Address | None] = [None] * SLOTS
        self.masters: dict[Address, int] = {}
        # slots of which something has to be sent again, until it was
        self._again: dict[int | None, asyncio.Future[None]] = {}
        self.nodes: dict[Address, NodeLink] = {}
        self._doubt = asyncio.Event()
        self._asked = 0
        self._complaint = ""
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.connected = asyncio.Event()

    async def __aenter__(self) -> ClusterLink:
        self._task = asyncio.create_task(self._learn(), name=f"cluster {self._name}")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._closing = True
        assert self._task is not None
        await ended(self._task)
        # whoever waits for the map is told
        self.connected.set()
        for link in self.nodes.values():
            await link.__aexit__()

    @property
    def trouble(self) -> str:
        return self._complaint

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        return asyncio.ensure_future(self._staged(commands, retry, until=until, all_or_error=True))

    def submit(
        self,
        commands: Sequence[Command],
        retry: bool,
        *,
        block: float = 0.0,
        until: float | None = None,
        now: bool = False,
    ) -> Awaitable[list[Reply]]:
        return self._staged(commands, retry, block=block, until=until)

    async def _staged(
        self,
        commands: Sequence[Command],
        retry: bool,
        *,
        block: float = 0.0,
        until: float | None = None,
        all_or_error: bool = False,
    ) -> list[Reply]:
        """The replies of commands, errors at their place; or the first of these is raised, and nothing behind it is
        sent."""
        replies: list[Reply] = [None] * len(commands)
        for stage in stages(commands):
            part = [commands[place] for place in stage]
            slots = [slot_of(command) for command in part]
            found = await self.carry(part, slots, retry=retry, block=block, until=until)
            for place, reply in zip(stage, found, strict=True):
                replies[place] = checked(reply) if all_or_error else reply
        return replies

    async def carry(
        self,
        commands: Sequence[Command],
        slots: Sequence[int],
        *,
        retry: bool,
        block: float = 0.0,
        until: float | None = None,
    ) -> list[Reply]:
        """Sends commands to the masters of slots, follows redirections, waits while one has none that is there.

        What has to be sent again is not overtaken by what comes behind it in the same slot; except what waits for its
        second key, which may take as long as it takes to move a slot.
        """
        loop = asyncio.get_running_loop()
        replies: list[Reply] = [None] * len(commands)
        waiting = list(range(len(commands)))
        # who is to be asked instead of a master, once
        instead: dict[int, Address] = {}
        # what is for several slots has no order
        slot = slots[0] if len(set(slots)) == 1 else None
        mine = loop.create_future()
        delay, broken = 0.0, 0
        try:
            while waiting:
                if delay:
                    await asyncio.sleep(delay)
                delay = min(_MAX_BACKOFF, delay * 2 or 0.01)
                await self._mapped()
                while (before := self._again.get(slot, mine)) is not mine and (until is None or loop.time() <= until):
                    await asyncio.wait((before,), timeout=None if until is None else until - loop.time())
                if until is not None and loop.time() > until:
                    raise ConnectionLost("there was no connection to the Redis Cluster in time", broken)
                # who was sent elsewhere asks to be let in, and nobody else: a slot may be on its way back to where an
                # old map says that it is
                parts: dict[tuple[Address | None, bool], list[int]] = {}
                for n in waiting:
                    parts.setdefault((instead.get(n) or self.owner(slots[n]), n in instead), []).append(n)
                tries = [
                    self._try(address, [part for n in places for part in (*_ASKING[asks], commands[n])], block, until)
                    for (address, asks), places in parts.items()
                ]
                outcomes = [await tries[0]] if len(tries) == 1 else await asyncio.gather(*tries, return_exceptions=True)
                waiting, instead, second_key = [], {}, False
                for ((address, asks), places), outcome in zip(parts.items(), outcomes, strict=True):
                    if isinstance(outcome, ConnectionLost) and retry:
                        broken += outcome.broken
                        if broken >= MOST_TRIES:
                            raise PermanentError(f"a large message broke the connection to Redis {broken} times")
                    elif isinstance(outcome, BaseException):
                        raise outcome
                    if address is None or not isinstance(outcome, list):
                        waiting += places
                        continue
                    for n, reply in zip(places, outcome[asks :: 1 + asks], strict=True):
                        code = reply.code if isinstance(reply, ReplyError) else ""
                        if code == "ASK":
                            instead[n] = _address(str(reply), address)
                        elif code == "MOVED":
                            self._owners[slots[n]] = _address(str(reply), address)
                        elif code not in _NOT_NOW:
                            replies[n] = reply
                            continue
                        # it was not carried out
                        waiting.append(n)
                        second_key = second_key or code == "TRYAGAIN"
                waiting.sort()
                if len(waiting) > len(instead):
                    self.doubt()
                    if second_key:
                        self._let_by(slot, mine)
                        mine = loop.create_future()
                    elif slot is not None:
                        self._again.setdefault(slot, mine)
        finally:
            self._let_by(slot, mine)
        return replies

    def _let_by(self, slot: int | None, mine: asyncio.Future[None]) -> None:
        if self._again.get(slot) is mine:
            del self._again[slot]
            mine.set_result(None)

    async def _try(
        self, address: Address | None, commands: Sequence[Command], block: float, until: float | None
    ) -> list[Reply] | ConnectionLost | None:
        """What a node answers; None when it is not there."""
        link = None if address is None else self.to(address)
        if link is None or not link.connected.is_set():
            return None
        try:
            return await link.submit(commands, False, block=block, until=until)
        except ConnectionLost as exc:
            return exc

    async def places(self) -> Sequence[int]:
        await self._mapped()
        return sorted(self.masters.values())

    async def at_place(self, place: int, commands: Sequence[Command]) -> list[Reply]:
        return await self.carry(commands, [place] * len(commands), retry=True)

    # ── the map ──────────────────────────────────────────────────────────────────────────────────────────────

    def owner(self, slot: int) -> Address | None:
        return self._owners[slot]

    def at(self, address: Address) -> Server:
        """A node as a server to connect to."""
        return self._endpoint.at(address)

    def to(self, address: Address) -> NodeLink:
        """The connection to a node, made at its first use."""
        link = self.nodes.get(address)
        if link is None:
            link = self.nodes[address] = NodeLink(self, address, name=self._name, timeout=self._timeout)
            link.open()
        return link

    def lost(self, reason: str) -> None:
        """A connection to a node is away."""
        self._complain(reason)
        self.doubt()

    def _complain(self, reason: str) -> None:
        """Once per reason, until all is well again."""
        if reason and reason != self._complaint:
            log.warning("bus.connection_lost", link=self._name, reason=reason)
            self._complaint = reason

    def doubt(self) -> None:
        """The map may be wrong: it is read again."""
        self._doubt.set()

    async def _mapped(self) -> None:
        if not self.connected.is_set():
            await self.connected.wait()
        if self._closing:
            raise BusUnavailable("the bus is closed")

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
                    if None not in self._owners and all(self.nodes[at].connected.is_set() for at in self.masters):
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
        links = [link for link in self.nodes.values() if link.connected.is_set()]
        if not links:
            for address in self._endpoint.addresses:
                self.to(address)
            return None
        self._asked += 1
        return links[self._asked % len(links)]

    async def _slots(self, link: NodeLink) -> list[tuple[int, int, Address]]:
        """The map as one node knows it; nothing when it does not answer."""
        try:
            rows = await link.call("CLUSTER", "SLOTS", retry=False)
        except ReplyError as exc:
            self._complain(f"{link.address}: {exc}")
            return []
        except (ConnectionLost, BusUnavailable):
            return []
        return [
            (first, last, _address(f"{(host or b'').decode()}:{port}", link.address))
            for first, last, (host, port, *_), *_ in rows
        ]

    def _apply(self, rows: list[tuple[int, int, Address]]) -> None:
        owners: list[Address | None] = [None] * SLOTS
        for first, last, address in rows:
            owners[first : last + 1] = [address] * (last - first + 1)
        masters = {address: first for first, _, address in rows}
        if masters.keys() != self.masters.keys():
            log.info("bus.cluster", masters=[str(address) for address in masters])
        self._owners, self.masters = owners, masters
        for address in masters:
            self.to(address)
        self.connected.set()

    async def _forget(self) -> None:
        """Gives up the connections to nodes without slots that do not answer.

        One that answers is kept: it tells where its slots are, and may have what has just been moved to it.
        """
        for address in self.nodes.keys() - self.masters.keys():
            if not self.nodes[address].connected.is_set():
                await self.nodes.pop(address).__aexit__()


def _address(told: str, asked: Address) -> Address:
    """What a text ends with, `host:port`; a node that does not know its own name leaves the host away."""
    host, _, port = told.rpartition(" ")[2].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return Address(asked.host if host in ("", "?") else host, int(port))
