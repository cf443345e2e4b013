"""A Redis Cluster behind the interface of one connection: commands find their node, in their order.

What a node answers with MOVED, ASK or TRYAGAIN it has not carried out: that command is sent again where it belongs,
also when it must not be repeated after a lost connection. What waits for a node that is away goes to whoever has its
slots then.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from math import inf
from typing import ClassVar

from shared.bus.cluster_map import ClusterMap, NodeLink, StreamLink
from shared.bus.endpoint import Endpoint, Server
from shared.bus.hash_slots import slot_of, slot_of_key, stages
from shared.bus.link import CONDITIONS, MOST_TRIES
from shared.bus.port import Command, ConnectionLost, Port, Reply, ReplyError, checked
from shared.errors import PermanentError

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.25
_UNANSWERED = object()

# Who is sent some of an errand's commands, and whether it is asked to let them in: what was sent elsewhere, and nothing
# else, for a slot may be on its way back to where an old map says that it is.
_Part = tuple[NodeLink | None, bool]


class _Errand:
    """Commands on their way to the masters of their slots.

    ticket: the smaller, the earlier it came. left: what no node has carried out yet. instead: to whom some of that is
    sent, once, in the place of a master. broken: how often a large message broke the connection. called: done when it
    may be its turn.
    """

    def __init__(self, commands: Sequence[Command], slots: Sequence[int], ticket: float) -> None:
        self.commands = commands
        self.slots = slots
        self.ticket = ticket
        self.replies: list[Reply] = [_UNANSWERED] * len(commands)
        self.left = list(range(len(commands)))
        self.instead: dict[int, NodeLink] = {}
        self.broken = 0
        self.called: asyncio.Future[None] | None = None


class _Queue:
    """The order of one slot: nothing is sent before what came earlier has been, nor to another node before that has
    answered. So what has to be sent again is not overtaken by what comes behind it."""

    def __init__(self) -> None:
        # what is to be sent, the earliest first; what is on its way, and to whom
        self._waiting: list[_Errand] = []
        self._sent: set[_Errand] = set()
        self._nodes: set[NodeLink | None] = set()

    def join(self, errand: _Errand) -> None:
        """It is to be sent, or sent again."""
        self.leave(errand)
        insort(self._waiting, errand, key=lambda one: one.ticket)

    def goes(self, errand: _Errand, nodes: set[NodeLink | None]) -> bool:
        """Whether it is sent to these nodes now."""
        if self._waiting[0] is not errand or (self._sent and self._nodes != nodes):
            return False
        del self._waiting[0]
        self._sent.add(errand)
        self._nodes = nodes
        self._call()
        return True

    def leave(self, errand: _Errand) -> bool:
        """True when it was the last."""
        if errand in self._waiting:
            self._waiting.remove(errand)
        self._sent.discard(errand)
        self._call()
        return not self._waiting and not self._sent

    def _call(self) -> None:
        if self._waiting and (called := self._waiting[0].called) is not None and not called.done():
            called.set_result(None)


class ClusterLink(ClusterMap, Port):
    """Sends commands to the masters of a cluster (see Port)."""

    one_server: ClassVar[bool] = False

    def __init__(self, endpoint: Endpoint, *, name: str, timeout: float = 5.0) -> None:
        super().__init__(endpoint, name=name, timeout=timeout)
        self._tickets = count()
        # of slots for which something is under way
        self._queues: defaultdict[int | _Errand, _Queue] = defaultdict(_Queue)

    def server_of(self, stream: str) -> Server | None:
        node = self.owner(slot_of_key(stream))
        return None if node is None else node.at

    def line(self, stream: str, name: str) -> StreamLink:
        return StreamLink(self, stream, name=name, timeout=self._timeout)

    async def places(self) -> Sequence[int]:
        await self.mapped()
        return sorted(self.masters.values())

    async def at_place(self, place: int, commands: Sequence[Command]) -> list[Reply]:
        return await self.carry(commands, [place] * len(commands), retry=True)

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        return asyncio.ensure_future(self.submit(commands, retry, until=until, all_or_error=True))

    async def submit(
        self,
        commands: Sequence[Command],
        retry: bool,
        *,
        block: float = 0.0,
        until: float | None = None,
        now: bool = False,
        all_or_error: bool = False,
    ) -> list[Reply]:
        """See Port. all_or_error: the first error is raised, and nothing behind it is sent."""
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

        Those of one slot keep the order in which they came (see _Queue); except what waits for its second key, which
        may take as long as it takes to move a slot.
        """
        errand, pause = _Errand(commands, slots, next(self._tickets)), _FIRST_PAUSE
        # what is for several slots has no order
        key = slots[0] if len(set(slots)) == 1 else errand
        queue = self._queues[key]
        queue.join(errand)
        try:
            while True:
                parts = await self._turn(errand, queue, until)
                await self._ask(errand, parts, retry, block, until)
                if not errand.left:
                    return errand.replies
                queue.join(errand)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
        finally:
            if queue.leave(errand):
                self._queues.pop(key, None)

    async def _turn(self, errand: _Errand, queue: _Queue, until: float | None) -> dict[_Part, list[int]]:
        """Waits until an errand may be sent; to whom. Raises ConnectionLost when that is too late."""
        loop = asyncio.get_running_loop()
        while True:
            await self.mapped()
            left = None if until is None else until - loop.time()
            if left is not None and left < 0:
                raise ConnectionLost("there was no connection to the Redis Cluster in time", errand.broken)
            parts: dict[_Part, list[int]] = {}
            for n in errand.left:
                node = errand.instead.get(n)
                parts.setdefault((node or self.owner(errand.slots[n]), node is not None), []).append(n)
            if queue.goes(errand, {node for node, _ in parts}):
                return parts
            errand.called = loop.create_future()
            await asyncio.wait((errand.called,), timeout=left)

    async def _ask(
        self, errand: _Errand, parts: dict[_Part, list[int]], retry: bool, block: float, until: float | None
    ) -> None:
        """Has nodes carry out their parts, and takes what they answer. Raises ConnectionLost for what must not be sent
        again, PermanentError for what breaks every connection."""
        tries = [self._try(errand, part, places, block, until) for part, places in parts.items()]
        outcomes = [await tries[0]] if len(tries) == 1 else await asyncio.gather(*tries, return_exceptions=True)
        errand.instead = {}
        for ((node, _), places), outcome in zip(parts.items(), outcomes, strict=True):
            if isinstance(outcome, ConnectionLost) and retry:
                errand.broken += outcome.broken
                if errand.broken >= MOST_TRIES:
                    raise PermanentError(f"a large message broke the connection to Redis {errand.broken} times")
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome and node is not None:
                self._sort(errand, node, places, outcome)
        errand.left = [n for n in errand.left if errand.replies[n] is _UNANSWERED]
        if len(errand.left) > len(errand.instead):
            self.doubt()

    async def _try(
        self, errand: _Errand, part: _Part, places: Sequence[int], block: float, until: float | None
    ) -> list[Reply] | ConnectionLost:
        """A node's replies to commands, or that they were lost; none when it is not there."""
        node, asks = part
        if node is None or not node.connected.is_set():
            return []
        commands = [errand.commands[n] for n in places]
        if asks:
            commands = [one for command in commands for one in (("ASKING",), command)]
        try:
            replies = await node.submit(commands, False, block=block, until=until)
        except ConnectionLost as exc:
            return exc
        return replies[1::2] if asks else replies

    def _sort(self, errand: _Errand, node: NodeLink, places: Sequence[int], replies: Sequence[Reply]) -> None:
        """Takes the replies; those that only say who is to be asked, or not now, mean that a command is left."""
        for n, reply in zip(places, replies, strict=True):
            code = reply.code if isinstance(reply, ReplyError) else ""
            if code == "ASK":
                errand.instead[n] = self.named(str(reply), node)
            elif code == "MOVED":
                self._owners[errand.slots[n]] = self.named(str(reply), node)
            elif code == "TRYAGAIN":
                # it lets everything by from now on
                errand.ticket = inf
            elif code not in CONDITIONS:
                errand.replies[n] = reply
