"""saq: jobs in Redis lists, results in the job's key, a notification when a job ends."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from bus_port import CONCURRENCY, tool_work
from saq import Queue, Status, Worker


async def echo(_context: Any, *, args: dict[str, Any]) -> str:
    return tool_work(args)


def _has_ended(_key: str, status: Status) -> bool:
    return status is Status.COMPLETE


class SaqBus:
    name = "saq"
    promises = "stored result, retries, time limit, heartbeats, a sweep for lost jobs"

    def __init__(self, url: str) -> None:
        self._queue = Queue.from_url(url)
        self._serving: asyncio.Task[None] | None = None

    async def start_worker(self) -> None:
        self._worker = Worker(self._queue, functions=[("echo", echo)], concurrency=CONCURRENCY)
        self._serving = asyncio.create_task(self._worker.start())

    async def start_requester(self) -> None:
        await self._queue.connect()

    async def call(self, args: dict[str, Any]) -> str:
        # `Queue.apply` polls twice a second, and `Job.refresh` can miss a job that ends at once
        key = uuid.uuid4().hex
        ended = asyncio.create_task(self._queue.listen([key], _has_ended, timeout=30))
        await asyncio.sleep(0)
        await self._queue.enqueue("echo", key=key, args=args)
        await ended
        job = await self._queue.job(key)
        result: str = job.result if job else ""
        return result

    async def close(self) -> None:
        if self._serving:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._queue.disconnect()
