"""Followers of event streams and journals: every entry once and in order, over any outage, at a constant price."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import pytest
import redis
from contract.bus.calling import Callers
from contract.bus.servers import Network, Server, network
from contract.bus.surface import (
    START,
    Bus,
    EntryType,
    Feed,
    JournalWriter,
    call,
    follow_journals,
    follow_streams,
    journal_key,
    open_bus,
)
from support.entries import event_of
from support.waiting import eventually

Kind = Literal["stream", "journal"]
BOTH = pytest.mark.parametrize("kind", ["stream", "journal"])
PATIENCE = 60
_CHANNELS = ("CHANNELS", "SHARDCHANNELS")


def key(number: int = 0) -> str:
    return journal_key(f"{number}-1", "A")


def feed(kind: Kind, bus: Bus) -> AbstractAsyncContextManager[Feed]:
    return follow_streams(bus) if kind == "stream" else follow_journals(bus)


async def write(bus: Bus, stream: str, count: int, pause: float = 0.0, text: str = "x") -> None:
    """Write the entries 1-1 to 1-(count + 1) of a journal; what is sent twice is written once."""
    writer, _ = await JournalWriter.claim(bus, stream, event_of("claimed", {}), 600)
    for _ in range(count):
        await writer.append(event_of(EntryType.ANSWER, {"text": text}))
        if pause:
            await asyncio.sleep(pause)


def ids(count: int, first: int = 1) -> list[str]:
    return [f"1-{number}" for number in range(first, count + 2)]


async def read(feed: Feed, stream: str, count: int, after: str = START, pause: float = 0.0) -> list[str]:
    """Follow until the last of `count` written entries, and return the ids."""
    follower, got = feed.follow(stream, after), list[str]()
    try:
        async with asyncio.timeout(PATIENCE):
            while not got or got[-1] != f"1-{count + 1}":
                got += [entry_id for entry_id, _ in await follower.next()]
                await asyncio.sleep(pause)
    finally:
        follower.close()
    return got


# ── every entry once, in order ───────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_follower_gets_every_entry_once_in_order(kind: Kind, server: Server, bus: Bus) -> None:
    """Followers of several streams come at any time and begin at any entry."""
    rng = random.Random(7)
    async with open_bus(server, "test/far") as far, feed(kind, far) as feeding:

        async def late(stream: str, after: int) -> list[str]:
            await asyncio.sleep(rng.random() * 0.2)
            return await read(feeding, stream, 150, f"1-{after}" if after else START)

        places = [(key(number % 3), rng.choice((0, 0, rng.randrange(150)))) for number in range(18)]
        reading = [asyncio.create_task(late(*place)) for place in places]
        await asyncio.gather(*(write(bus, key(number), 150, 0.0005) for number in range(3)))
        assert await asyncio.gather(*reading) == [ids(150, after + 1) for _, after in places]


async def _break(fault: str, net: Network, server: Server) -> None:
    match fault:
        case "cut":
            net.cut()
        case "lost replies":
            net.lose_next_reply()
        case "client kill":
            for kind in ("normal", "pubsub"):
                server.everywhere("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        case "black hole":
            net.lose_connections()


@BOTH
@pytest.mark.parametrize("fault", ["cut", "lost replies", "client kill", "black hole"])
async def test_follower_misses_nothing_over_broken_connections(
    fault: str, kind: Kind, server: Server, bus: Bus
) -> None:
    count = 40 if fault == "black hole" else 200
    async with network(server) as net, open_bus(net, "test/far", timeout=0.2) as far, feed(kind, far) as feeding:
        reading = [asyncio.create_task(read(feeding, key(number), count)) for number in range(4)]
        writers = [
            (await JournalWriter.claim(bus, key(number), event_of("claimed", {}), 600))[0] for number in range(4)
        ]
        for number in range(count):
            await asyncio.gather(
                *(writer.append(event_of(EntryType.ANSWER, {"text": str(number)})) for writer in writers)
            )
            if number % 20 == 10:
                await _break(fault, net, server)
                # the fault finds followers that wait, not only those that read a backlog
                await asyncio.sleep(0.01)
        assert await asyncio.gather(*reading) == [ids(count)] * 4


@BOTH
async def test_follower_misses_nothing_over_redis_restart(kind: Kind, own_server: Server) -> None:
    async with open_bus(own_server) as bus, feed(kind, bus) as feeding:
        reading = asyncio.create_task(read(feeding, key(), 300))
        writing = asyncio.create_task(write(bus, key(), 300, 0.001))
        for length in (60, 160):
            await eventually(lambda length=length: own_server.client.xlen(key()) > length)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
        await writing
        assert await reading == ids(300)


@BOTH
async def test_follower_on_silent_connection_gets_new_entries(kind: Kind, server: Server, bus: Bus) -> None:
    async with network(server) as net, open_bus(net, "test/far", timeout=0.3) as far, feed(kind, far) as feeding:
        writer, _ = await JournalWriter.claim(bus, key(), event_of("claimed", {}), 600)
        follower = feeding.follow(key())
        assert [entry_id for entry_id, _ in await follower.next()] == ["1-1"]
        for number in range(2, 5):
            waiting = asyncio.create_task(follower.next())
            await asyncio.sleep(0)
            net.lose_connections()
            await writer.append(event_of(EntryType.ANSWER, {"text": "x"}))
            async with asyncio.timeout(PATIENCE):
                assert [entry_id for entry_id, _ in await waiting] == [f"1-{number}"]
        follower.close()


@BOTH
async def test_follower_joining_beside_a_waiting_one_is_served(kind: Kind, server: Server, bus: Bus) -> None:
    async with feed(kind, bus) as feeding, asyncio.timeout(PATIENCE):
        silent = asyncio.create_task(feeding.follow(key(99)).next())
        for number in range(5):
            waiting = asyncio.create_task(feeding.follow(key(number)).next())
            await asyncio.sleep(0)
            await JournalWriter.claim(bus, key(number), event_of("claimed", {}), 600)
            assert [entry_id for entry_id, _ in await waiting] == ["1-1"]
        assert not silent.done()
        silent.cancel()


@BOTH
async def test_follower_behind_trimmed_entries_goes_on(kind: Kind, bus: Bus, client: redis.Redis) -> None:
    async with feed(kind, bus) as feeding, asyncio.timeout(PATIENCE):
        writer, _ = await JournalWriter.claim(bus, key(), event_of("claimed", {}), 600)
        for _ in range(9):
            await writer.append(event_of(EntryType.ANSWER, {"text": "x"}))
        client.xtrim(key(), maxlen=0, approximate=False)
        waiting = asyncio.create_task(feeding.follow(key(), "1-3").next())
        await asyncio.sleep(0)
        await writer.append(event_of(EntryType.ANSWER, {"text": "x"}))
        assert [entry_id for entry_id, _ in await waiting] == ["1-11"]


@BOTH
async def test_follower_of_flushed_server_gets_new_entries(kind: Kind, server: Server, bus: Bus) -> None:
    async with feed(kind, bus) as feeding, asyncio.timeout(PATIENCE):
        follower = feeding.follow(key(1))
        await JournalWriter.claim(bus, key(1), event_of("claimed", {}), 600)
        assert await follower.next()
        server.flush()
        waiting = asyncio.create_task(feeding.follow(key(2)).next())
        await JournalWriter.claim(bus, key(2), event_of("claimed", {}), 600)
        assert [entry_id for entry_id, _ in await waiting] == ["1-1"]
        # the one that followed before gets what is written behind its last entry
        waiting = asyncio.create_task(follower.next())
        await call(bus, "XADD", key(1), "2-1", "type", "answer", "time", 1, "data", "{}")
        assert [entry_id for entry_id, _ in await waiting] == ["2-1"]


@BOTH
async def test_follower_beside_key_of_other_type_is_served(kind: Kind, bus: Bus, client: redis.Redis) -> None:
    client.set(key(1), "no stream")
    async with feed(kind, bus) as feeding, asyncio.timeout(PATIENCE):
        odd, good = feeding.follow(key(1)), feeding.follow(key(2))
        both = [asyncio.create_task(one.next()) for one in (odd, good)]
        await JournalWriter.claim(bus, key(2), event_of("claimed", {}), 600)
        assert [entry_id for entry_id, _ in await both[1]] == ["1-1"]
        client.delete(key(1))
        await JournalWriter.claim(bus, key(1), event_of("claimed", {}), 600)
        assert [entry_id for entry_id, _ in await both[0]] == ["1-1"]


# ── the price ────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_follower_that_is_slow_does_not_delay_others(kind: Kind, bus: Bus) -> None:
    """The slow one takes nothing until all others have 2 MB; then it gets everything, too."""
    async with feed(kind, bus) as feeding, asyncio.timeout(PATIENCE):
        slow = feeding.follow(key())
        first = asyncio.create_task(slow.next())
        others = [asyncio.create_task(read(feeding, key(), 500)) for _ in range(20)]
        await write(bus, key(), 500, text="x" * 4_000)
        assert await asyncio.gather(*others) == [ids(500)] * 20
        got = [entry_id for entry_id, _ in await first]
        while got[-1] != "1-501":
            got += [entry_id for entry_id, _ in await slow.next()]
        assert got == ids(500)
        slow.close()


@BOTH
async def test_followers_of_one_stream_all_get_everything(kind: Kind, bus: Bus) -> None:
    async with feed(kind, bus) as feeding:
        reading = [asyncio.create_task(read(feeding, key(), 200)) for _ in range(200)]
        await write(bus, key(), 200)
        assert await asyncio.gather(*reading) == [ids(200)] * 200


def connections(server: Server) -> int:
    """Return how many connections the server's nodes have, besides those of the observers."""
    return sum(len(node.client.client_list()) for node in server.nodes)


@BOTH
async def test_followers_share_connections_of_their_process(kind: Kind, own_server: Server) -> None:
    async with open_bus(own_server) as bus, feed(kind, bus) as feeding:

        async def settled(streams: Sequence[int]) -> int:
            """Follow many journals; return the number of connections when each follower has waited and been served."""
            reading = [asyncio.create_task(read(feeding, key(number), 3)) for number in streams]
            await asyncio.gather(*(write(bus, key(number), 2) for number in streams))
            most = connections(own_server)
            for number in streams:
                await call(bus, "XADD", key(number), "1-4", "type", "answer", "time", 1, "data", "{}")
            await asyncio.gather(*reading)
            return most

        few = await settled(range(6))
        assert await settled(range(6, 206)) <= few


async def test_tool_calls_share_connections_of_their_process(own_server: Server, callers: Callers) -> None:
    """Neither calls that run nor clients or queries that they are made for open connections."""
    async with callers.worker(own_server, concurrency=64), callers.asker(own_server) as asker:
        await asker.ask("first", "first")
        before = connections(own_server)
        calls = [
            asyncio.create_task(asker.ask(f"t{n}", f"c{n}", query_id=f"{n}-1", seconds=0.1, timeout=60))
            for n in range(200)
        ]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, connections(own_server))
            await asyncio.sleep(0.01)
        assert {call.result().error for call in calls} == {None}
    assert most <= before


@BOTH
async def test_followers_that_leave_close_their_subscriptions(kind: Kind, own_server: Server) -> None:
    def channels() -> list[Any]:
        found = [node.client.execute_command("PUBSUB", what) for node in own_server.nodes for what in _CHANNELS]
        return [name for names in found for name in names]

    async with open_bus(own_server) as bus, feed(kind, bus) as feeding:
        followers = [feeding.follow(key(number)) for number in range(5)]
        waiting = [asyncio.create_task(follower.next()) for follower in followers]
        if kind == "journal":
            await eventually(lambda: len(channels()) == 5)
        for one in waiting:
            one.cancel()
        for follower in followers:
            follower.close()
        await eventually(lambda: not channels())
