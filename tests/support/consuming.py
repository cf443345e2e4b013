"""One consumer of a group with a bus of its own, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from shared.bus import Bus, Consumer, Delivery, Route
from shared.contracts import ResponseGeneration, Subject

SUBJECT = Subject("work", ResponseGeneration, kind="work")
STREAM = SUBJECT.stream
GROUP = "workers"


@contextlib.asynccontextmanager
async def consuming(
    url: str,
    handler: Any = None,
    *,
    replica: str = "r1",
    streams: Mapping[str, Route] | None = None,
    on_dead_letter: Any = None,
    concurrency: int = 4,
    heartbeat: float = 0.2,
    max_deliveries: int = 5,
    drain: float = 1.0,
    timeout: float = 5.0,
) -> AsyncIterator[Consumer]:
    """Runs until the block ends, then stops as on SIGTERM."""
    routes = streams or {STREAM: Route(handler, on_dead_letter)}
    async with Bus(url, f"test/{replica}", timeout=timeout) as bus:
        consumer = Consumer(
            bus,
            GROUP,
            replica,
            routes,
            concurrency=concurrency,
            heartbeat=heartbeat,
            max_deliveries=max_deliveries,
            drain=drain,
        )
        stop = asyncio.Event()
        task = asyncio.create_task(consumer.run(stop))
        try:
            yield consumer
        finally:
            stop.set()
            await task


class Recorder:
    """A handler that notes what it was given, and how many it had at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seen: list[str] = []
        self.deliveries: list[int] = []
        self.now = 0
        self.most = 0
        self.gate: asyncio.Event | None = None
        self.seconds = seconds

    async def __call__(self, delivery: Delivery) -> list[Any]:
        self.seen.append(delivery.entry_id)
        self.deliveries.append(delivery.deliveries)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.seconds:
                await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        return []
