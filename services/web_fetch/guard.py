"""The only way out: names are resolved, every address is checked, and exactly a checked address is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Self

import httpcore

from services.web_fetch.address import is_public
from services.web_fetch.errors import Blocked, FetchError
from services.web_fetch.url import check_port, split_authority

# An address that does not answer must leave time for the next one of the same name.
ATTEMPT_SECONDS = 4.0
# A name may have thousands, of machines that have nothing to do with it.
MOST_ADDRESSES = 16
# All attempts of a resolver together.
RESOLVE_SECONDS = 5.0

Resolver = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts that an operator lets be fetched although they are private: by exactly this name, never by address.

    An entry `host` holds for its web ports, `host:port` for that port.
    """

    entries: frozenset[tuple[str, int | None]] = frozenset()

    @classmethod
    def of(cls, hosts: Iterable[str]) -> Self:
        """Raises Blocked for an entry that is not a host or host:port."""
        return cls(frozenset(split_authority(host.strip()) for host in hosts))

    def named(self, host: str, port: int) -> bool:
        return (host, port) in self.entries

    def __contains__(self, target: tuple[str, int]) -> bool:
        return target in self.entries or (target[0], None) in self.entries


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections for httpcore. There is no second look-up between check and connection that could differ."""

    def __init__(
        self,
        allowed: AllowedHosts,
        resolver: Resolver,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._allowed = allowed
        self._resolver = resolver
        self._network = network or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises Blocked, or FetchError when no address answers."""
        addresses = await self._checked(host, port)
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(address, port, ATTEMPT_SECONDS)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(addresses[-1], port, timeout)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise Blocked("sockets of this machine are not fetched")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _checked(self, host: str, port: int) -> list[str]:
        if not self._allowed.named(host, port):
            check_port(port)
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                addresses = await self._resolver(host, port)
        except TimeoutError as exc:
            raise FetchError(f"the name servers do not answer for {host}") from exc
        except (OSError, UnicodeError) as exc:
            raise FetchError(f"the name {host} cannot be resolved") from exc
        if not addresses:
            raise FetchError(f"the name {host} cannot be resolved")
        # One private address among public ones is enough: a name that has both is an attempt, or a mistake.
        if (host, port) not in self._allowed and not all(map(is_public, addresses)):
            raise Blocked(f"{host} is not on the public internet")
        return addresses[:MOST_ADDRESSES]
