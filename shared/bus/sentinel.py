"""The master behind sentinels: every new connection asks them who it is."""

from __future__ import annotations

from typing import Any, ClassVar

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.asyncio.utils import from_url
from redis.backoff import NoBackoff

from shared.bus.endpoint import Address, Endpoint
from shared.bus.link import Command, Link, Reply, pool_of
from shared.bus.wire import Server


class SentinelLink(Link):
    """A connection to whoever is master. A lost connection and a reply that says READONLY make it ask again."""

    # a server that has just been demoted, or is not promoted yet, is not spoken to
    greeting: ClassVar[tuple[Command, ...]] = (("ROLE",),)

    def __init__(self, endpoint: Endpoint, *, name: str, timeout: float = 5.0) -> None:
        super().__init__(endpoint.server(endpoint.addresses[0]), name=name, timeout=timeout)
        self._endpoint = endpoint

    async def server(self) -> Server:
        return Server.parse(self._endpoint.server(await self._master()))

    async def _connection(self) -> AbstractConnection:
        return pool_of(self._endpoint.server(await self._master()), self._timeout).make_connection()

    async def _master(self) -> Address:
        """Asks one sentinel after the other. Raises RedisError when none knows a master that is up."""
        options: dict[str, Any] = {
            "socket_timeout": self._timeout,
            "socket_connect_timeout": self._timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        sentinel = Sentinel([])
        sentinel.sentinels = [from_url(self._endpoint.sentinel(place), **options) for place in self._endpoint.addresses]
        try:
            host, port = await sentinel.discover_master(self._endpoint.master)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return Address(host, int(port))

    def _check(self, replies: list[Reply]) -> None:
        super()._check(replies)
        if replies[1][0] != b"master":
            raise ConnectionError(f"the sentinels' master is a {replies[1][0].decode()} just now")
