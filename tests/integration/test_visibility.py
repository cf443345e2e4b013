"""One setting, the heartbeat, decides when a silent replica counts as dead: everywhere alike."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM, Recorder, consuming
from support.services import announced, running
from support.waiting import eventually

from shared.bus import Bus
from shared.bus.keys import JANITOR, REPLICAS, replica_key
from shared.participant.registry import Registry, ReplicaInfo, announcing

MISSED = 3


@pytest.mark.parametrize("heartbeat", [0.2, 0.5])
async def test_silent_consumer_loses_its_entry_after_the_timeout(
    heartbeat: float, redis_url: str, raw: redis.Redis
) -> None:
    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    raw.xadd(STREAM, {"payload": "x"})
    recorder, loop = Recorder(), asyncio.get_running_loop()
    started = loop.time()
    raw.xreadgroup(GROUP, "silent", {STREAM: ">"})
    async with consuming(redis_url, recorder, heartbeat=heartbeat):
        await eventually(lambda: recorder.seen)
    # At most one heartbeat until the timeout is noticed, and some time for a busy machine.
    assert MISSED * heartbeat * 0.95 <= loop.time() - started < (MISSED + 1) * heartbeat + 1.0


@pytest.mark.parametrize("heartbeat", [0.4, 1.0])
async def test_registry_entry_and_lease_expire_by_the_timeout(
    heartbeat: float, redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    timeout_ms = MISSED * heartbeat * 1000
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=heartbeat, drain=0.2)
    async with running(probe, settings):
        await announced(redis_url, "probe")
        (member,) = raw.zrange(REPLICAS, 0, -1)
        key = replica_key(*member.decode().split("/", 1))
        # Renewed with every heartbeat, so that at least two of three remain.
        await eventually(lambda: timeout_ms - heartbeat * 1000 <= raw.pttl(key) <= timeout_ms)
        # The janitor's rounds are five heartbeats apart: its lease lasts three rounds.
        await eventually(lambda: timeout_ms * 4 < raw.pttl(JANITOR) <= timeout_ms * 5)


@pytest.mark.parametrize("heartbeat", [0.2, 0.4])
async def test_registry_presumes_replicas_alive_after_a_pause(heartbeat: float, bus: Bus, raw: redis.Redis) -> None:
    registry, loop = Registry(bus, heartbeat), asyncio.get_running_loop()
    info = ReplicaInfo("probe", "r1", "ready", 1, bus.now_ms())
    await bus.link.pipe(announcing(info, 60_000))
    assert await registry.replicas(fresh=True) == [info]
    # A gap in the registry's observations; meanwhile the entry expires.
    await asyncio.sleep(MISSED * heartbeat)
    raw.delete(replica_key("probe", "r1"))
    paused = loop.time()
    assert await registry.replicas(fresh=True) == [info]

    async def gone() -> bool:
        return await registry.replicas(fresh=True) == []

    await eventually(gone)
    # As long as the pause was, and then the timeout.
    assert 2 * MISSED * heartbeat * 0.95 <= loop.time() - paused < 2 * MISSED * heartbeat + 2.0
