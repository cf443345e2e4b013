"""A search service on loopback with one scripted answer, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest


class Engine:
    def __init__(self) -> None:
        self.status = 200
        self.answer: Any = {"results": []}
        self.headers: dict[str, str] = {}
        self.delay = 0.0
        self.url = ""
        self.paths: list[str] = []
        self.query: dict[str, str] = {}
        self.heads: list[str] = []
        self.body = b""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
            self.body = await reader.readexactly(int(fields.get("content-length", "0")))
            target = urlsplit(head.split(" ")[1])
            self.heads.append(head)
            self.paths.append(target.path)
            self.query = {name: values[0] for name, values in parse_qs(target.query).items()}
            await asyncio.sleep(self.delay)
            data = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
            lines = [f"HTTP/1.1 {self.status} X", f"Content-Length: {len(data)}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in self.headers.items()]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + data)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(engine.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield engine
    server.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client
