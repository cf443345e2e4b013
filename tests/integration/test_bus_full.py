"""While Redis is at its memory limit, accepted work waits, however long that takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import redis
from support.apps import ProbeSettings, probe
from support.services import announced, running

from shared.bus import Bus
from shared.participant.registry import Registry

HEARTBEAT = 0.05


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
            assert [one.state for one in await Registry(bus, heartbeat=0).replicas()] == ["ready"]
            raw.config_set("maxmemory", 0)
    finally:
        raw.config_set("maxmemory", 0)
