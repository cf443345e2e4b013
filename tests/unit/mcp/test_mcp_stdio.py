"""A program that is a server leaves nothing open, however often whoever waits for its end is cancelled."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from services.mcp import stdio


async def test_a_program_is_ended_also_when_the_wait_for_its_end_is_cancelled() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    running, leaving = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        command = ["sh", "-c", "trap '' TERM; echo up >&2; sleep 60 & wait; sleep 60"]
        async with stdio.started(command, {}, str, asyncio.Event(), stdio.Trouble()) as (_, why):
            while "up" not in why():
                await asyncio.sleep(0.01)
            running.set()
            try:
                await asyncio.Event().wait()
            finally:
                leaving.set()

    holder = asyncio.create_task(hold())
    await asyncio.wait_for(running.wait(), 30)
    holder.cancel()
    await leaving.wait()
    for _ in range(3):
        holder.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await holder
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
