"""dramatiq: threads that read Redis lists, results in a list that the requester reads blocking."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dramatiq
from bus_port import CONCURRENCY, tool_work
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from dramatiq.worker import Worker

# The default of dramatiq's command line.
THREADS = 8


class DramatiqBus:
    name = "dramatiq"
    promises = "stored result, retries, time limit, acknowledgement, heartbeats of workers"

    def __init__(self, url: str) -> None:
        self._broker = RedisBroker(url=url)
        self._broker.add_middleware(Results(backend=RedisBackend(url=url)))
        # `get_result` asks the global broker
        dramatiq.set_broker(self._broker)
        self._echo = dramatiq.actor(tool_work, actor_name="echo", broker=self._broker, store_results=True)
        self._worker: Worker | None = None

    async def start_worker(self) -> None:
        self._worker = Worker(self._broker, worker_threads=THREADS)
        await asyncio.to_thread(self._worker.start)

    async def start_requester(self) -> None:
        self._threads = ThreadPoolExecutor(CONCURRENCY)

    async def call(self, args: dict[str, Any]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, args)

    def _call(self, args: dict[str, Any]) -> str:
        result: str = self._echo.send(args).get_result(block=True, timeout=30_000)
        return result

    async def close(self) -> None:
        if self._worker:
            await asyncio.to_thread(self._worker.stop)
