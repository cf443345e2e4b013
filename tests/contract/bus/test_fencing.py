"""Fencing: a consumer that lost its claim on an entry writes nothing for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import redis
from contract.bus.observing import EFFECTS, Recorder, Worker, add, consumers, eventually, owners, pending, read_waits
from contract.bus.servers import Server, network
from contract.bus.surface import GROUP, STREAM, VISIBILITY_TIMEOUT, Delivery, Fenced, consuming, dead_letters


def naming(name: str) -> Callable[[Delivery], Any]:
    """Return a handler whose effect is a name."""

    async def handle(_delivery: Delivery) -> list[Any]:
        return [("RPUSH", EFFECTS, name)]

    return handle


async def test_process_paused_past_its_claim_writes_nothing(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    paused = worker(server, "paused", seconds=0.3)
    add(client, 3)
    await eventually(lambda: client.llen(Worker.STARTED) == 3)
    paused.send(signal.SIGSTOP)
    async with consuming(server, naming("other"), name="other"):
        await eventually(lambda: client.lrange(EFFECTS, 0, -1) == ["other"] * 3)
        paused.send(signal.SIGCONT)
        # an entry that the process handles afterwards shows that it is awake
        await eventually(lambda: _handled_by(client, "paused"), 20)
        paused.send(signal.SIGTERM)
        assert await paused.ended() == 0
    assert "paused" not in consumers(client)
    after = client.lrange(EFFECTS, 0, -1)
    assert after[:3] == ["other"] * 3


def _handled_by(client: redis.Redis, name: str) -> bool:
    add(client)
    return any(effect.startswith(name) for effect in client.lrange(EFFECTS, 3, -1))


async def test_lost_claim_cancels_its_handler(server: Server, client: redis.Redis) -> None:
    cancelled = asyncio.Event()

    async def handle(delivery: Delivery) -> list[Any]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return []

    async with consuming(server, handle, drain=0.0):
        (entry_id,) = add(client)
        await eventually(lambda: owners(client) == {entry_id: "r1"})
        client.xclaim(STREAM, GROUP, "other", 0, [entry_id])
        await asyncio.wait_for(cancelled.wait(), 20)
        assert owners(client) == {entry_id: "other"}
        client.xack(STREAM, GROUP, entry_id)


async def test_handler_that_ignores_cancel_writes_nothing(server: Server, client: redis.Redis) -> None:
    ignored = asyncio.Event()

    async def handle(delivery: Delivery) -> list[Any]:
        if not ignored.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ignored.set()
        return [("RPUSH", EFFECTS, delivery.deliveries)]

    async with consuming(server, handle, visibility_timeout=0.3):
        (entry_id,) = add(client)
        await eventually(lambda: owners(client) == {entry_id: "r1"})
        client.xclaim(STREAM, GROUP, "other", 0, [entry_id])
        # the other consumer is silent, and its claim runs out
        await eventually(lambda: ignored.is_set() and pending(client) == 0)
    assert client.lrange(EFFECTS, 0, -1) == ["3"]


async def _take_over(client: redis.Redis, entry_id: str) -> None:
    """Take an entry over as another consumer does after the visibility timeout, and finish it."""
    milliseconds = int(VISIBILITY_TIMEOUT * 1000)

    def taken() -> bool:
        return bool(client.xclaim(STREAM, GROUP, "other", milliseconds, [entry_id], justid=True))

    await eventually(taken)
    client.rpush(EFFECTS, "other")
    client.xack(STREAM, GROUP, entry_id)


async def test_handler_that_ends_after_takeover_writes_nothing(server: Server, client: redis.Redis) -> None:
    """The handler ends as soon as the network is back, before its consumer has noticed the takeover."""
    gated = Recorder(gated=True)

    async def handle(delivery: Delivery) -> list[Any]:
        await gated(delivery)
        return [("RPUSH", EFFECTS, delivery.entry_id)]

    async with network(server) as net, consuming(net, handle, timeout=5.0):
        (entry_id,) = add(client)
        await eventually(lambda: gated.running == 1)
        net.freeze()
        await _take_over(client, entry_id)
        gated.gate.set()
        net.thaw()
        # a later entry shows that the consumer works again
        (later,) = add(client)
        await eventually(lambda: later in client.lrange(EFFECTS, 0, -1) and pending(client) == 0)
    assert client.lrange(EFFECTS, 0, -1) == ["other", later]


async def test_consumer_cut_off_past_its_claim_writes_nothing(server: Server, client: redis.Redis) -> None:
    """The handler ends while its consumer has no connection."""
    gated = Recorder(gated=True)

    async def handle(delivery: Delivery) -> list[Any]:
        await gated(delivery)
        return [("RPUSH", EFFECTS, delivery.entry_id)]

    async with network(server) as net, consuming(net, handle, timeout=0.3):
        (entry_id,) = add(client)
        await eventually(lambda: gated.running == 1)
        net.freeze()
        net.cut()
        gated.gate.set()
        await _take_over(client, entry_id)
        net.thaw()
        (later,) = add(client)
        await eventually(lambda: later in client.lrange(EFFECTS, 0, -1) and pending(client) == 0)
    assert client.lrange(EFFECTS, 0, -1) == ["other", later]


async def test_entry_finished_during_a_pause_is_not_begun(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    """It was read before the pause, and lies unread in the socket of a process that stands still."""
    paused = worker(server, "paused")
    (first,) = add(client)
    await eventually(lambda: client.lrange(EFFECTS, 0, -1) == [f"paused:{first}"])
    await eventually(lambda: read_waits(server))
    paused.send(signal.SIGSTOP)
    (given,) = add(client)
    await eventually(lambda: owners(client) == {given: "paused"})
    other = Recorder()
    async with consuming(server, other, name="other"):
        await eventually(lambda: other.seen == [given] and pending(client) == 0)
    paused.send(signal.SIGCONT)
    (later,) = add(client)
    await eventually(lambda: f"paused:{later}" in client.lrange(EFFECTS, 0, -1))
    assert f"paused:{given}" not in client.lrange(Worker.STARTED, 0, -1)


async def test_fenced_handler_leaves_entry_pending(server: Server, client: redis.Redis) -> None:
    """The handler found that another replica owns the work."""
    tries: list[int] = []

    async def handle(delivery: Delivery) -> list[Any]:
        tries.append(delivery.deliveries)
        if len(tries) == 1:
            raise Fenced("another replica owns it")
        return [("RPUSH", EFFECTS, "x")]

    async with consuming(server, handle, visibility_timeout=0.3):
        add(client)
        await eventually(lambda: pending(client) == 0 and client.llen(EFFECTS) == 1)
    assert len(tries) == 2
    assert dead_letters(client) == []


async def test_renewal_takes_no_entry_back(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(server, gated, visibility_timeout=0.3, drain=0.0):
        (entry_id,) = add(client)
        await eventually(lambda: gated.running == 1)
        client.xclaim(STREAM, GROUP, "other", 0, [entry_id])
        # the owner renews while this consumer goes on renewing what it held
        for _ in range(40):
            client.xclaim(STREAM, GROUP, "other", 0, [entry_id], justid=True)
            assert owners(client) == {entry_id: "other"}
            await asyncio.sleep(0.02)
        client.xack(STREAM, GROUP, entry_id)
    assert gated.seen == [entry_id]
