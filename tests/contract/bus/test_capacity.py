"""Back-pressure: a consumer reads no more than it can run, and no stream keeps another one waiting."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis
from contract.bus.observing import (
    Recorder,
    add,
    always,
    consumers,
    eventually,
    owners,
    pending,
    read_as,
    read_waits,
    streams_of,
)
from contract.bus.servers import Server, network
from contract.bus.surface import STREAM, Delivery, consuming, route, suspended


class Suspending(Recorder):
    """A handler that waits for `resume` without a slot, and then works."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.resume = asyncio.Event()
        self.waiting: list[str] = []

    async def __call__(self, delivery: Delivery) -> list[Any]:
        self.waiting.append(delivery.entry_id)
        async with suspended(delivery):
            await self.resume.wait()
        return await super().__call__(delivery)


async def test_consumer_reads_no_more_than_it_can_run(server: Server, client: redis.Redis) -> None:
    add(client, 40)
    slow = Recorder(0.005)
    async with consuming(server, slow, concurrency=2):
        while len(slow.seen) < 40:
            assert pending(client) <= 2
            await asyncio.sleep(0)
    assert slow.most == 2


async def test_blocked_read_and_takeover_exceed_no_slot(server: Server, client: redis.Redis) -> None:
    read_as(client, "dead", 2)
    gated = Recorder(gated=True)
    async with consuming(server, gated, concurrency=2):
        # taken over while the read waits for new entries
        await eventually(lambda: gated.running == 2)
        add(client, 5)
        await always(lambda: pending(client) == 2, 0.6)
        gated.gate.set()
        await eventually(lambda: len(gated.seen) == 7 and pending(client) == 0)
    assert gated.most == 2


async def test_takeover_takes_no_more_than_can_run(server: Server, client: redis.Redis) -> None:
    ids = read_as(client, "dead", 6)
    slow = Recorder(0.1)
    async with consuming(server, slow, concurrency=1, visibility_timeout=0.3):
        while len(slow.seen) < 6:
            assert list(owners(client).values()).count("r1") <= 1
            await asyncio.sleep(0.005)
        await eventually(lambda: pending(client) == 0)
    assert slow.most == 1
    assert sorted(slow.seen) == sorted(ids)


async def test_streams_share_the_slots_of_a_consumer(server: Server, client: redis.Redis) -> None:
    names = streams_of(5)
    slow = Recorder(0.005)
    for name in names:
        add(client, 10, name)
    async with consuming(server, {name: route(slow) for name in names}, concurrency=2):
        while len(slow.seen) < 50:
            assert sum(max(0, pending(client, name)) for name in names) <= 2
            await asyncio.sleep(0)
    assert slow.most == 2


async def test_more_slots_are_used_at_once(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(server, gated, concurrency=1) as replica:
        add(client, 10)
        await eventually(lambda: gated.running == 1)
        replica.resize(6)
        await eventually(lambda: gated.running == 6)
        await always(lambda: gated.running == pending(client) == 6, 0.2)
        gated.gate.set()
        await eventually(lambda: pending(client) == 0)


async def test_fewer_slots_are_kept_after_running_work(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(server, gated, concurrency=4) as replica:
        add(client, 20)
        await eventually(lambda: gated.running == 4)
        replica.resize(1)
        gated.most = 0
        gated.seconds = 0.005
        gated.gate.set()
        await eventually(lambda: gated.running <= 1)
        gated.most = 0
        await eventually(lambda: len(gated.seen) == 20 and pending(client) == 0)
    assert gated.most <= 1


async def test_limited_stream_leaves_slots_to_others(server: Server, client: redis.Redis) -> None:
    slow, quick = streams_of(2)
    stuck, done = Suspending(), Recorder()
    async with consuming(server, {slow: route(stuck, limit=3), quick: route(done)}, concurrency=4):
        add(client, 12, slow)
        await eventually(lambda: len(stuck.waiting) == 3)
        add(client, 12, quick)
        await eventually(lambda: len(done.seen) == 12)
        assert pending(client, slow) == len(stuck.waiting) == 3
        stuck.resume.set()
        await eventually(lambda: len(stuck.seen) == 12 and pending(client, slow) == 0)


async def test_takeover_respects_the_limit_of_a_stream(server: Server, client: redis.Redis) -> None:
    ids = read_as(client, "dead", 6)
    slow = Recorder(0.02)
    async with consuming(server, {STREAM: route(slow, limit=2)}, concurrency=8, visibility_timeout=0.3):
        await eventually(lambda: sorted(slow.seen) == sorted(ids) and pending(client) == 0)
    assert slow.most <= 2


async def test_lower_limit_releases_waiting_entries(server: Server, client: redis.Redis) -> None:
    limit = 6
    first, second = Suspending(), Recorder()
    async with consuming(server, {STREAM: route(first, limit=lambda: limit)}, name="first", concurrency=8):
        add(client, 6)
        await eventually(lambda: len(first.waiting) == 6)
        async with consuming(server, second, name="second"):
            await always(lambda: not second.seen, 0.3)
            limit = 2
            await eventually(lambda: len(second.seen) == 4)
            await eventually(lambda: pending(client) == 2)
            assert list(owners(client).values()) == ["first", "first"]
            first.resume.set()
            await eventually(lambda: pending(client) == 0)
    assert second.deliveries == [1] * 4
    assert len(first.seen) == 2


async def test_suspended_entries_release_their_slots(server: Server, client: redis.Redis) -> None:
    handler = Suspending(0.005)
    async with consuming(server, handler, concurrency=2):
        ids = add(client, 10)
        await eventually(lambda: sorted(handler.waiting) == sorted(ids))
        handler.resume.set()
        await eventually(lambda: sorted(handler.seen) == sorted(ids) and pending(client) == 0)
    assert handler.most <= 2


async def test_resumed_entry_needs_no_new_entry_to_go_on(server: Server, client: redis.Redis) -> None:
    """A read that waits for new entries has reserved the only slot."""
    handler = Suspending()
    async with consuming(server, handler, concurrency=1):
        add(client)
        await eventually(lambda: handler.waiting)
        await eventually(lambda: read_waits(server))
        began = time.monotonic()
        handler.resume.set()
        await eventually(lambda: handler.seen)
        assert time.monotonic() - began < 1.0


async def test_fewer_slots_than_streams_starve_no_stream(server: Server, client: redis.Redis) -> None:
    busy, *others = streams_of(6)
    order: list[str] = []

    async def handle(delivery: Delivery) -> list[Any]:
        order.append(delivery.stream)
        return []

    add(client, 60, busy)
    for name in others:
        add(client, 2, name)
    async with consuming(server, {name: route(handle) for name in (busy, *others)}, concurrency=1):
        await eventually(lambda: len(order) == 70)
    # each of the others has its turn before the busy one is finished
    assert set(order[:40]) == {busy, *others}


async def test_idle_streams_delay_no_entry(server: Server, client: redis.Redis) -> None:
    names = streams_of(8)
    recorder = Recorder()
    async with consuming(server, {name: route(recorder) for name in names}, concurrency=1):
        await eventually(lambda: pending(client, names[-1]) == 0)
        began = time.monotonic()
        for number, name in enumerate([*names, *reversed(names)], 1):
            add(client, 1, name)
            await eventually(lambda: len(recorder.seen) == number)  # noqa: B023
        # no stream waits for the silence of the other seven
        assert time.monotonic() - began < 3.0


async def test_added_stream_is_read_by_a_waiting_consumer(server: Server, client: redis.Redis) -> None:
    one, two = streams_of(2)
    recorder = Recorder()
    async with consuming(server, {one: route(Recorder())}) as replica:
        await eventually(lambda: pending(client, one) == 0)
        ids = add(client, 2, two)
        await replica.add({two: route(recorder)})
        ids += add(client, 2, two)
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client, two) == 0)
    assert consumers(client, two) == {}


async def test_stream_added_to_starting_consumer_is_read(server: Server, client: redis.Redis) -> None:
    """The consumer is still creating the group of its first stream."""
    one, two = streams_of(2)
    recorder = Recorder()
    async with network(server) as net:
        net.freeze()
        async with consuming(net, {one: route(Recorder())}) as replica:
            await eventually(lambda: net.connections > 0)
            adding = asyncio.create_task(replica.add({two: route(recorder)}))
            await asyncio.sleep(0)
            net.thaw()
            await adding
            ids = add(client, 2, two)
            await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client, two) == 0)


async def test_entry_at_its_last_delivery_runs_alone(server: Server, client: redis.Redis) -> None:
    """If it ends its process, it takes no other entry along."""
    last = read_as(client, "dead", 1)[0]
    others: list[str] = []
    running: set[str] = set()
    beside: list[set[str]] = []

    async def handle(delivery: Delivery) -> list[Any]:
        running.add(delivery.entry_id)
        beside.append(set(running))
        await asyncio.sleep(0.05)
        running.discard(delivery.entry_id)
        return []

    async with consuming(server, handle, concurrency=4, max_deliveries=2, visibility_timeout=0.3):
        while not any(last in seen for seen in beside):
            others += add(client, 1)
            await asyncio.sleep(0.02)
        await eventually(lambda: pending(client) == 0)
    began = next(n for n, seen in enumerate(beside) if last in seen)
    assert [seen for seen in beside[began + 1 :] if last in seen] == []


@pytest.mark.parametrize("count", [1, 3])
async def test_idle_consumer_starts_an_entry_at_once(server: Server, client: redis.Redis, count: int) -> None:
    names = streams_of(count)
    recorder = Recorder()
    async with consuming(server, {name: route(recorder) for name in names}, visibility_timeout=30):
        await eventually(lambda: read_waits(server))
        began = time.monotonic()
        add(client, 1, names[-1])
        await eventually(lambda: recorder.seen, every=0.001)
        assert time.monotonic() - began < 0.5
