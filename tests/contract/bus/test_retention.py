"""Retention: finished entries go, and no stream is trimmed past an entry that one of its groups has not finished."""

from __future__ import annotations

import asyncio
import random
from itertools import chain
from typing import Any

import pytest
import redis
from contract.bus.observing import Recorder, add, consumers, eventually, pending, read_as
from contract.bus.servers import Server
from contract.bus.surface import (
    DEAD_LETTER,
    DEAD_LETTERS,
    GROUP,
    STREAM,
    SUBJECT,
    absent_groups,
    consuming,
    note,
    open_bus,
    subject,
    trim,
)


def ids_of(client: redis.Redis, of: str = STREAM) -> list[str]:
    return [entry_id for entry_id, _ in client.xrange(of)]


def finish(client: redis.Redis, count: int, group: str = "g") -> list[str]:
    """Add entries, and read and acknowledge them as a group."""
    ids = add(client, count)
    client.xreadgroup(group, "c", {STREAM: ">"}, count=count)
    client.xack(STREAM, group, *ids)
    return ids


async def test_finished_entries_are_trimmed(server: Server, client: redis.Redis) -> None:
    recorder = Recorder()
    async with open_bus(server) as bus, consuming(server, recorder):
        add(client, 300)
        await eventually(lambda: len(recorder.seen) == 300 and pending(client) == 0)
        assert await trim(bus, SUBJECT) == 300
        assert client.xlen(STREAM) == 0
        # and the next one is delivered
        ids = add(client)
        await eventually(lambda: ids[0] in recorder.seen)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", range(2))
async def test_trim_spares_the_unfinished_of_every_group(
    server: Server, client: redis.Redis, seed: int, groups: int
) -> None:
    rng = random.Random(seed)
    entries: list[str] = []
    unread: list[list[str]] = [[] for _ in range(groups)]
    unfinished: list[list[str]] = [[] for _ in range(groups)]
    removed = 0
    for n in range(groups):
        client.xgroup_create(STREAM, f"g{n}", "0", mkstream=True)
    async with open_bus(server) as bus:
        for _ in range(200):
            n = rng.randrange(groups)
            match rng.choice(("add", "read", "read", "acknowledge", "acknowledge", "trim")):
                case "add":
                    added = add(client, rng.randint(1, 8))
                    entries += added
                    for waiting in unread:
                        waiting += added
                case "read":
                    for _, found in client.xreadgroup(f"g{n}", "c", {STREAM: ">"}, count=8) or ():
                        unfinished[n] += [entry_id for entry_id, _ in found]
                        del unread[n][: len(found)]
                case "acknowledge" if unfinished[n]:
                    rng.shuffle(unfinished[n])
                    done = [unfinished[n].pop() for _ in range(min(len(unfinished[n]), rng.randint(1, 8)))]
                    client.xack(STREAM, f"g{n}", *done)
                case "trim":
                    removed += await trim(bus, SUBJECT)
                    needed = {*chain(*unread, *unfinished)}
                    first = next((n for n, entry_id in enumerate(entries) if entry_id in needed), len(entries))
                    assert ids_of(client) == entries[first:]
        for n in range(groups):
            client.xreadgroup(f"g{n}", "c", {STREAM: ">"})
            client.xack(STREAM, f"g{n}", *entries)
        removed += await trim(bus, SUBJECT)
    assert removed == len(entries) > 20


async def test_abandoned_group_holds_nothing_back(server: Server, client: redis.Redis) -> None:
    for group in ("g", "gone"):
        client.xgroup_create(STREAM, group, "0", mkstream=True)
    finish(client, 6)
    ids = add(client, 4)
    async with open_bus(server) as bus:
        assert await trim(bus, SUBJECT) == 0
        assert await trim(bus, SUBJECT, abandoned=["gone"]) == 6
    assert ids_of(client) == ids


async def test_just_finished_entries_are_spared(server: Server, client: redis.Redis) -> None:
    client.xgroup_create(STREAM, "g", "0", mkstream=True)
    seconds, _ = client.time(target_nodes="random") if server.clustered else client.time()
    old = [client.xadd(STREAM, {"payload": "x"}, id=f"{(seconds - age) * 1000}-1") for age in (90, 80, 30, 20)]
    client.xreadgroup("g", "c", {STREAM: ">"})
    client.xack(STREAM, "g", *old)
    async with open_bus(server) as bus:
        assert await trim(bus, SUBJECT, spare_ms=60_000) == 2
    assert ids_of(client) == old[2:]


async def test_many_just_finished_entries_are_not_spared(server: Server, client: redis.Redis) -> None:
    client.xgroup_create(STREAM, "g", "0", mkstream=True)
    with client.pipeline(transaction=False) as pipe:
        for _ in range(2_000):
            pipe.xadd(STREAM, {"payload": "x"})
        ids = pipe.execute()
    client.xreadgroup("g", "c", {STREAM: ">"}, count=2_000)
    client.xack(STREAM, "g", *ids)
    async with open_bus(server) as bus:
        assert await trim(bus, SUBJECT, spare_ms=60_000) == 2_000


@pytest.mark.parametrize("abandoned", [(), ("gone",)], ids=["no group", "abandoned group"])
async def test_work_stream_that_none_reads_is_bounded(
    server: Server, client: redis.Redis, abandoned: tuple[str, ...]
) -> None:
    unread = subject("unread", keep=100)
    for group in abandoned:
        client.xgroup_create(unread.stream, group, "0", mkstream=True)
    with client.pipeline(transaction=False) as pipe:
        for _ in range(1_000):
            pipe.xadd(unread.stream, {"payload": "x"})
        ids = pipe.execute()
    async with open_bus(server) as bus:
        await trim(bus, unread, abandoned=abandoned)
    kept = ids_of(client, unread.stream)
    assert 100 <= len(kept) <= 300
    assert kept == ids[-len(kept) :]


async def test_large_unread_entries_are_bounded_in_bytes(server: Server, client: redis.Redis) -> None:
    unread = subject("unread", keep=1_000)
    for _ in range(30):
        client.xadd(unread.stream, {"payload": "x" * 4_000_000})
    async with open_bus(server) as bus:
        await trim(bus, unread)
    assert 1 <= client.xlen(unread.stream) <= 10


async def test_old_events_go_and_dead_letters_stay(server: Server, client: redis.Redis) -> None:
    event = subject("event", kind="event")
    async with open_bus(server, retention=60) as bus:
        now = bus.now_ms()
        for stream in (event.stream, DEAD_LETTERS):
            # a stream is trimmed by whole nodes: each age has far more than one
            with client.pipeline(transaction=False) as pipe:
                for age in (61_000, 50_000):
                    for n in range(1, 1_001):
                        pipe.xadd(stream, {"payload": "x" * 100}, id=f"{now - age}-{n}")
                pipe.execute()
        assert await trim(bus, event) >= 900
        assert client.xlen(event.stream) >= 1_000
        assert await trim(bus, DEAD_LETTER) == 0
    assert client.xlen(DEAD_LETTERS) == 2_000


async def test_silent_consumer_without_entries_is_removed(server: Server, client: redis.Redis) -> None:
    read_as(client, "holding", 1)
    client.xgroup_createconsumer(STREAM, GROUP, "gone")
    async with open_bus(server) as bus:

        async def removed() -> bool:
            await absent_groups(bus, SUBJECT, 100)
            return "gone" not in consumers(client)

        await eventually(removed)
        assert consumers(client) == {"holding": 1}
        assert await absent_groups(bus, SUBJECT, 100) == [GROUP]
        assert await absent_groups(bus, SUBJECT, 600_000) == []


async def test_trim_beside_running_work_loses_no_entry(server: Server, client: redis.Redis) -> None:
    one, two = Recorder(0.001), Recorder(0.003)
    ids: list[str] = []
    options: dict[str, Any] = {"concurrency": 8}
    async with (
        open_bus(server) as bus,
        consuming(server, one, group="g1", **options),
        consuming(server, two, group="g2", **options),
    ):
        for _ in range(40):
            ids += await bus.publish(*[note()] * 10)
            await trim(bus, SUBJECT)
            await asyncio.sleep(0)
        await eventually(lambda: len(one.seen) == len(two.seen) == 400)
        await eventually(lambda: pending(client, group="g1") == pending(client, group="g2") == 0)
        await trim(bus, SUBJECT)
    assert sorted(one.seen) == sorted(two.seen) == sorted(ids)
    assert client.xlen(STREAM) == 0
