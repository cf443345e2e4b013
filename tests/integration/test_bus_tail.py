"""Followers of event streams get new entries at once, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis
from support.waiting import eventually

from shared.bus import Bus, StreamTailer
from shared.participant.service import open_context
from shared.participant.settings import Settings


async def test_context_closed_while_a_follower_joins_leaves_no_inbox(settings: Settings, raw: redis.Redis) -> None:
    for ticks in range(10):
        async with open_context("observer", settings) as context:
            joining = asyncio.create_task(context.tail.follow(f"local2:events{ticks}").next())
            for _ in range(ticks):
                await asyncio.sleep(0)
            joining.cancel()
    assert not raw.keys("local2:inbox:observer:*")


async def test_followers_get_entries_without_waiting_for_a_poll(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamTailer, "pause", 3600.0)

    def blocks() -> bool:
        return any(one["name"] == "test/tail:tail" and one["cmd"] == "xread" for one in raw.client_list())

    async with Bus(redis_url, "test/tail", timeout=5.0) as bus:
        tail = StreamTailer(bus)
        running = asyncio.create_task(tail.run())
        first, second = tail.follow("one"), tail.follow("two")
        both = [asyncio.create_task(one.next()) for one in (first, second)]
        await eventually(blocks)
        for number, (stream, waiting) in enumerate(zip(("one", "two"), both, strict=True), start=1):
            raw.xadd(stream, {"n": number}, f"{number}-1")
            assert [entry_id for entry_id, _ in await asyncio.wait_for(waiting, 30)] == [f"{number}-1"]
        # entries that come between two calls of next
        raw.xadd("one", {"n": 3}, "3-1")
        raw.xadd("one", {"n": 4}, "4-1")
        assert [entry_id for entry_id, _ in await first.next()] == ["3-1", "4-1"]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
