"""Counts what comes from the network, compressed or not, and lets others have their turn."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

from services.web_fetch.errors import FetchError

# So much is parsed before others have their turn.
_AT_ONCE = 16_384


class Meter(httpcore.AsyncNetworkBackend):
    """Of one request: its connections share the bytes that are `left`."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, left: int) -> None:
        self._network = network
        self.left = left

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Metered(self, await self._network.connect_tcp(host, port, timeout, local_address, socket_options))

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await self._network.connect_unix_socket(path, timeout, socket_options)

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


class _Metered(httpcore.AsyncNetworkStream):
    def __init__(self, meter: Meter, stream: httpcore.AsyncNetworkStream) -> None:
        self._meter, self._stream = meter, stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Raises FetchError when there was more than the server was allowed to send."""
        await asyncio.sleep(0)
        data = await self._stream.read(min(max_bytes, _AT_ONCE), timeout)
        self._meter.left -= len(data)
        if self._meter.left < 0:
            raise FetchError("the server sends more than a page")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Metered(self._meter, await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
