"""The master behind sentinels: every new connection asks them who it is, and leaves it when they name another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, ClassVar, NoReturn

from shared.bus.clock import BusClock
from shared.bus.endpoint import Endpoint, Server
from shared.bus.link import Link
from shared.bus.port import Command, Reply, ReplyError
from shared.bus.wire import Desync, Wire, open_wire

# Seconds between two looks whether there is another master.
_LOOK = 1.0


class Sentinels:
    """Who is master, for all connections of a process. `master`: as far as any of them has heard."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._asked = 0.0
        self.master: Server | None = None
        # grows with every fail-over
        self._epoch = -1

    async def look(self, patience: float) -> None:
        """Asks now and then. Nobody knows better where no sentinel answers."""
        if time.monotonic() - self._asked >= _LOOK:
            self._asked = time.monotonic()
            with contextlib.suppress(ConnectionError):
                await self.ask(patience)

    async def ask(self, patience: float) -> Server:
        """Asks one sentinel after the other. Raises ConnectionError when none knows a master that is up."""
        reasons, behind = list[str](), list[tuple[int, Server]]()
        for sentinel in self._endpoint.several:
            try:
                # one that does not answer must not use up the time of the others
                async with asyncio.timeout(patience / (len(self._endpoint.several) + 1)):
                    epoch, master = await self._named(sentinel)
            except (OSError, TimeoutError, Desync) as exc:
                reasons.append(f"{sentinel}: {str(exc) or type(exc).__name__}")
                continue
            if epoch >= self._epoch:
                break
            # one that was cut off knows an earlier master
            behind.append((epoch, master))
        else:
            if not behind:
                raise ConnectionError(f"no sentinel knows a master that is up ({'; '.join(reasons)})")
            # or all of them have been set up anew
            epoch, master = behind[0]
        self._epoch, self.master = epoch, master
        return master

    async def _named(self, sentinel: Server) -> tuple[int, Server]:
        """The epoch of the master that a sentinel names, and where it is."""
        wire, (told,) = await open_wire(sentinel, [("SENTINEL", "MASTER", self._endpoint.master)])
        wire.abort()
        if isinstance(told, ReplyError):
            raise ConnectionError(str(told))
        state = {name.decode(): value.decode() for name, value in zip(told[::2], told[1::2], strict=True)}
        flags = set(state["flags"].split(","))
        if "master" not in flags or flags & {"s_down", "o_down", "disconnected"}:
            raise ConnectionError(f"the master is {state['flags']}")
        return int(state["config-epoch"]), self._endpoint.server.at(state["ip"], int(state["port"]))


class SentinelLink(Link):
    """A connection to whoever is master. A lost connection and a reply that says READONLY make it ask again."""

    # a server that has just been demoted, or is not promoted yet, is not spoken to
    greeting: ClassVar[tuple[Command, ...]] = (("ROLE",),)

    def __init__(self, sentinels: Sentinels, *, name: str, timeout: float = 5.0, clock: BusClock | None = None) -> None:
        super().__init__(Server(), name=name, timeout=timeout, clock=clock)
        self._sentinels = sentinels

    def server_of(self, stream: str) -> Server | None:
        return self._sentinels.master

    def line(self, stream: str, name: str) -> SentinelLink:
        return SentinelLink(self._sentinels, name=name, timeout=self._timeout, clock=self._clock)

    async def server(self) -> Server:
        return await self._sentinels.ask(self._patience)

    def _check(self, replies: list[Reply]) -> None:
        super()._check(replies)
        if replies[1][0] != b"master":
            raise ConnectionError(f"the sentinels' master is a {replies[1][0].decode()} just now")

    def _watches(self, wire: Wire) -> list[Coroutine[Any, Any, NoReturn]]:
        return [*super()._watches(wire), self._replaced()]

    async def _replaced(self) -> NoReturn:
        """Ends the connection to one that is no master any more. Until it is told, which takes the sentinels ten
        seconds, it confirms what will be lost."""
        # whatever a sentinel answers ends it, too: the connection that is made anew says it
        while self._sentinels.master == self._at:
            await asyncio.sleep(self._timeout / 10)
            await self._sentinels.look(self._patience)
        raise ConnectionError("the sentinels have another master")
