"""A Redis Cluster behind the interface of one connection: commands find their node, in their order.

Each master has one connection (`NodeLink`). What a node answers with MOVED, ASK or TRYAGAIN it has not carried out:
that command is sent again where it belongs, also when it must not be repeated after a lost connection. The map of slots
is read again after every such sign, and as long as a connection is away; when a master has gone from the map, what
waits for it goes to its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar

from shared.bus.endpoint import Address, Endpoint
from shared.bus.hash_slots import EVERY, NOWHERE, SLOTS, name_of, slot_of, stages
from shared.bus.link import MOST_PATIENCE, Link, ended
from shared.bus.port import Command, ConnectionLost, Port, Reply, ReplyError, Script, checked, loading
from shared.bus.wire import Server
from shared.errors import BusUnavailable
from shared.telemetry.logging import get_logger

log = get_logger()

# Answers of a node that could not carry out a command just now.
_NOT_NOW = ("BUSY", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "UNBLOCKED")
_MAX_BACKOFF = 0.25
# Two nodes that send each other what neither wants are not asked faster than this.
_HOPS = 4
# The map is read again this often while something is wrong, and all the same when nothing seems to be; and so soon once
# there is somebody to ask.
_UNEASY = 0.2
_ROUTINE = 30.0
_SOON = 0.05
# A connection whose node has gone from the map may still answer what it was asked.
_FAREWELL = 1.0
_UNUSED = 5.0


class Unsent(ConnectionLost):
    """The command never left: it may go elsewhere, whatever it is."""


class NodeLink(Link):
    """The connection to one node. Every command has its own answer, also when it speaks of the node's condition."""

    conditions: ClassVar[tuple[str, ...]] = ()
    # by the monotonic clock
    used: float

    def __init__(
        self, endpoint: Endpoint, address: Address, *, name: str, timeout: float, on_loss: Callable[[str], None]
    ) -> None:
        super().__init__(endpoint.at(address), name=name, timeout=timeout)
        self.address = address
        self._on_loss = on_loss

    def _report(self, reason: str, served: int) -> None:
        # as often as it happens; whoever is told says it once
        self._on_loss(f"{self.address}: {reason}")

    async def retire(self) -> None:
        """Ends the connection; what was not sent goes elsewhere, what was may still be answered."""
        self._closing = True
        self._return_unsent()
        try:
            # a blocked read is ended by the server as soon as it knows; its answer must not get lost
            async with asyncio.timeout(_FAREWELL):
                while self._inflight and self.connected.is_set():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        finally:
            assert self._task is not None
            await ended(self._task)
        self._requeue()
        self._return_unsent()

    def _return_unsent(self) -> None:
        for unit in self._queue:
            if not unit.future.done():
                unit.future.set_exception(Unsent("the node has left"))


class Lines:
    """One connection per node, made at its first use. `single`: to one node at a time, the one before is given up."""

    def __init__(self, cluster: ClusterLink, name: str, *, single: bool = False) -> None:
        self._cluster = cluster
        self._name = name
        self._single = single
        self._links: dict[Address, NodeLink] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def to(self, address: Address) -> NodeLink:
        link = self._links.get(address)
        if link is None:
            for other in list(self._links) if self._single else ():
                self._retire(other)
            link = self._links[address] = self._cluster.connect(address, self._name)
        link.used = time.monotonic()
        return link

    def all(self) -> list[NodeLink]:
        return list(self._links.values())

    def keep(self, addresses: Iterable[Address]) -> None:
        """Gives up the connections to other nodes that do not answer, or that nobody uses any more.

        A node without slots answers too: with a redirection, or with what has just been moved to it.
        """
        unused = time.monotonic() - _UNUSED
        for address in self._links.keys() - set(addresses):
            link = self._links[address]
            if not link.connected.is_set() or link.used < unused:
                self._retire(address)

    def _retire(self, address: Address) -> None:
        task = asyncio.create_task(self._links.pop(address).retire())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        for link in self._links.values():
            await link.__aexit__()
        self._links.clear()
        for task in list(self._leaving):
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)


class ClusterLink(Port):
    """Sends commands to the masters of a cluster (see Port).

    `connected` is set once the map of slots has been read.
    """

    transactions: ClassVar[bool] = False

    def __init__(self, endpoint: Endpoint, *, name: str, timeout: float = 5.0) -> None:
        self._endpoint = endpoint
        self._name = name
        self._timeout = self._patience = timeout
        self._owners: list[Address | None] = [None] * SLOTS
        self.masters: tuple[Address, ...] = ()
        self.commands = Lines(self, name)
        self._others: list[Lines] = []
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
        await self.commands.close()

    @property
    def trouble(self) -> str:
        return self._complaint

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        return asyncio.ensure_future(self._staged(commands, retry, until=until, all_or_error=True))

    def submit(
        self, commands: Sequence[Command], retry: bool, *, block: float = 0.0, until: float | None = None
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
            if len(part) == 1 and slot_of(part[0]) is None:
                found = [await self._keyless(part[0], retry)]
            else:
                found = await self.carry(self.commands, part, retry=retry, block=block, until=until)
            for place, reply in zip(stage, found, strict=True):
                replies[place] = checked(reply) if all_or_error else reply
        return replies

    async def carry(
        self,
        lines: Lines,
        commands: Sequence[Command],
        *,
        retry: bool,
        block: float = 0.0,
        until: float | None = None,
    ) -> list[Reply]:
        """Sends commands with keys over some connections, follows redirections, waits while a slot has no master."""
        loop = asyncio.get_running_loop()
        replies: list[Reply] = [None] * len(commands)
        waiting = list(range(len(commands)))
        asking: dict[int, Address] = {}
        hops, delay = 0, 0.0
        while waiting:
            await self._mapped()
            if until is not None and loop.time() > until:
                raise ConnectionLost("there was no connection to the Redis Cluster in time")
            parts, homeless = self._parts(commands, waiting, asking)
            units = [
                lines.to(address).submit(
                    [part for n in places for part in ((("ASKING",), commands[n]) if asks else (commands[n],))],
                    False,
                    block=block,
                    until=until,
                )
                for (address, asks), places in parts.items()
            ]
            outcomes: Sequence[Any]
            if len(units) == 1 and not homeless:
                # awaited by itself, so that a cancellation reaches it at once
                try:
                    outcomes = [await units[0]]
                except ConnectionLost as exc:
                    outcomes = [exc]
            else:
                outcomes = await asyncio.gather(*units, return_exceptions=True)
            waiting, asking, lost = homeless, {}, None
            pause = bool(homeless)
            for ((address, asks), places), outcome in zip(parts.items(), outcomes, strict=True):
                if isinstance(outcome, ConnectionLost):
                    waiting += places
                    if not retry and not isinstance(outcome, Unsent):
                        lost = outcome
                    continue
                if isinstance(outcome, BaseException):
                    raise outcome
                for n, reply in zip(places, outcome[1::2] if asks else outcome, strict=True):
                    verdict = self._verdict(str(reply), address) if isinstance(reply, ReplyError) else None
                    if verdict is None:
                        replies[n] = reply
                        continue
                    waiting.append(n)
                    hops += 1
                    if isinstance(verdict, Address):
                        asking[n] = verdict
                    pause = pause or verdict == "later"
            if lost is not None:
                raise lost
            waiting.sort()
            if waiting and (pause or hops > _HOPS):
                self.doubt()
                delay = min(_MAX_BACKOFF, delay * 2 or 0.01)
                await asyncio.sleep(delay)
        return replies

    def _parts(
        self, commands: Sequence[Command], places: Sequence[int], asking: dict[int, Address]
    ) -> tuple[dict[tuple[Address, bool], list[int]], list[int]]:
        """Which commands go to which node (and whether they ask to be let in), and those whose slot has none."""
        parts: dict[tuple[Address, bool], list[int]] = {}
        homeless: list[int] = []
        for n in places:
            slot = slot_of(commands[n])
            assert slot is not None, "what has no key is sent by itself"
            address = asking.get(n) or self.owner(slot)
            if address is None:
                homeless.append(n)
            else:
                parts.setdefault((address, n in asking), []).append(n)
        return parts, homeless

    def _verdict(self, text: str, asked: Address) -> Address | str | None:
        """What an error reply means for its command: None, that is its answer; else that it was not carried out.

        An address: there, once. "again": wherever the map says now. "later": the same, after a pause.
        """
        word, _, rest = text.partition(" ")
        match word:
            case "MOVED":
                slot, _, place = rest.partition(" ")
                self._owners[int(slot)] = _address(place, asked)
                self.doubt()
                return "again"
            case "ASK":
                return _address(rest.partition(" ")[2], asked)
            case "NOSCRIPT":
                # in front of the next try on the same connection; no retry, for the next try would ask again
                for line in (self.commands, *self._others):
                    for link in line.all():
                        if link.address == asked:
                            link.submit(loading(list(Script.known.values())), False).add_done_callback(_heard)
                return "again"
        return "later" if word in _NOT_NOW else None

    async def _keyless(self, command: Command, retry: bool) -> Reply:
        """What concerns no key: a question to any node, or to every master."""
        name = name_of(command)
        if name in NOWHERE:
            raise ReplyError(f"ERR {name} has no meaning for a Redis Cluster as a whole")
        await self._mapped()
        if name == "SCAN":
            return await self._scan(command)
        if name in EVERY:
            replies = await asyncio.gather(*(self._tell(address, command, retry) for address in self.masters))
            refused = [reply for reply in replies if isinstance(reply, ReplyError)]
            # of several numbers the lowest: what one of them does not have is missing
            return refused[0] if refused else min(replies)
        links = sorted(self.commands.all(), key=lambda link: not link.connected.is_set())
        return await self._tell(links[0].address if links else self.masters[0], command, retry)

    async def _tell(self, address: Address, command: Command, retry: bool) -> Reply:
        while True:
            try:
                (reply,) = await self.commands.to(address).submit((command,), False)
                return reply
            except ConnectionLost:
                if not retry:
                    raise
                await self._mapped()
                if address not in self.masters:
                    address = self.masters[0]

    async def _scan(self, command: Command) -> Reply:
        """One master after the other: the cursor also says which."""
        masters = sorted(self.masters, key=str)
        inner, number = divmod(int(command[1]), len(masters))
        reply = await self._tell(masters[number], ("SCAN", inner, *command[2:]), True)
        if isinstance(reply, ReplyError):
            return reply
        cursor, keys = int(reply[0]), reply[1]
        if not cursor:
            # done with this one; 0 after the last
            return [b"%d" % ((number + 1) % len(masters)), keys]
        return [b"%d" % (cursor * len(masters) + number), keys]

    # ── the map ──────────────────────────────────────────────────────────────────────────────────────────────

    def owner(self, slot: int) -> Address | None:
        return self._owners[slot]

    async def server(self, address: Address | None) -> Server:
        """A node as a server to connect to."""
        assert address is not None
        return self._endpoint.at(address)

    def line(self, name: str) -> Lines:
        """A further connection, to whichever node it is needed to, which follows the map too; close it when done."""
        made = Lines(self, f"{self._name.rpartition(':')[0]}:{name}", single=True)
        self._others.append(made)
        return made

    def connect(self, address: Address, name: str) -> NodeLink:
        link = NodeLink(self._endpoint, address, name=name, timeout=self._timeout, on_loss=self._lost)
        link.open()
        return link

    def _lost(self, reason: str) -> None:
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
                    if None not in self._owners and self._whole():
                        pause, self._complaint = _ROUTINE, ""
            except Exception:
                # without the map nothing goes on: whatever a node answers, another may do better
                log.exception("bus.cluster_map_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._doubt.wait()
            # a burst of redirections is one reason
            await asyncio.sleep(0.01)

    def _whole(self) -> bool:
        links = [link for lines in (self.commands, *self._others) for link in lines.all()]
        return all(link.connected.is_set() for link in links if link.address in self.masters)

    def _someone(self) -> NodeLink | None:
        """A node to ask, each time another one; where none is connected, those in the URL are tried."""
        links = [link for link in self.commands.all() if link.connected.is_set()]
        if not links:
            for address in self._endpoint.addresses:
                self.commands.to(address)
            return None
        self._asked += 1
        return links[self._asked % len(links)]

    async def _slots(self, link: NodeLink) -> list[tuple[int, int, Address]]:
        """The map as one node knows it; nothing when it does not answer in time: the next is given twice as much."""
        try:
            async with asyncio.timeout(self._patience):
                rows = await link.call("CLUSTER", "SLOTS", retry=False)
        except TimeoutError:
            self._patience = min(max(MOST_PATIENCE, self._timeout), 2 * self._patience)
            return []
        except ReplyError as exc:
            self._complain(f"{link.address}: {exc}")
            return []
        except (ConnectionLost, BusUnavailable):
            return []
        self._patience = self._timeout
        return [(int(first), int(last), _named(node, link.address)) for first, last, node, *_ in rows]

    def _apply(self, rows: list[tuple[int, int, Address]]) -> None:
        owners: list[Address | None] = [None] * SLOTS
        for first, last, address in rows:
            owners[first : last + 1] = [address] * (last - first + 1)
        masters = tuple(dict.fromkeys(address for _, _, address in rows))
        if set(masters) != set(self.masters):
            log.info("bus.cluster", masters=[str(address) for address in masters])
        self._owners, self.masters = owners, masters
        for lines in (self.commands, *self._others):
            lines.keep(masters)
        for address in masters:
            self.commands.to(address)
        self.connected.set()


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _address(place: str, asked: Address) -> Address:
    """`host:port`, where a node that does not know its own name leaves the host away."""
    host, _, port = place.rpartition(":")
    known = host.removeprefix("[").removesuffix("]")
    return Address(asked.host if known in ("", "?") else known, int(port))


def _named(node: list[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    return Address(asked.host if host in ("", "?") else host, int(node[1]))
