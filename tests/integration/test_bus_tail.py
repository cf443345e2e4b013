"""Followers of a stream get every entry once, in order, whenever they join and however slow they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis
from support.waiting import eventually

from shared.bus import Bus, StreamTailer, order
from shared.participant.service import open_context
from shared.participant.settings import Settings


@asynccontextmanager
async def tailing(url: str, timeout: float = 5.0) -> AsyncIterator[StreamTailer]:
    async with Bus(url, "test/tail", timeout=timeout) as bus:
        tail = StreamTailer(bus)
        running = asyncio.create_task(tail.run())
        try:
            yield tail
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def collect(tail: StreamTailer, stream: str, after: str, last: str, delay: float = 0.0) -> list[str]:
    follower = tail.follow(stream, after)
    got: list[str] = []
    try:
        while not got or got[-1] != last:
            got += [entry_id for entry_id, _ in await follower.next()]
            if delay:
                await asyncio.sleep(delay)
    finally:
        follower.close()
    return got


async def test_a_slow_follower_costs_a_bounded_amount_of_memory(
    redis_url: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.follow._MAX_OFFERED_BYTES", 100)
    monkeypatch.setattr("shared.bus.follow._LARGEST_PAGE", 25)
    async with tailing(redis_url) as tail:
        slow = tail.follow("j", "0-0")
        joining = asyncio.create_task(slow.next())
        fast = asyncio.create_task(collect(tail, "j", "0-0", "1-1000"))
        for number in range(1, 1001):
            await bus.link.call("XADD", "j", f"1-{number}", "a", "b")
        await fast
        assert len(slow._offered) <= 100
        got = [entry_id for entry_id, _ in await joining]
        while got[-1] != "1-1000":
            got += [entry_id for entry_id, _ in await slow.next()]
        assert got == [f"1-{n}" for n in range(1, 1001)]


async def test_a_tail_survives_a_flush(redis_url: str, bus: Bus, raw: redis.Redis) -> None:
    async with tailing(redis_url) as tail:
        follower = tail.follow("events", "0-0")
        raw.xadd("events", {"a": "1"})
        assert len(await follower.next()) == 1
        raw.flushall()
        # Redis gives the same id again within the same millisecond
        await eventually(lambda: raw.time()[0] * 1000 + raw.time()[1] // 1000 > order(follower.position)[0])
        waiting = asyncio.create_task(follower.next())
        raw.xadd("events", {"a": "2"})
        assert (await asyncio.wait_for(waiting, 2.5))[0][1] == [b"a", b"2"]
        other = tail.follow("more", "0-0")
        waiting = asyncio.create_task(other.next())
        await eventually(lambda: "more" in tail._followers)
        raw.xadd("more", {"a": "3"})
        assert (await asyncio.wait_for(waiting, 2.5))[0][1] == [b"a", b"3"]


async def test_a_process_that_leaves_while_somebody_begins_to_follow_leaves_no_inbox(
    settings: Settings, raw: redis.Redis
) -> None:
    for n in range(10):
        async with open_context("observer", settings) as context:
            joining = asyncio.create_task(context.tail.follow(f"local2:events{n}").next())
            await eventually(lambda n=n: f"local2:events{n}" in context.tail._followers, every=0)
            joining.cancel()
    assert not raw.keys("local2:inbox:observer:*")


async def test_what_is_followed_is_waited_for_and_told_as_it_comes(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a look would never come
    monkeypatch.setattr(StreamTailer, "pause", 3600.0)
    async with tailing(redis_url) as tail:
        first, second = tail.follow("one"), tail.follow("two")
        both = [asyncio.create_task(one.next()) for one in (first, second)]

        def waited_for() -> bool:
            return any(one["name"] == "test/tail:tail" and one["cmd"] == "xread" for one in raw.client_list())

        await eventually(lambda: len(tail._followers) == 2 and waited_for())
        for number, (stream, waiting) in enumerate(zip(("one", "two"), both, strict=True), start=1):
            raw.xadd(stream, {"n": number}, f"{number}-1")
            assert [entry_id for entry_id, _ in await asyncio.wait_for(waiting, 30)] == [f"{number}-1"]
        # who has not come for more is told of it when he comes
        raw.xadd("one", {"n": 3}, "3-1")
        raw.xadd("one", {"n": 4}, "4-1")
        assert [entry_id for entry_id, _ in await first.next()] == ["3-1", "4-1"]
