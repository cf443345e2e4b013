"""Followers of a stream get every entry once, in order, whenever they join and however slow they are."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis
from support.proxy import Proxy
from support.waiting import eventually

from shared.bus import Bus, Tail, order
from shared.participant.service import open_context
from shared.participant.settings import Settings


@asynccontextmanager
async def tailing(url: str, timeout: float = 5.0) -> AsyncIterator[Tail]:
    async with Bus(url, "test/tail", timeout=timeout) as bus:
        tail = Tail(bus)
        running = asyncio.create_task(tail.run())
        try:
            yield tail
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def collect(tail: Tail, stream: str, after: str, last: str, delay: float = 0.0) -> list[str]:
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


@pytest.mark.parametrize("seed", range(12))
async def test_every_follower_gets_every_entry_once_in_order(
    seed: int, redis_url: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # small limits, so that followers fall behind and catch up by pages
    monkeypatch.setattr("shared.bus.follow._BEHIND", 40)
    monkeypatch.setattr("shared.bus.follow._LARGEST_PAGE", 7)
    rng = random.Random(seed)
    streams = [f"j{n}" for n in range(3)]
    count = 150
    ids = {stream: [f"1-{n}" for n in range(1, count + 1)] for stream in streams}

    async def write(stream: str) -> None:
        for entry_id in ids[stream]:
            await bus.link.call("XADD", stream, entry_id, "a", "b")
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice((0, 0.001, 0.005)))

    async def client(stream: str) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        start = rng.choice((0, 0, rng.randrange(count)))
        after = f"1-{start}" if start else "0-0"
        got: list[str] = []
        # leaves and comes back to where it was, as a client that reconnects does
        cuts = sorted(rng.sample(range(start + 1, count + 1), rng.randint(0, 3) if count - start > 3 else 0))
        for target in [*cuts, count]:
            follower = tail.follow(stream, after)
            while int(after.partition("-")[2]) < target:
                found = [entry_id for entry_id, _ in await follower.next()]
                got += found
                after = found[-1]
                await asyncio.sleep(rng.choice((0, 0, 0.002, 0.02)))
            follower.close()
        assert got == ids[stream][start:]

    async with tailing(redis_url) as tail, asyncio.timeout(10):
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(write(stream))
                for _ in range(6):
                    group.create_task(client(stream))
        assert tail._followers == {}


async def test_two_hundred_followers_share_one_connection(redis_url: str, bus: Bus, raw: redis.Redis) -> None:
    async with tailing(redis_url) as tail:
        await bus.link.call("PING")
        before = len(raw.client_list())
        tasks = [asyncio.create_task(collect(tail, f"j{n}", "0-0", "1-20")) for n in range(200)]
        for number in range(1, 21):
            await bus.link.pipe([("XADD", f"j{n}", f"1-{number}", "a", "b") for n in range(200)])
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks)
        assert results == [[f"1-{n}" for n in range(1, 21)]] * 200
        assert len(raw.client_list()) == before


async def test_two_hundred_followers_of_one_stream_all_get_everything(redis_url: str, bus: Bus) -> None:
    async with tailing(redis_url) as tail:
        tasks = [asyncio.create_task(collect(tail, "j", "0-0", "1-300")) for _ in range(200)]
        for number in range(1, 301):
            await bus.link.call("XADD", "j", f"1-{number}", "a", "b")
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks)
    assert results == [[f"1-{n}" for n in range(1, 301)]] * 200


async def test_a_follower_behind_what_was_trimmed_goes_on_with_what_is_there(redis_url: str, bus: Bus) -> None:
    async with tailing(redis_url) as tail:
        keeping = tail.follow("j", "0-0")
        for number in range(1, 11):
            await bus.link.call("XADD", "j", f"1-{number}", "a", "b")
        while keeping.position != "1-10":
            await keeping.next()
        await bus.link.call("XTRIM", "j", "MAXLEN", 0)
        late = asyncio.create_task(collect(tail, "j", "1-3", "1-11"))
        await asyncio.sleep(0.05)
        await bus.link.call("XADD", "j", "1-11", "a", "b")
        assert await asyncio.wait_for(late, 2.0) == ["1-11"]


async def test_a_slow_follower_costs_a_bounded_amount_of_memory(
    redis_url: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.follow._BEHIND", 100)
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


@pytest.mark.parametrize("fault", ["drop", "cut"])
async def test_nothing_is_missed_or_repeated_over_a_bad_network(fault: str, redis_url: str, bus: Bus) -> None:
    async with Proxy(redis_url, drop_every=6 if fault == "drop" else 0) as proxy, tailing(proxy.url, 0.1) as tail:
        tasks = [asyncio.create_task(collect(tail, f"j{n}", "0-0", "1-200")) for n in range(5)]
        for number in range(1, 201):
            await bus.link.pipe([("XADD", f"j{n}", f"1-{number}", "a", "b") for n in range(5)])
            await asyncio.sleep(0.002)
            if fault == "cut" and number % 20 == 0:
                proxy.cut()
        async with asyncio.timeout(10):
            assert await asyncio.gather(*tasks) == [[f"1-{n}" for n in range(1, 201)]] * 5


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


async def test_a_key_that_is_no_stream_does_not_keep_the_others_from_being_followed(
    redis_url: str, bus: Bus, raw: redis.Redis
) -> None:
    raw.set("odd", "no stream")
    async with tailing(redis_url) as tail:
        assert await bus.newest("odd") == "0-0"
        odd = asyncio.create_task(collect(tail, "odd", "0-0", "1-1"))
        other = asyncio.create_task(collect(tail, "j", "0-0", "1-1"))
        await bus.link.call("XADD", "j", "1-1", "a", "b")
        assert await asyncio.wait_for(other, 15) == ["1-1"]
        raw.delete("odd")
        await bus.link.call("XADD", "odd", "1-1", "a", "b")
        assert await asyncio.wait_for(odd, 15) == ["1-1"]


async def test_what_is_followed_is_waited_for_and_told_as_it_comes(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a look would never come
    monkeypatch.setattr(Tail, "pause", 3600.0)
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


async def test_who_begins_to_follow_while_the_read_waits_is_in_the_next(redis_url: str, raw: redis.Redis) -> None:
    async with tailing(redis_url) as tail:
        silent = asyncio.create_task(tail.follow("silent").next())
        for number in range(5):
            waiting = asyncio.create_task(tail.follow(f"late{number}").next())
            # nothing was there when it was read to its end
            await eventually(lambda name=f"late{number}": name in tail._followers, every=0)
            raw.xadd(f"late{number}", {"n": 1}, "1-1")
            assert [entry_id for entry_id, _ in await asyncio.wait_for(waiting, 60)] == ["1-1"]
        assert not silent.done()
        silent.cancel()


async def test_beside_a_key_that_is_no_stream_the_others_are_followed(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tail, "pause", 0.05)
    raw.set("strange", "no stream")
    async with tailing(redis_url) as tail:
        strange, good = tail.follow("strange"), tail.follow("good")
        other = asyncio.create_task(strange.next())
        for number in range(3):
            waiting = asyncio.create_task(good.next())
            await asyncio.sleep(0.1)
            raw.xadd("good", {"n": number}, f"{number}-1")
            assert [entry_id for entry_id, _ in await asyncio.wait_for(waiting, 30)] == [f"{number}-1"]
        raw.delete("strange")
        raw.xadd("strange", {"n": 1}, "1-1")
        assert [entry_id for entry_id, _ in await asyncio.wait_for(other, 30)] == ["1-1"]
