"""The master behind sentinels: every new connection asks them who it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from shared.bus.clock import BusClock
from shared.bus.endpoint import Address, Endpoint
from shared.bus.link import Link
from shared.bus.port import Command, Reply, ReplyError
from shared.bus.wire import Desync, Server, open_wire


class SentinelLink(Link):
    """A connection to whoever is master. A lost connection and a reply that says READONLY make it ask again."""

    # a server that has just been demoted, or is not promoted yet, is not spoken to
    greeting: ClassVar[tuple[Command, ...]] = (("ROLE",),)

    def __init__(self, endpoint: Endpoint, *, name: str, timeout: float = 5.0, clock: BusClock | None = None) -> None:
        super().__init__(endpoint.server, name=name, timeout=timeout, clock=clock)
        self._endpoint = endpoint

    async def server(self) -> Server:
        """Asks one sentinel after the other. Raises ConnectionError when none knows a master that is up."""
        reasons = []
        for place in self._endpoint.addresses:
            try:
                # one that does not answer must not use up the time of the others
                async with asyncio.timeout(self._patience / (len(self._endpoint.addresses) + 1)):
                    return self._endpoint.at(await self._master(place))
            except (OSError, TimeoutError, Desync) as exc:
                reasons.append(f"{place}: {str(exc) or type(exc).__name__}")
        raise ConnectionError(f"no sentinel knows a master that is up ({'; '.join(reasons)})")

    async def _master(self, place: Address) -> Address:
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
        return Address(state["ip"], int(state["port"]))

    def _check(self, replies: list[Reply]) -> None:
        super()._check(replies)
        if replies[1][0] != b"master":
            raise ConnectionError(f"the sentinels' master is a {replies[1][0].decode()} just now")
