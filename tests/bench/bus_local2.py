"""LoCAL2's own bus under test, with all its promises: the tool runtime on one side, the tool client on the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bus_port import CONCURRENCY, tool_work
from pydantic import BaseModel, Field

from shared.envelope import now_ms
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service
from shared.participant.tool_client import Caller, ToolClient
from shared.telemetry.logging import configure

TOOL = "bench_echo"
TIMEOUT = 15.0


class BenchEcho(BaseModel):
    """Gives the text back, reversed."""

    number: int
    language: str
    limit: int
    text: str = Field(min_length=1, description="Any text")


@contextlib.asynccontextmanager
async def _build(_settings: Settings) -> AsyncIterator[Run[BenchEcho]]:
    async def run(args: BenchEcho) -> ToolResult:
        return ToolResult(tool_work({"text": args.text}))

    yield run


class Local2Bus:
    name = "LoCAL2"
    promises = "stored result, heartbeat, claims, deadline, dead letters, observers' copy of every result"

    def __init__(self, url: str) -> None:
        self._settings = Settings(
            redis_url=url, data_dir=Path(tempfile.gettempdir()), concurrency=CONCURRENCY, log_level="warning"
        )
        self._stack = contextlib.AsyncExitStack()
        self._numbers = itertools.count()
        self._run = f"{os.getpid()}-{now_ms()}"

    async def start_worker(self) -> None:
        configure("warning", "json", participant=TOOL)
        stop = asyncio.Event()
        serving = asyncio.create_task(tool_service(TOOL, BenchEcho, Settings, _build).run(self._settings, stop))

        async def ended() -> None:
            stop.set()
            await serving

        self._stack.push_async_callback(ended)

    async def start_requester(self) -> None:
        configure("warning", "json", participant="bench")
        context = await self._stack.enter_async_context(open_context("bench", self._settings))
        self._tools = ToolClient(context)
        async with asyncio.timeout(TIMEOUT):
            while TOOL not in await self._tools.schemas():
                await asyncio.sleep(0.05)

    async def call(self, args: dict[str, Any]) -> str:
        query = f"{self._run}-{next(self._numbers)}"
        caller = Caller(query, session_id=self._run, user_id="bench", deadline=now_ms() + 900_000)
        answer = await self._tools.call(TOOL, args, call_id=f"{query}:A:1:0", caller=caller, timeout=TIMEOUT, attempt=1)
        if answer.error is not None:
            raise RuntimeError(answer.error)
        return answer.result

    async def close(self) -> None:
        await self._stack.aclose()
