"""taskiq: a Redis stream with a consumer group, results in a key that the requester polls."""

from __future__ import annotations

import asyncio
from typing import Any

from bus_port import CONCURRENCY, tool_work
from taskiq.api import run_receiver_task
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

# Taskiq's own default is 200 ms; a shorter interval would cost more processor time than it saves.
POLL_S = 0.001


class TaskiqBus:
    name = "taskiq"
    promises = "stored result, a consumer group, acknowledgement"

    def __init__(self, url: str) -> None:
        self._broker = RedisStreamBroker(url).with_result_backend(RedisAsyncResultBackend(url))

        @self._broker.task(task_name="echo")
        async def echo(args: dict[str, Any]) -> str:
            return tool_work(args)

        self._echo = echo
        self._serving: asyncio.Task[None] | None = None

    async def start_worker(self) -> None:
        self._broker.is_worker_process = True
        await self._broker.startup()
        self._serving = asyncio.create_task(run_receiver_task(self._broker, max_async_tasks=CONCURRENCY))

    async def start_requester(self) -> None:
        await self._broker.startup()

    async def call(self, args: dict[str, Any]) -> str:
        task = await self._echo.kiq(args)
        return (await task.wait_result(check_interval=POLL_S, timeout=30)).return_value

    async def close(self) -> None:
        if self._serving:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._broker.shutdown()
