"""Work that goes on beside a participant's own: whatever fails in it is said, counted and begun again.

What a participant cannot live without (its reading, its heartbeat) runs in a task group instead, whose first failure
ends the process; whoever supervises it starts it again. No task is left to itself.
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
Aside = Callable[[], AbstractAsyncContextManager[None]]
R = TypeVar("R")


async def kept_up(name: str, work: Job, *, first_pause: float = FIRST_PAUSE) -> None:
    """Does the work until it returns or is cancelled. When it fails it is begun again after a pause in seconds, which
    doubles up to 30 and is short again for work that had gone on for longer than that.

    name: for the log and the counter; one of few.
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
                # a bug, or a world that nobody has thought of: the rest of the participant goes on
                log.exception("background.failed", work=name, seconds=pause)
        count(name)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


@asynccontextmanager
async def beside(**work: Job) -> AsyncIterator[None]:
    """Keeps work up as long as the block lasts, each under its name."""
    tasks = [asyncio.create_task(kept_up(name, one), name=name) for name, one in work.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def patiently(work: Callable[[], Awaitable[R]], aside: Aside = nullcontext) -> R:
    """The work's result, however long the store is away: an entry that waits is not one that cannot be handled.

    aside: in what it waits; a message's `parked` gives its slot to others meanwhile.
    """
    pause = _STORE_PAUSE
    while True:
        try:
            return await work()
        except TransientError as exc:
            if pause == _STORE_PAUSE:
                log.warning("ingest.waits", reason=str(exc))
            async with aside():
                await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_STORE_PAUSE)


def unheard(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The event loop's handler of failures that nobody waits for: said and counted like the others."""
    log.error("background.unheard", reason=context["message"], exc_info=context.get("exception"))
    count("unheard")


def count(name: str) -> None:
    if (meter := metrics.meter()) is not None:
        meter.background_failed(name)
