"""Takeover: an entry of a consumer that died is handled by another one, after the visibility timeout."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import redis
from contract.bus.observing import (
    Recorder,
    Worker,
    add,
    always,
    consumers,
    deliveries,
    eventually,
    owners,
    pending,
    read_as,
    read_waits,
)
from contract.bus.servers import Server, network
from contract.bus.surface import GROUP, STREAM, VISIBILITY_TIMEOUT, Delivery, consuming, dead_letters, suspended


async def test_dead_consumer_entries_are_taken_over_after_timeout(server: Server, client: redis.Redis) -> None:
    ids = read_as(client, "dead", 3)
    recorder = Recorder()
    started = time.monotonic()
    async with consuming(server, recorder):
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)
    assert time.monotonic() - started > VISIBILITY_TIMEOUT * 0.8
    assert recorder.deliveries == [2, 2, 2]


async def test_killed_process_loses_no_entry(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    doomed = worker(server, "doomed", seconds=60)
    ids = add(client, 3)
    await eventually(lambda: client.llen(Worker.STARTED) == 3)
    doomed.send(signal.SIGKILL)
    assert await doomed.ended() == -signal.SIGKILL
    assert sorted(owners(client)) == sorted(ids)
    recorder = Recorder()
    async with consuming(server, recorder):
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)
    assert client.llen(Worker.EFFECTS) == 0


async def test_entries_of_lost_reply_are_handled_as_first_delivery(server: Server, client: redis.Redis) -> None:
    recorder = Recorder()
    async with network(server) as net, consuming(net, recorder, timeout=0.2, visibility_timeout=60):
        await eventually(lambda: pending(client) == 0)
        net.freeze()
        ids = add(client, 2)
        # read under the name of this consumer, which never gets the reply
        client.xreadgroup(GROUP, "r1", {STREAM: ">"})
        net.cut()
        net.thaw()
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)
    assert recorder.deliveries == [1, 1]


async def test_stopped_consumer_releases_entries_at_once(server: Server, client: redis.Redis) -> None:
    stuck, other = Recorder(gated=True), Recorder()
    long = 6.0
    async with consuming(server, other, name="other", visibility_timeout=long, concurrency=1):
        other.gate.clear()
        add(client, 1)
        await eventually(lambda: other.running == 1)
        async with consuming(server, stuck, name="leaving", visibility_timeout=long, drain=0.1) as leaving:
            ids = add(client, 2)
            await eventually(lambda: sorted(stuck.seen) == ids)
            await leaving.stop()
            left = time.monotonic()
            assert "leaving" not in consumers(client)
            other.gate.set()
            await eventually(lambda: sorted(other.seen[1:]) == sorted(ids) and pending(client) == 0)
            assert time.monotonic() - left < long - 1
    assert other.deliveries == [1, 1, 1]


async def test_long_handler_keeps_its_entry(server: Server, client: redis.Redis) -> None:
    long, other = Recorder(4 * VISIBILITY_TIMEOUT), Recorder()
    async with consuming(server, long, name="r1"):
        add(client)
        await eventually(lambda: long.running == 1)
        async with consuming(server, other, name="r2"):
            await eventually(lambda: pending(client) == 0)
    assert (len(long.seen), other.seen) == (1, [])


async def test_full_consumer_keeps_its_entries(server: Server, client: redis.Redis) -> None:
    full, other = Recorder(2 * VISIBILITY_TIMEOUT), Recorder()
    async with consuming(server, full, name="r1", concurrency=8):
        ids = add(client, 8)
        await eventually(lambda: full.running == 8)
        async with consuming(server, other, name="r2"):
            await eventually(lambda: pending(client) == 0)
    assert sorted(full.seen) == sorted(ids)
    assert other.seen == []


async def test_new_consumer_watches_before_it_takes_over(server: Server, client: redis.Redis) -> None:
    """The owner may be there although its claim is old: after an outage all claims are old."""
    (entry_id,) = read_as(client, "other", 1)
    client.xclaim(STREAM, GROUP, "other", 0, [entry_id], idle=3_600_000, justid=True)
    recorder = Recorder()
    async with consuming(server, recorder, visibility_timeout=3.0):
        await eventually(lambda: read_waits(server))
        await always(lambda: not recorder.seen, 1.5)
        # the other one renews its claim as soon as it can
        client.xclaim(STREAM, GROUP, "other", 0, [entry_id], justid=True)
        await always(lambda: owners(client) == {entry_id: "other"}, 1.5)
    assert not recorder.seen


async def test_suspended_entry_uses_up_no_delivery(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    doomed = worker(server, "doomed", seconds=60, suspend=True)
    (entry_id,) = add(client)
    await eventually(lambda: deliveries(client) == {entry_id: 0})
    doomed.send(signal.SIGKILL)
    await doomed.ended()
    recorder = Recorder()
    async with consuming(server, recorder):
        await eventually(lambda: recorder.seen == [entry_id] and pending(client) == 0)
    assert recorder.deliveries == [1]


async def test_resumed_entry_counts_as_delivered(server: Server, client: redis.Redis) -> None:
    gate = asyncio.Event()
    gated = Recorder(gated=True)

    async def handle(delivery: Delivery) -> list[Any]:
        async with suspended(delivery):
            await gate.wait()
        return await gated(delivery)

    async with consuming(server, handle):
        (entry_id,) = add(client)
        await eventually(lambda: deliveries(client) == {entry_id: 0})
        gate.set()
        await eventually(lambda: gated.running == 1 and deliveries(client) == {entry_id: 1})
        gated.gate.set()
        await eventually(lambda: pending(client) == 0)


async def test_ten_stops_use_up_no_delivery(server: Server, client: redis.Redis) -> None:
    add(client)
    found = []
    for turn in range(10):
        stuck = Recorder(gated=True)
        async with consuming(server, stuck, name=f"r{turn}", drain=0.0, max_deliveries=2, visibility_timeout=0.15):
            await eventually(lambda: stuck.running == 1)  # noqa: B023
        found += stuck.deliveries
    assert found == [1] * 10
    assert dead_letters(client) == []
    assert pending(client) == 1


async def test_stop_with_many_entries_loses_none(server: Server, client: redis.Redis) -> None:
    stuck = Recorder(gated=True)
    async with consuming(server, stuck, concurrency=1200, drain=0.0):
        with client.pipeline(transaction=False) as pipe:
            for _ in range(1200):
                pipe.xadd(STREAM, {"payload": "x"})
            ids = pipe.execute()
        await eventually(lambda: stuck.running == 1200)
    assert "r1" not in consumers(client)
    assert pending(client) == 1200
    recorder = Recorder()
    async with consuming(server, recorder, name="r2", concurrency=200, visibility_timeout=0.15):
        await eventually(lambda: pending(client) == 0)
    assert sorted(recorder.seen) == sorted(ids)


async def test_restarted_server_with_its_data_loses_no_entry(own_server: Server, own_client: redis.Redis) -> None:
    recorder = Recorder(0.01)
    async with consuming(own_server, recorder, timeout=1.0):
        ids = add(own_client, 100)
        await eventually(lambda: len(recorder.seen) > 20)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start)
        await eventually(lambda: set(recorder.seen) == set(ids) and pending(own_client) == 0)
    assert dead_letters(own_client) == []
