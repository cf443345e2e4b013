"""Order: entries begin in the order of their stream, commands are carried out in the order in which they were sent."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
from contract.bus.observing import EFFECTS, Recorder, add, eventually, pending
from contract.bus.servers import Server, network
from contract.bus.surface import STREAM, Delivery, call, consuming, key, note, open_bus

ORDER = key("order")


async def test_one_slot_handles_a_stream_in_its_order(server: Server, client: redis.Redis) -> None:
    ids = add(client, 50)
    recorder = Recorder()
    async with consuming(server, recorder, concurrency=1):
        ids += add(client, 50)
        await eventually(lambda: len(recorder.seen) == 100)
    assert recorder.seen == ids


async def test_many_slots_begin_entries_in_their_order(server: Server, client: redis.Redis) -> None:
    recorder = Recorder(0.001)
    async with consuming(server, recorder, concurrency=16):
        ids = add(client, 200)
        await eventually(lambda: len(recorder.seen) == 200)
    assert recorder.seen == ids


async def test_effects_of_an_entry_keep_their_order(server: Server, client: redis.Redis) -> None:
    async def handle(delivery: Delivery) -> list[Any]:
        return [("RPUSH", EFFECTS, f"{delivery.entry_id}:{number}") for number in range(20)]

    ids = add(client, 10)
    async with consuming(server, handle):
        await eventually(lambda: client.llen(EFFECTS) == 200)
    found = client.lrange(EFFECTS, 0, -1)
    for entry_id in ids:
        assert [one for one in found if one.startswith(f"{entry_id}:")] == [f"{entry_id}:{n}" for n in range(20)]


async def test_published_messages_keep_their_order(server: Server, client: redis.Redis) -> None:
    async with open_bus(server) as bus:
        for start in range(0, 100, 20):
            await bus.publish(*[note(str(number)) for number in range(start, start + 20)])
    found = [fields["payload"] for _, fields in client.xrange(STREAM)]
    assert found == [f'{{"text":"{number}"}}' for number in range(100)]


async def test_commands_of_one_task_keep_their_order(server: Server, client: redis.Redis) -> None:
    async with open_bus(server) as bus:
        sent = [asyncio.create_task(call(bus, "RPUSH", ORDER, number)) for number in range(200)]
        await asyncio.gather(*sent)
    assert client.lrange(ORDER, 0, -1) == [str(number) for number in range(200)]


async def test_unanswered_commands_are_repeated_in_their_order(server: Server, client: redis.Redis) -> None:
    """The network stands still before the first of them arrives, and then breaks."""
    async with network(server) as net, open_bus(net) as bus:
        await call(bus, "EXISTS", ORDER)
        net.freeze()
        sent = []
        for number in range(20):
            sent.append(asyncio.create_task(call(bus, "RPUSH", ORDER, number)))
            # some leave in one write, others in later ones
            await asyncio.sleep(0 if number % 4 else 0.02)
        net.cut()
        net.thaw()
        await asyncio.gather(*sent)
    assert client.lrange(ORDER, 0, -1) == [str(number) for number in range(20)]


async def test_replies_go_to_their_own_commands_over_cuts(server: Server, client: redis.Redis) -> None:
    async with network(server) as net, open_bus(net, timeout=0.3) as bus:
        client.mset({f"{ORDER}:{number}": number for number in range(50)})

        async def ask(number: int) -> None:
            for _ in range(4):
                assert await call(bus, "GET", f"{ORDER}:{number}") == b"%d" % number
                await asyncio.sleep(number % 7 / 100)

        asking = asyncio.gather(*map(ask, range(50)))
        for _ in range(4):
            before = net.connections
            net.cut()
            await eventually(lambda: net.connections > before or asking.done())  # noqa: B023
        await asking
        assert pending(client) == -1
