"""A server that refuses writes: accepted work waits for room, and that uses up no delivery."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from contract.bus.observing import (
    EFFECTS,
    Recorder,
    Worker,
    add,
    always,
    consumers,
    deliveries,
    eventually,
    owners,
    pending,
)
from contract.bus.servers import Server
from contract.bus.surface import (
    BusFull,
    Delivery,
    PermanentError,
    Replica,
    call,
    consuming,
    dead_letters,
    effect,
    key,
    note,
    open_bus,
    subject,
)

REASONS = ["OOM", "MISCONF", "NOREPLICAS"]
OPTIONS: dict[str, Any] = {"visibility_timeout": 0.15, "max_deliveries": 2}
# Longer than so many deliveries take.
LONG = 0.8


@pytest.mark.parametrize("why", REASONS)
async def test_refused_effects_are_offered_until_there_is_room(
    own_server: Server, own_client: redis.Redis, why: str
) -> None:
    tried: list[int] = []

    async def handle(delivery: Delivery) -> list[Any]:
        tried.append(delivery.deliveries)
        own_server.refuse_writes(why)
        return [("RPUSH", EFFECTS, "x")]

    async with consuming(own_server, handle, **OPTIONS):
        (entry_id,) = add(own_client)
        await eventually(lambda: tried)
        await always(lambda: pending(own_client) == 1 and not own_client.exists(EFFECTS), LONG)
        assert deliveries(own_client) == {entry_id: 1}
        own_server.accept_writes()
        await eventually(lambda: pending(own_client) == 0)
    # the handler did not run again
    assert tried == [1]
    assert own_client.lrange(EFFECTS, 0, -1) == ["x"]
    assert dead_letters(own_client) == []


@pytest.mark.parametrize("why", REASONS)
async def test_handler_that_meets_full_server_runs_again(own_server: Server, own_client: redis.Redis, why: str) -> None:
    tried: list[int] = []
    async with open_bus(own_server, "test/handler") as bus:

        async def handle(delivery: Delivery) -> list[Any]:
            tried.append(delivery.deliveries)
            if len(tried) == 1:
                own_server.refuse_writes(why)
            await call(bus, "RPUSH", EFFECTS, "x")
            return []

        async with consuming(own_server, handle, **OPTIONS):
            add(own_client)
            await eventually(lambda: tried)
            await always(lambda: pending(own_client) == 1, LONG)
            own_server.accept_writes()
            await eventually(lambda: pending(own_client) == 0)
    assert len(tried) > 1
    assert set(tried) == {1}
    assert own_client.lrange(EFFECTS, 0, -1) == ["x"]
    assert dead_letters(own_client) == []


@pytest.mark.parametrize("why", REASONS)
async def test_refused_command_raises_bus_full_and_reads_go_on(
    own_server: Server, own_client: redis.Redis, why: str
) -> None:
    name = key("name")
    async with open_bus(own_server) as bus:
        await call(bus, "SET", name, "before")
        with own_server.refusing_writes(why):
            with pytest.raises(BusFull, match=why):
                await call(bus, "SET", name, "after")
            with pytest.raises(BusFull, match=why):
                await bus.publish(note())
            assert await call(bus, "GET", name) == b"before"
        await bus.publish(note())


async def test_once_published_effect_waits_for_room(server: Server, client: redis.Redis) -> None:
    """A script whose writes are refused must not be acknowledged as if it had written."""
    following = subject("following")
    running: list[Replica] = []

    async def handle(delivery: Delivery) -> list[Any]:
        server.refuse_writes("OOM")
        return [effect(running[0].bus, note("x", following, once=delivery.entry_id))]

    try:
        async with consuming(server, handle, **OPTIONS) as replica:
            running.append(replica)
            add(client)
            await eventually(lambda: pending(client) == 1)
            await always(lambda: pending(client) == 1, LONG / 2)
            server.accept_writes()
            await eventually(lambda: pending(client) == 0)
    finally:
        server.accept_writes()
    assert client.xlen(following.stream) == 1
    assert dead_letters(client) == []


async def test_dead_letter_waits_for_room(server: Server, client: redis.Redis) -> None:
    async def handle(_delivery: Delivery) -> list[Any]:
        server.refuse_writes("OOM")
        raise PermanentError("no such thing")

    try:
        async with consuming(server, handle, **OPTIONS):
            add(client)
            await eventually(lambda: pending(client) == 1)
            await always(lambda: pending(client) == 1 and not dead_letters(client), LONG / 2)
            server.accept_writes()
            await eventually(lambda: dead_letters(client) and pending(client) == 0)
    finally:
        server.accept_writes()
    assert len(dead_letters(client)) == 1


async def test_stop_on_full_server_releases_the_entry(server: Server, client: redis.Redis) -> None:
    tried = asyncio.Event()

    async def handle(_delivery: Delivery) -> list[Any]:
        server.refuse_writes("OOM")
        tried.set()
        return [("RPUSH", EFFECTS, "x")]

    try:
        async with consuming(server, handle, drain=0.2, **OPTIONS):
            (entry_id,) = add(client)
            await asyncio.wait_for(tried.wait(), 20)
        assert list(owners(client)) == [entry_id]
        assert "r1" not in consumers(client)
    finally:
        server.accept_writes()
    recorder = Recorder()
    async with consuming(server, recorder, name="r2", **OPTIONS):
        await eventually(lambda: recorder.seen == [entry_id] and pending(client) == 0)
    assert recorder.deliveries == [1]


async def test_kill_while_server_is_full_loses_no_entry(
    server: Server, client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    doomed = worker(server, "doomed", seconds=0.5)
    ids = add(client, 3)
    await eventually(lambda: client.llen(Worker.STARTED) == 3)
    with server.refusing_writes():
        await always(lambda: pending(client) == 3, LONG)
        doomed.send(signal.SIGKILL)
        await doomed.ended()
    recorder = Recorder()
    async with consuming(server, recorder):
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)
    assert not client.exists(EFFECTS)


async def test_owner_keeps_its_entry_while_none_can_renew(own_server: Server, own_client: redis.Redis) -> None:
    """Consumers without entries write nothing, and must not take it for silence that the owner cannot write."""
    owner, other = Recorder(gated=True), Recorder()
    async with consuming(own_server, owner, name="owner", visibility_timeout=0.3):
        (held,) = add(own_client)
        await eventually(lambda: owner.running == 1)
        async with consuming(own_server, other, name="other", visibility_timeout=0.3):
            for _ in range(2):
                # the other one has watched for long enough
                await always(lambda: held not in other.seen, 0.6)
                with own_server.refusing_writes("MISCONF"):
                    await always(lambda: held not in other.seen, 0.6)
            await always(lambda: held not in other.seen, 0.6)
            owner.gate.set()
            await eventually(lambda: pending(own_client) == 0)
    assert held not in other.seen
    assert dead_letters(own_client) == []
