"""A gateway on loopback that plays what a test tells it, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from support.loopback import listening

from services.cli.settings import ClientSettings


@dataclass(frozen=True)
class Heard:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Play = Callable[[Heard, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class LoopbackGateway:
    """`play` answers each request by writing to the connection, which is closed afterwards."""

    play: Play | None = None
    requests: list[Heard] = field(default_factory=list)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            method, path, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            heard = Heard(method, path, headers, body)
            self.requests.append(heard)
            assert self.play is not None
            await self.play(heard, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def settings(self, **more: Any) -> ClientSettings:
        return ClientSettings(api_url=f"http://127.0.0.1:{self.port}", api_key="test-key", **more)


@pytest.fixture
async def loopback_gateway() -> AsyncIterator[LoopbackGateway]:
    gateway = LoopbackGateway()
    async with listening(gateway.serve) as gateway.port:
        yield gateway


@pytest.fixture
def json_answer() -> Callable[[Any, int], bytes]:
    def build(value: Any, status: int = 200) -> bytes:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return (head + "Connection: close\r\n\r\n").encode() + body

    return build


@pytest.fixture
def event_head() -> Callable[[str, str], bytes]:
    def build(query_id: str = "7-0", session_id: str = "s") -> bytes:
        return (
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            f"X-Query-Id: {query_id}\r\nX-Session-Id: {session_id}\r\n\r\n"
        ).encode()

    return build


@pytest.fixture
def chunk() -> Callable[[bytes], bytes]:
    return lambda data: b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is installed, as far as its metadata say."""

    def absent(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(Distribution, "from_name", absent)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("LOCAL2_", "OLLAMA_", "SEARXNG_", "BRAVE_", "TAVILY_", "OPENAI_", "GEMINI_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
