"""Background work of a participant: a failure is logged and counted, and the work starts again.

A participant's essential work (its reads, its heartbeat) runs in a task group instead: the first failure ends the
process, and its supervisor starts it again. Every task has an owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from shared.errors import TransientError
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0

_STORE_PAUSE, _LONGEST_STORE_PAUSE = 0.2, 5.0

Job = Callable[[], Awaitable[object]]
Suspended = Callable[[], AbstractAsyncContextManager[None]]
R = TypeVar("R")


async def run_supervised(name: str, work: Job, *, first_pause: float = FIRST_PAUSE) -> None:
    """Run `work` until it returns or is cancelled; after a failure, run it again after a pause.

    name: for the log and the counter; one of few. first_pause: seconds. The pause doubles up to 30 seconds; it starts
    again at `first_pause` after a run that took longer than 30 seconds.
    """
    loop = asyncio.get_running_loop()
    pause = first_pause
    while True:
        began = loop.time()
        try:
            await work()
            return
        except Exception as exc:
            if loop.time() - began > _LONGEST_PAUSE:
                pause = first_pause
            if isinstance(exc, TransientError):
                log.warning("background.interrupted", work=name, reason=str(exc), seconds=pause)
            else:
                # A bug must not stop the rest of the participant.
                log.exception("background.failed", work=name, seconds=pause)
        count(name)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


@asynccontextmanager
async def supervised_tasks(**work: Job) -> AsyncIterator[None]:
    """Run each job under its name (see `run_supervised`) as long as the block lasts."""
    tasks = [asyncio.create_task(run_supervised(name, one), name=name) for name, one in work.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def retry_while_transient(work: Callable[[], Awaitable[R]], suspended: Suspended = nullcontext) -> R:
    """Return the result of `work`; repeat it as long as it raises TransientError.

    suspended: the context in which the pauses pass, for example a message's, which releases its slot.
    """
    pause = _STORE_PAUSE
    while True:
        try:
            return await work()
        except TransientError as exc:
            if pause == _STORE_PAUSE:
                log.warning("ingest.waits", reason=str(exc))
            async with suspended():
                await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_STORE_PAUSE)


def log_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log and count the failure of a task that no other task awaits (an exception handler of the event loop)."""
    log.error("background.unhandled", reason=context["message"], exc_info=context.get("exception"))
    count("unhandled")


def count(name: str) -> None:
    """Count a failure of background work."""
    if (meter := metrics.meter()) is not None:
        meter.background_failed(name)
