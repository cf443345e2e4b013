"""A web server on loopback that answers with scripted bytes, and a way to reach it under any name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import httpcore
import pytest
import pytest_asyncio
from support.loopback import listening

from services.web_fetch.guard import AllowedHosts, GuardedBackend
from services.web_fetch.names import open_names
from services.web_fetch.page import Browser
from services.web_fetch.reader import Reader, open_reader
from services.web_fetch.service import Fetcher

Reply = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes | str = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole HTTP response; `content_type="…"` becomes `content-type: …`."""
    data = body.encode() if isinstance(body, str) else body
    fields = {"content_type": "text/html; charset=utf-8", **headers}
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


class Site:
    """Answers each path with its reply, and remembers what was asked and how much was sent."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: list[str] = []
        self.sent = 0
        self.port = 0

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.requests.append(head)
        reply = self.replies.get(head.split(" ")[1], response("nothing here", "404 Not Found"))
        if isinstance(reply, bytes):
            writer.write(reply)
            await writer.drain()
        else:
            await reply(writer)

    async def stream_for_ever(self, writer: asyncio.StreamWriter, chunk: bytes) -> None:
        while True:
            writer.write(chunk)
            self.sent += len(chunk)
            await writer.drain()


class Detour(httpcore.AsyncNetworkBackend):
    """Records where a connection was to go, and takes it to loopback instead."""

    def __init__(self) -> None:
        self.connected: list[tuple[str, int]] = []
        # of each attempt
        self.limits: list[float | None] = []
        # addresses that refuse connections, and addresses that let the time of an attempt pass
        self.dead: set[str] = set()
        self.silent: set[str] = set()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        self.limits.append(timeout)
        if host in self.silent:
            raise httpcore.ConnectTimeout(f"no answer within {timeout} s")
        if host in self.dead:
            raise httpcore.ConnectError("connection refused")
        return await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", port, timeout)


class Names:
    """A resolver with scripted answers; the last answer of a name stays."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): list(sequence) for name, sequence in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        sequence = self.answers.get(host, [[host]])
        return sequence.pop(0) if len(sequence) > 1 else sequence[0]


# Tests that fetch pages run on one loop a module: `pytest.mark.asyncio(loop_scope="module")`.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def warm() -> AsyncIterator[Reader]:
    """A reader whose processes are kept from test to test: each takes most of a second of the processor to start."""
    async with open_reader() as reader:
        yield reader


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Site]:
    site = Site()
    async with listening(site.handle) as site.port:
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def fetcher(warm: Reader) -> AsyncIterator[Any]:
    """Makes a fetcher: `fetcher(allowed=["127.0.0.1:80"], resolver=…, network=…, timeout=…)`."""

    def make(
        allowed: Iterable[str] = (),
        *,
        timeout: float = 10,
        max_chars: int = 3_000,
        max_bytes: int = 5_000_000,
        max_pdf_bytes: int = 20_000_000,
        max_redirects: int = 5,
        resolver: Any = None,
        **backend: Any,
    ) -> Fetcher:
        guarded = GuardedBackend(AllowedHosts.of(allowed), resolver or system, **backend)
        return Fetcher(
            Browser(guarded, "LoCAL2/1.0 (research agent)", max_bytes, max_pdf_bytes, max_redirects),
            warm,
            timeout,
            max_chars,
        )

    async with open_names() as system:
        yield make


@pytest.fixture
def reply() -> Callable[..., bytes]:
    return response


@pytest.fixture
def detour() -> Detour:
    return Detour()


@pytest.fixture
def names() -> type[Names]:
    return Names
