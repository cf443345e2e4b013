"""Messages under an idempotency key are published once, whoever sends them, however often and at whatever moment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from contract.bus.servers import Server, network
from contract.bus.surface import (
    DEAD_LETTERS,
    QUERY_RECEIVED,
    STREAM,
    Bus,
    Delivery,
    PermanentError,
    accept_query,
    call,
    consuming,
    effect,
    key,
    note,
    open_bus,
    replay,
    subject,
    url_of,
)
from support.waiting import eventually

_TESTS = Path(__file__).resolve().parents[2]


def texts(client: redis.Redis, stream: str = STREAM) -> list[str]:
    return [json.loads(fields["payload"])["text"] for _, fields in client.xrange(stream)]


async def test_publish_same_key_adds_one_entry(bus: Bus, client: redis.Redis) -> None:
    ids = [await bus.publish(note(text, once="a")) for text in ("first", "second", "third")]
    assert ids[0] == ids[1] == ids[2]
    assert texts(client) == ["first"]


async def test_publish_other_keys_and_streams_are_apart(bus: Bus, client: redis.Redis) -> None:
    other = subject("other")
    await bus.publish(note("1", once="a"), note("2", once="b"), note("3"), note("3"))
    await bus.publish(note("4", other, once="a"))
    assert texts(client) == ["1", "2", "3", "3"]
    assert texts(client, other.stream) == ["4"]


async def test_publish_same_key_together_adds_one_entry(server: Server, client: redis.Redis) -> None:
    async with open_bus(server, "test/1") as one, open_bus(server, "test/2") as other:
        sent = [bus.publish(note(str(number), once="a")) for number in range(20) for bus in (one, other)]
        assert len({tuple(ids) for ids in await asyncio.gather(*sent)}) == 1
    assert len(texts(client)) == 1


def publisher(server: Server, go: str, count: int) -> subprocess.Popen[bytes]:
    """Start a process that publishes under the keys 0 to `count` - 1 (publisher.py)."""
    command = [sys.executable, "-m", "contract.bus.publisher", url_of(server), go, str(count)]
    environment = {**os.environ, "PYTHONPATH": f"{_TESTS}{os.pathsep}{_TESTS.parent}"}
    return subprocess.Popen(command, env=environment, cwd=_TESTS.parent, stdout=subprocess.PIPE)


async def test_publish_same_keys_by_two_processes_once_each(server: Server, client: redis.Redis) -> None:
    """Both publish the same two hundred keys in the same order, as fast as they can."""
    processes = [publisher(server, key("go"), 200) for _ in range(2)]
    try:
        await eventually(lambda: client.llen(key("go")) == 2, what="both processes are connected")
        client.set(key("go") + ":now", 1)
        outputs = [(await asyncio.to_thread(process.communicate, None, 60))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # both were given the same ids
    assert outputs[0] == outputs[1]
    assert texts(client) == [str(number) for number in range(200)]


@pytest.mark.parametrize("fault", ["lost reply", "cut"])
async def test_publish_same_key_after_fault_adds_one_entry(fault: str, server: Server, client: redis.Redis) -> None:
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        for number in range(5):
            await call(bus, "GET", key("x"))
            if fault == "lost reply":
                net.lose_next_reply()
                await bus.publish(note(str(number), once=str(number)))
            else:
                sending = asyncio.create_task(bus.publish(note(str(number), once=str(number))))
                await asyncio.sleep(0)
                net.cut()
                await sending
    assert texts(client) == [str(number) for number in range(5)]


async def test_publish_key_is_kept_longer_than_its_deadline(bus: Bus, client: redis.Redis) -> None:
    """A message may come again as long as its query may be worked on. Its key expires some time later."""
    before = set(client.scan_iter("*"))
    ahead = 200_000
    await bus.publish(note(once="a", deadline=bus.now_ms() + ahead * 1000))
    lives = [client.ttl(name) for name in set(client.scan_iter("*")) - before - {STREAM}]
    assert len(lives) == 1
    assert ahead < lives[0] < ahead + 10 * 86_400


async def test_effect_under_key_of_repeated_delivery_once(server: Server, client: redis.Redis) -> None:
    """A handler that runs twice for one entry publishes once."""
    events = subject("events", kind="event")

    async with open_bus(server, "test/other") as publisher:
        client.xgroup_create(STREAM, "workers", "0", mkstream=True)
        entry_id = client.xadd(STREAM, {"payload": '{"text":"x"}'})
        # an earlier replica has published, and died before its acknowledgement
        client.xreadgroup("workers", "dead", {STREAM: ">"})
        await publisher.publish(note("effect", events, once=entry_id))

        async def handle(delivery: Delivery) -> list[Any]:
            return [effect(publisher, note("effect", events, once=delivery.entry_id))]

        async with consuming(server, handle):
            await eventually(lambda: client.xpending(STREAM, "workers")["pending"] == 0)
    assert texts(client, events.stream) == ["effect"]


async def test_replay_of_dead_letter_twice_adds_one_entry(server: Server, bus: Bus, client: redis.Redis) -> None:
    client.xadd(STREAM, {"payload": "no JSON"})

    async def refuse(_delivery: Delivery) -> list[Any]:
        raise PermanentError("refused")

    async with consuming(server, refuse):
        await eventually(lambda: client.xlen(DEAD_LETTERS) == 1)
    ((letter, _),) = client.xrange(DEAD_LETTERS)
    before = client.xlen(STREAM)
    replayed = await asyncio.gather(*(replay(bus, letter) for _ in range(5)))
    assert len({one for one in replayed if one is not None}) == 1
    assert client.xlen(STREAM) == before + 1


async def test_query_same_key_is_accepted_once(server: Server, client: redis.Redis) -> None:
    """Two gateways are asked the same at the same time, and again later."""
    async with open_bus(server, "gateway/1") as one, open_bus(server, "gateway/2") as other:
        asked = [accept_query(bus, "k1", "s") for _ in range(10) for bus in (one, other)]
        answers = [*await asyncio.gather(*asked), await accept_query(one, "k1", "s")]
        another = await accept_query(one, "k2", "s")
    accepted = [answer for answer in answers if answer is not None]
    assert len(accepted) == 21
    assert [answer.earlier for answer in accepted].count(None) == 1
    (query_id,) = {answer.query_id for answer in accepted}
    assert another is not None
    assert [entry_id for entry_id, _ in client.xrange(QUERY_RECEIVED.stream)] == [query_id, another.query_id]
