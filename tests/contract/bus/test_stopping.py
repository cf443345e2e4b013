"""Drain and stop: running work is finished in time, the rest is released, and nothing new begins."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from contract.bus.observing import EFFECTS, Recorder, Worker, add, consumers, deliveries, eventually, pending
from contract.bus.servers import Server
from contract.bus.surface import STREAM, Delivery, consuming, suspended


async def test_stop_finishes_running_work(server: Server, client: redis.Redis) -> None:
    slow = Recorder(0.3)

    async def handle(delivery: Delivery) -> list[Any]:
        await slow(delivery)
        return [("RPUSH", EFFECTS, delivery.entry_id)]

    async with consuming(server, handle, drain=10.0):
        ids = add(client, 3)
        await eventually(lambda: slow.running == 3)
    assert sorted(client.lrange(EFFECTS, 0, -1)) == sorted(ids)
    assert pending(client) == 0
    assert consumers(client) == {}


async def test_stop_begins_no_new_entry(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(server, gated, concurrency=2, drain=10.0) as replica:
        ids = add(client, 2)
        await eventually(lambda: gated.running == 2)
        replica.begin_stop()
        add(client, 3)
        gated.gate.set()
        await replica.stop()
    assert sorted(gated.seen) == sorted(ids)
    (group,) = client.xinfo_groups(STREAM)
    assert (group["pending"], group["lag"]) == (0, 3)


async def test_stop_interrupts_work_after_drain(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(server, gated, drain=0.3) as replica:
        (entry_id,) = add(client)
        await eventually(lambda: gated.running == 1)
        began = time.monotonic()
        await replica.stop()
        assert 0.3 <= time.monotonic() - began < 5
    assert gated.running == 0
    assert "r1" not in consumers(client)
    # the interrupted delivery does not count
    assert deliveries(client) == {entry_id: 0}


async def test_stop_waits_for_no_suspended_entry(server: Server, client: redis.Redis) -> None:
    async def handle(delivery: Delivery) -> list[Any]:
        async with suspended(delivery):
            await asyncio.Event().wait()
        return []

    async with consuming(server, handle, drain=60.0) as replica:
        add(client, 3)
        await eventually(lambda: list(deliveries(client).values()) == [0, 0, 0])
        began = time.monotonic()
        await replica.stop()
        assert time.monotonic() - began < 20
    assert pending(client) == 3
    assert "r1" not in consumers(client)


async def test_idle_stop_is_quick_and_leaves_no_name(server: Server, client: redis.Redis) -> None:
    recorder = Recorder()
    async with consuming(server, recorder, drain=60.0) as replica:
        add(client)
        await eventually(lambda: recorder.seen and pending(client) == 0)
        began = time.monotonic()
        await replica.stop()
        assert time.monotonic() - began < 2
    assert consumers(client) == {}


@pytest.mark.parametrize("begun", [True, False])
async def test_stop_ends_while_the_server_is_away(own_server: Server, own_client: redis.Redis, begun: bool) -> None:
    gated = Recorder(gated=True)
    if not begun:
        await asyncio.to_thread(own_server.kill)
    # a bus that never reached its server must be able to stop too
    began = 0.0
    async with consuming(own_server, gated, drain=0.2, timeout=1.0):
        if begun:
            add(own_client)
            await eventually(lambda: gated.running == 1)
            await asyncio.to_thread(own_server.kill)
        began = time.monotonic()
    assert time.monotonic() - began < 20


async def test_stop_ends_while_the_server_stands_still(own_server: Server, own_client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    began = 0.0
    async with consuming(own_server, gated, drain=0.2, timeout=1.0):
        add(own_client)
        await eventually(lambda: gated.running == 1)
        own_server.pause()
        began = time.monotonic()
    assert time.monotonic() - began < 20
    own_server.resume()


async def test_server_away_at_the_start_is_waited_for(own_server: Server, own_client: redis.Redis) -> None:
    recorder = Recorder()
    await asyncio.to_thread(own_server.kill)
    async with consuming(own_server, recorder, timeout=1.0) as replica:
        await asyncio.sleep(0.2)
        assert not replica.task.done()
        await asyncio.to_thread(own_server.start)
        ids = add(own_client)
        await eventually(lambda: recorder.seen == ids and pending(own_client) == 0)


async def test_sigterm_finishes_work_and_leaves_no_name(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    leaving = worker(server, "leaving", seconds=0.3)
    ids = add(client, 3)
    await eventually(lambda: client.llen(Worker.STARTED) == 3)
    leaving.send(signal.SIGTERM)
    assert await leaving.ended() == 0
    assert sorted(client.lrange(EFFECTS, 0, -1)) == sorted(f"leaving:{entry_id}" for entry_id in ids)
    assert consumers(client) == {}


async def test_sigterm_releases_unfinished_work(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    leaving = worker(server, "leaving", seconds=60, drain=0.2)
    ids = add(client, 3)
    await eventually(lambda: client.llen(Worker.STARTED) == 3)
    leaving.send(signal.SIGTERM)
    assert await leaving.ended() == 0
    assert "leaving" not in consumers(client)
    assert deliveries(client) == dict.fromkeys(ids, 0)
    recorder = Recorder()
    # released entries do not wait for the visibility timeout
    async with consuming(server, recorder, visibility_timeout=3.0):
        began = time.monotonic()
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)
        assert time.monotonic() - began < 2.5
    assert recorder.deliveries == [1, 1, 1]
