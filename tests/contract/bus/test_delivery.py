"""Delivery: every entry is handled at least once, and its effects are written with its acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import redis
from contract.bus.observing import Recorder, add, always, eventually, pending, streams_of
from contract.bus.servers import Server, network
from contract.bus.surface import (
    ATOMIC_IN_CLUSTER,
    STREAM,
    Delivery,
    Replica,
    TransientError,
    consuming,
    dead_letters,
    effect,
    key,
    note,
    open_bus,
    route,
    subject,
)

EFFECTS = key("effects")


def pushing(times: int = 1) -> Callable[[Delivery], Any]:
    """Return a handler whose effects name its entry."""

    async def handle(delivery: Delivery) -> list[Any]:
        return [("RPUSH", EFFECTS, delivery.entry_id)] * times

    return handle


async def test_entry_older_than_the_group_is_delivered(server: Server, client: redis.Redis) -> None:
    ids = add(client, 3)
    recorder = Recorder()
    async with consuming(server, recorder, concurrency=1):
        await eventually(lambda: recorder.seen == ids and pending(client) == 0)


async def test_entry_is_acknowledged_after_its_handler_ended(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(server, gated):
        add(client)
        await eventually(lambda: gated.running == 1)
        await always(lambda: pending(client) == 1, 0.3)
        gated.gate.set()
        await eventually(lambda: pending(client) == 0)


async def test_effects_are_visible_when_entry_is_acknowledged(server: Server, client: redis.Redis) -> None:
    async with consuming(server, pushing()):
        await eventually(lambda: pending(client) == 0)
        for turn in range(1, 51):
            add(client)
            # both numbers of one moment: nothing is in flight, and nothing is still to be read
            while (group := client.xinfo_groups(STREAM)[0]) and (group["pending"], group["lag"]) != (0, 0):
                await asyncio.sleep(0)
            assert client.llen(EFFECTS) == turn


async def test_effects_and_acknowledgement_appear_together(server: Server, client: redis.Redis) -> None:
    """No client sees some of an entry's effects alone, or its effects without its acknowledgement."""
    both = """return {redis.call('LLEN', KEYS[1]), redis.call('XPENDING', KEYS[2], ARGV[1])[1],
                      redis.call('LLEN', KEYS[3])}"""
    other = key("other")
    seen = set()

    async def handle(delivery: Delivery) -> list[Any]:
        return [("RPUSH", EFFECTS, "x"), ("RPUSH", other, "x")]

    async with consuming(server, handle, concurrency=1):
        await eventually(lambda: pending(client) == 0)
        for turn in range(1, 51):
            add(client)
            while (state := client.eval(both, 3, EFFECTS, STREAM, other, "workers")) != [turn, 0, turn]:
                seen.add((state[0] - turn, state[1], state[2] - turn))
                await asyncio.sleep(0)
    # before the read, or while the handler runs
    assert seen <= {(-1, 0, -1), (-1, 1, -1)} or (server.clustered and not ATOMIC_IN_CLUSTER)


async def test_two_consumers_share_entries_and_run_none_twice(server: Server, client: redis.Redis) -> None:
    one, two = Recorder(0.002), Recorder(0.002)
    async with consuming(server, one, name="r1"), consuming(server, two, name="r2"):
        ids = add(client, 300)
        await eventually(lambda: len(one.seen) + len(two.seen) >= 300 and pending(client) == 0)
    assert sorted(one.seen + two.seen) == sorted(ids)
    assert min(len(one.seen), len(two.seen)) > 30


async def test_every_group_gets_every_entry(server: Server, client: redis.Redis) -> None:
    one, two = Recorder(), Recorder()
    async with consuming(server, one, group="g1"), consuming(server, two, group="g2"):
        ids = add(client, 20)
        await eventually(lambda: pending(client, group="g1") == pending(client, group="g2") == 0)
        await eventually(lambda: sorted(one.seen) == sorted(two.seen) == sorted(ids))


async def test_consumer_reads_several_streams(server: Server, client: redis.Redis) -> None:
    names = streams_of(3)
    recorders = {name: Recorder() for name in names}
    async with consuming(server, {name: route(recorders[name]) for name in names}):
        ids = {name: add(client, 10, name) for name in names}
        await eventually(lambda: all(sorted(recorders[name].seen) == sorted(ids[name]) for name in names))
        await eventually(lambda: all(pending(client, name) == 0 for name in names))


async def test_published_effect_reaches_the_next_stream(server: Server, client: redis.Redis) -> None:
    following = subject("following")
    running: list[Replica] = []
    second = Recorder()

    async def first(delivery: Delivery) -> list[Any]:
        return [effect(running[0].bus, note("from the first", following))]

    async with consuming(server, {STREAM: route(first), following.stream: route(second)}) as replica:
        running.append(replica)
        add(client)
        await eventually(lambda: len(second.seen) == 1 and pending(client, following.stream) == 0)
    ((_, fields),) = client.xrange(following.stream)
    assert fields["payload"] == '{"text":"from the first"}'
    assert fields["source"] == "test/r1"


async def test_published_messages_are_delivered(server: Server, client: redis.Redis) -> None:
    recorder = Recorder()
    async with open_bus(server, "test/publisher") as bus, consuming(server, recorder):
        ids = await bus.publish(*[note(str(n)) for n in range(50)])
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)


async def test_message_published_twice_with_one_key_is_one_entry(server: Server, client: redis.Redis) -> None:
    async with open_bus(server, "test/1") as bus, open_bus(server, "test/2") as other:
        ids = [await each.publish(note(once="name")) for each in (bus, other, bus)]
        assert ids[0] == ids[1] == ids[2]
        assert await bus.publish(note(once="another")) != ids[0]
    assert client.xlen(STREAM) == 2


async def test_transient_error_is_delivered_again(server: Server, client: redis.Redis) -> None:
    tries: list[int] = []

    async def handle(delivery: Delivery) -> list[Any]:
        tries.append(delivery.deliveries)
        if len(tries) < 3:
            raise TransientError("not now")
        return [("RPUSH", EFFECTS, "x")]

    async with consuming(server, handle, visibility_timeout=0.3):
        add(client)
        await eventually(lambda: pending(client) == 0 and len(tries) == 3)
    assert tries == sorted(tries)
    assert tries[-1] > 1
    assert client.llen(EFFECTS) == 1


async def test_failing_handler_stops_no_other_entry(server: Server, client: redis.Redis) -> None:
    done: list[str] = []

    async def handle(delivery: Delivery) -> list[Any]:
        if delivery.deliveries == 1:
            raise RuntimeError("a bug")
        done.append(delivery.entry_id)
        return []

    async with consuming(server, handle, visibility_timeout=0.3):
        ids = add(client, 5)
        await eventually(lambda: sorted(done) == sorted(ids) and pending(client) == 0)
    assert dead_letters(client) == []


async def test_unknown_command_dead_letters_only_its_entry(server: Server, client: redis.Redis) -> None:
    """Effects of one loop tick leave together; one refused effect must not keep the others back."""
    together = asyncio.Barrier(3)

    async def handle(delivery: Delivery) -> list[Any]:
        await together.wait()
        return [("NOSUCHCOMMAND", EFFECTS)] if delivery.entry_id == ids[1] else [("RPUSH", EFFECTS, delivery.entry_id)]

    ids = add(client, 3)
    async with consuming(server, handle):
        await eventually(lambda: len(dead_letters(client)) == 1 and pending(client) == 0)
    assert sorted(client.lrange(EFFECTS, 0, -1)) == [ids[0], ids[2]]
    (letter,) = dead_letters(client)
    assert letter.entry_id == ids[1]
    assert "NOSUCHCOMMAND" in letter.reason


async def test_effect_on_key_of_wrong_type_dead_letters_entry(server: Server, client: redis.Redis) -> None:
    taken = key("taken")
    client.set(taken, "a string")

    async def handle(delivery: Delivery) -> list[Any]:
        wrong = [("RPUSH", taken, "x")] if delivery.entry_id == ids[1] else []
        return [("RPUSH", EFFECTS, delivery.entry_id), *wrong]

    ids = add(client, 3)
    async with consuming(server, handle):
        await eventually(lambda: len(dead_letters(client)) == 1 and pending(client) == 0)
    # the other effects of the entry stay
    assert sorted(client.lrange(EFFECTS, 0, -1)) == sorted(ids)
    (letter,) = dead_letters(client)
    assert letter.entry_id == ids[1]
    assert "WRONGTYPE" in letter.reason


async def test_killed_connections_lose_and_repeat_no_entry(server: Server, client: redis.Redis) -> None:
    recorder = Recorder(0.005)
    async with consuming(server, recorder, visibility_timeout=3.0):
        ids = add(client, 200)
        for part in (40, 80, 120):
            await eventually(lambda: len(recorder.seen) > part)  # noqa: B023
            server.everywhere("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await eventually(lambda: set(recorder.seen) == set(ids) and pending(client) == 0)
    assert sorted(recorder.seen) == sorted(ids)


async def test_lost_replies_lose_no_entry(server: Server, client: redis.Redis) -> None:
    ids: set[str] = set()

    def done() -> bool:
        return set(client.lrange(EFFECTS, 0, -1)) == ids and pending(client) == 0

    async with network(server) as net, consuming(net, pushing(), timeout=0.2, visibility_timeout=0.9):
        await eventually(lambda: pending(client) == 0)
        for _ in range(3):
            dropped = net.dropped
            net.set(drop_every=1)
            ids.update(add(client, 10))
            await eventually(lambda: net.dropped > dropped)  # noqa: B023
            net.set()
            await eventually(done)
    assert dead_letters(client) == []


async def test_connections_do_not_grow_with_the_work(server: Server, client: redis.Redis) -> None:
    async with network(server) as net:
        recorder = Recorder(0.02)
        async with consuming(net, recorder, concurrency=64):
            add(client, 1)
            await eventually(lambda: len(recorder.seen) == 1)
            before = net.connections
            add(client, 500)
            await eventually(lambda: len(recorder.seen) == 501 and pending(client) == 0)
            assert net.connections == before
