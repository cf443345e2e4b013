"""Waiting for a fact, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

# A machine that others use too takes longer than a free one: waiting for longer proves no less.
PATIENCE = 4


async def eventually(
    fact: Callable[[], Any | Awaitable[Any]], timeout: float = 15.0, what: str = "", every: float = 0.01
) -> Any:
    """The first true value of `fact`; fails the test when there is none in time.

    timeout: in seconds of a free machine.
    """
    patience = PATIENCE * timeout
    deadline = time.monotonic() + patience
    while True:
        value = fact()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {patience:g} s: {what or inspect.getsource(fact).strip()}")
        await asyncio.sleep(every)


async def always(fact: Callable[[], Any], seconds: float, what: str = "") -> None:
    """Fails the test when `fact` is false at any moment of the next seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert fact(), what or inspect.getsource(fact).strip()
        await asyncio.sleep(0.01)
