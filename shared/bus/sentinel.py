"""The master behind sentinels: every new connection asks them who it is, and leaves it when they name another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import ClassVar, NamedTuple

from shared.bus.clock import BusClock
from shared.bus.endpoint import Address, Endpoint
from shared.bus.link import Link
from shared.bus.port import Command, Reply, ReplyError
from shared.bus.wire import Desync, Server, Wire, open_wire

# Seconds between two looks whether there is another master.
_LOOK = 1.0


class _Named(NamedTuple):
    """A master, as a sentinel names it. epoch: its `config-epoch`, which grows with every fail-over."""

    epoch: int
    address: Address


class Sentinels:
    """Who is master, for all connections of a process. `master`: as far as any of them has heard."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._newest: _Named | None = None
        self._asked = 0.0

    @property
    def master(self) -> Server | None:
        return self._newest and self._endpoint.at(self._newest.address)

    async def look(self, patience: float) -> None:
        """Asks now and then. Nobody knows better where no sentinel answers."""
        if time.monotonic() - self._asked >= _LOOK:
            self._asked = time.monotonic()
            with contextlib.suppress(ConnectionError):
                await self.ask(patience)

    async def ask(self, patience: float) -> Server:
        """Asks one sentinel after the other. Raises ConnectionError when none knows a master that is up."""
        reasons, behind = [], None
        for place in self._endpoint.addresses:
            try:
                # one that does not answer must not use up the time of the others
                async with asyncio.timeout(patience / (len(self._endpoint.addresses) + 1)):
                    named = await self._named(place)
            except (OSError, TimeoutError, Desync) as exc:
                reasons.append(f"{place}: {str(exc) or type(exc).__name__}")
                continue
            if self._newest is None or named.epoch >= self._newest.epoch:
                self._newest = named
                break
            # one that was cut off knows an earlier master
            behind = behind or named
        else:
            if behind is None:
                raise ConnectionError(f"no sentinel knows a master that is up ({'; '.join(reasons)})")
            # or all of them have been set up anew
            self._newest = behind
        return self._endpoint.at(self._newest.address)

    async def _named(self, place: Address) -> _Named:
        assert self._endpoint.sentinel is not None, "its URL names sentinels"
        sentinel = replace(self._endpoint.sentinel, host=place.host, port=place.port)
        wire, (told,) = await open_wire(sentinel, [("SENTINEL", "MASTER", self._endpoint.master)])
        wire.abort()
        if isinstance(told, ReplyError):
            raise ConnectionError(str(told))
        state = {name.decode(): value.decode() for name, value in zip(told[::2], told[1::2], strict=True)}
        flags = set(state["flags"].split(","))
        if "master" not in flags or flags & {"s_down", "o_down", "disconnected"}:
            raise ConnectionError(f"the master is {state['flags']}")
        return _Named(int(state["config-epoch"]), Address(state["ip"], int(state["port"])))


class SentinelLink(Link):
    """A connection to whoever is master. A lost connection and a reply that says READONLY make it ask again."""

    # a server that has just been demoted, or is not promoted yet, is not spoken to
    greeting: ClassVar[tuple[Command, ...]] = (("ROLE",),)

    def __init__(self, sentinels: Sentinels, *, name: str, timeout: float = 5.0, clock: BusClock | None = None) -> None:
        super().__init__(Server(), name=name, timeout=timeout, clock=clock)
        self._sentinels = sentinels

    async def server(self) -> Server:
        return await self._sentinels.ask(self._patience)

    def _check(self, replies: list[Reply]) -> None:
        super()._check(replies)
        if replies[1][0] != b"master":
            raise ConnectionError(f"the sentinels' master is a {replies[1][0].decode()} just now")

    async def _serve(self, wire: Wire, client_id: int) -> None:
        leaving = asyncio.create_task(self._leave(wire))
        try:
            await super()._serve(wire, client_id)
        finally:
            leaving.cancel()

    async def _leave(self, wire: Wire) -> None:
        """Ends the connection to one that is no master any more. Until it is told, which takes the sentinels ten
        seconds, it confirms what will be lost."""
        why: Exception = ConnectionError("the sentinels have another master")
        try:
            while self._sentinels.master == self._at:
                await asyncio.sleep(self._timeout / 10)
                await self._sentinels.look(self._patience)
        except Exception as exc:
            # whatever a sentinel answers, the connection that is made anew says it
            why = exc
        if not wire.lost.done():
            wire.lost.set_result(why)
