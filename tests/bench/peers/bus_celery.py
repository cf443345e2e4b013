"""celery: a thread pool behind Redis lists, results in keys with a notification."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bus_port import CONCURRENCY, tool_work
from celery import Celery
from celery.contrib.testing.worker import start_worker


class CeleryBus:
    name = "celery"
    promises = "stored result, acknowledgement"

    def __init__(self, url: str) -> None:
        self._app = Celery("bench", broker=url, backend=url)
        self._echo = self._app.task(tool_work, name="echo")
        self._stack = contextlib.ExitStack()

    async def start_worker(self) -> None:
        # Celery's own way to run a worker in a thread. A thread pool costs less than processes for so short a task.
        worker = start_worker(self._app, pool="threads", concurrency=CONCURRENCY, perform_ping_check=False)
        await asyncio.to_thread(self._stack.enter_context, worker)

    async def start_requester(self) -> None:
        self._threads = ThreadPoolExecutor(CONCURRENCY)

    async def call(self, args: dict[str, Any]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, args)

    def _call(self, args: dict[str, Any]) -> str:
        result: str = self._echo.delay(args).get(timeout=30)
        return result

    async def close(self) -> None:
        await asyncio.to_thread(self._stack.close)
