"""While Redis is at its memory limit, accepted work waits, however long that takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM, consuming
from support.services import announced, running
from support.waiting import eventually

from shared.bus import Bus, Delivery
from shared.contracts import DEAD_LETTER
from shared.participant.registry import Registry

HEARTBEAT = 0.05


def add(raw: redis.Redis) -> str:
    return str(raw.xadd(STREAM, {"payload": "1"}).decode())


async def test_an_entry_is_not_given_up_because_redis_was_full_for_many_deliveries(
    redis_url: str, raw: redis.Redis
) -> None:
    tried: list[int] = []

    async def handler(delivery: Delivery) -> list[Any]:
        tried.append(delivery.deliveries)
        if len(tried) == 1:
            raw.config_set("maxmemory", 1)
        return [("XADD", "effects", "*", "by", delivery.entry_id)]

    try:
        async with consuming(redis_url, handler, heartbeat=HEARTBEAT, max_deliveries=2):
            add(raw)
            await eventually(lambda: tried)
            # longer than two deliveries, three heartbeats each
            await asyncio.sleep(12 * HEARTBEAT)
            assert raw.xpending(STREAM, GROUP)["pending"] == 1
            raw.config_set("maxmemory", 0)
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
            assert raw.xlen("effects") == 1
    finally:
        raw.config_set("maxmemory", 0)
    assert tried == [1]
    assert raw.xlen(DEAD_LETTER.stream) == 0


async def test_a_handler_that_meets_a_full_redis_itself_is_called_again(redis_url: str, raw: redis.Redis) -> None:
    tried: list[int] = []
    held: list[Bus] = []

    async def handler(delivery: Delivery) -> list[Any]:
        tried.append(delivery.deliveries)
        if len(tried) == 1:
            raw.config_set("maxmemory", 1)
        await held[0].link.call("SET", "written", "by the handler")
        return []

    try:
        async with (
            Bus(redis_url, "test/handler") as writing,
            consuming(redis_url, handler, heartbeat=HEARTBEAT, max_deliveries=2),
        ):
            held.append(writing)
            add(raw)
            await eventually(lambda: len(tried) >= 12)
            raw.config_set("maxmemory", 0)
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    finally:
        raw.config_set("maxmemory", 0)
    assert raw.get("written") == b"by the handler"
    assert set(tried) == {1}


async def test_a_replica_that_leaves_while_redis_is_full_hands_the_entry_over(redis_url: str, raw: redis.Redis) -> None:
    tried = asyncio.Event()

    async def full(delivery: Delivery) -> list[Any]:
        raw.config_set("maxmemory", 1)
        tried.set()
        return [("SET", "written", "once")]

    async def done(_delivery: Delivery) -> list[Any]:
        return [("SET", "written", "once")]

    try:
        async with consuming(redis_url, full, heartbeat=HEARTBEAT, drain=0.2):
            entry = add(raw)
            await asyncio.wait_for(tried.wait(), 5)
        held = raw.xpending_range(STREAM, GROUP, "-", "+", 10)
        assert [row["message_id"].decode() for row in held] == [entry]
        raw.config_set("maxmemory", 0)
        async with consuming(redis_url, done, replica="r2", heartbeat=HEARTBEAT):
            await eventually(lambda: raw.get("written") == b"once")
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    finally:
        raw.config_set("maxmemory", 0)


async def test_a_replica_is_not_taken_for_dead_while_redis_is_full(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=HEARTBEAT, drain=2.0)
    try:
        async with running(probe, settings), Bus(redis_url, "test/looking") as bus:
            await announced(redis_url, "probe")
            # nothing has more than its share of so much
            raw.config_set("maxmemory", raw.info("memory")["used_memory"] // 2)
            # an announcement is good for three heartbeats, or a second where it is only renewed
            await asyncio.sleep(2.5)
            assert [one.state for one in await Registry(bus, freshness=0).replicas()] == ["ready"]
            raw.config_set("maxmemory", 0)
    finally:
        raw.config_set("maxmemory", 0)
