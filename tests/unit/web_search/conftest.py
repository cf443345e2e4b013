"""A search service on loopback with one scripted answer, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from support.loopback import listening


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
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
        self.body = await reader.readexactly(int(fields.get("content-length", "0")))
        target = urlsplit(head.split(" ")[1])
        self.heads.append(head)
        self.paths.append(target.path)
        self.query = {name: values[0] for name, values in parse_qs(target.query).items()}
        await asyncio.sleep(self.delay)
        if not isinstance(self.answer, bytes) and callable(self.answer):
            await self.answer(writer)
            return
        data = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        lines = [f"HTTP/1.1 {self.status} X", f"Content-Length: {len(data)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + data)
        await writer.drain()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    async with listening(engine.handle) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        yield client
