"""Takeover: an entry of a consumer that died is handled by another one, after the visibility timeout."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import redis
from contract.bus.observing import Recorder, Worker, add, consumers, eventually, owners, pending
from contract.bus.servers import Server, network
from contract.bus.surface import GROUP, STREAM, VISIBILITY_TIMEOUT, consuming


def read_as(client: redis.Redis, name: str, count: int) -> list[str]:
    """Add entries and read them as a consumer that then dies."""
    if not client.exists(STREAM):
        client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    ids = add(client, count)
    client.xreadgroup(GROUP, name, {STREAM: ">"}, count=count)
    return ids


async def test_dead_consumer_entries_are_taken_over_after_timeout(server: Server, client: redis.Redis) -> None:
    ids = read_as(client, "dead", 3)
    recorder = Recorder()
    started = time.monotonic()
    async with consuming(server, recorder):
        await eventually(lambda: sorted(recorder.seen) == ids and pending(client) == 0)
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
    assert sorted(owners(client)) == ids
    recorder = Recorder()
    async with consuming(server, recorder):
        await eventually(lambda: sorted(recorder.seen) == ids and pending(client) == 0)
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
        await eventually(lambda: sorted(recorder.seen) == ids and pending(client) == 0)
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
            await eventually(lambda: sorted(other.seen[1:]) == ids and pending(client) == 0)
            assert time.monotonic() - left < long - 1
    assert other.deliveries == [1, 1, 1]
