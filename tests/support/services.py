"""Running a participant inside the test or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from support.forked import Forked
from support.waiting import eventually

from shared.bus import Bus
from shared.participant.service import Service
from shared.participant.settings import Settings


@contextlib.asynccontextmanager
async def running(service: Service[Any], settings: Settings) -> AsyncIterator[asyncio.Task[None]]:
    """Serve until the block ends, then stop as on SIGTERM. A participant that still waits for Redis is cancelled."""
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(settings, stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await task


class Child:
    """A participant of `support.apps` in a process of its own.

    ahead: seconds by which the clock of its host is ahead. log: the file of its output; None: where ours goes.
    """

    def __init__(self, app: str, url: str, *, ahead: float = 0.0, log: Path | None = None, **environment: str) -> None:
        settings = {"LOCAL2_REDIS_URL": url, "LOCAL2_HEARTBEAT": "0.2", "LOCAL2_LOG_LEVEL": "error", **environment}
        command = ("support.other_clock", str(ahead), "support.apps") if ahead else ("support.apps",)
        self.process = Forked(*command, app, environment={**os.environ, **settings}, log=log)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, timeout: float = 10.0) -> int:
        """The exit status."""
        await eventually(lambda: self.process.poll() is not None, timeout, "the process ends")
        return int(self.process.wait())


@contextlib.contextmanager
def child(app: str, url: str, *, ahead: float = 0.0, log: Path | None = None, **environment: str) -> Iterator[Child]:
    """Killed at the end of the block when it still runs. ahead, log: see `Child`."""
    started = Child(app, url, ahead=ahead, log=log, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()


async def announced(url: str, participant: str, replicas: int = 1, timeout: float = 10.0) -> None:
    """Waits until so many replicas of a participant say that they are ready."""
    from shared.participant.registry import Registry

    async with Bus(url, "test/waiting") as bus:
        registry = Registry(bus, 0.0)

        async def ready() -> bool:
            return sum(info.state == "ready" for info in await registry.live(participant)) >= replicas

        await eventually(ready, timeout, f"{replicas} of {participant}")
