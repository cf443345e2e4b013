"""Hosts' clocks that differ change nothing but what is displayed."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP
from support.consuming import STREAM as WORK
from support.services import running
from support.waiting import eventually

from shared.bus import Bus
from shared.bus.clock import BusClock
from shared.bus.scripts import RENEW_CLAIMS
from shared.contracts import TOOL_REQUEST
from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient

STREAM = TOOL_REQUEST.for_tool("probe")


@pytest.fixture
def probing(redis_url: str, tmp_path: Path) -> ProbeSettings:
    return ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=1.0, concurrency=1)


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_call_asked_by_who_has_not_heard_yet_that_the_clock_of_the_bus_was_set_is_run(
    hours: int, probing: ProbeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks: list[BusClock] = []

    class Noted(BusClock):
        def __init__(self) -> None:
            super().__init__()
            clocks.append(self)

    monkeypatch.setattr("shared.bus.streams.BusClock", Noted)
    rarely = probing.model_copy(update={"heartbeat": 60})
    async with running(probe, probing), open_context("asker", rarely) as context:
        client = ToolClient(context)
        await eventually(client.schemas)
        right = context.bus.now_ms() - time.monotonic_ns() // 1_000_000
        for clock in clocks:
            clock._offset += hours * 3_600

        def heard() -> bool:
            wrong = [abs(clock.now_ms() - time.monotonic_ns() // 1_000_000 - right) for clock in clocks]
            return len(wrong) == 2 and min(wrong) < 5_000

        # the worker has, at its next heartbeat; who asks has not
        await eventually(heard)

        async def offered() -> bool:
            # a sign of life by the wrong clock counted for nothing
            await context.registry.replicas(fresh=True)
            return await context.registry.served("probe") is not None

        await eventually(offered)
        caller = Caller("1-1", deadline=context.bus.now_ms() + 10_000)
        answer = await client.call("probe", {"text": "x"}, call_id="c", caller=caller, timeout=10, attempt=1)
    assert (answer.result, answer.error) == ("you said x", None)


def test_the_bus_clock_is_what_the_server_says() -> None:
    clock = BusClock()
    assert abs(clock.now_ms() - time.time_ns() // 1_000_000) < 5_000
    clock.learn([b"1000", b"500000"], time.monotonic())
    assert 1_000_400 < clock.now_ms() < 1_010_000
    # a reply that was long on its way says little, unless the clock was set
    clock.learn([b"999", b"600000"], time.monotonic() - 1.0)
    assert clock.now_ms() > 1_000_400
    clock.learn([b"9000", b"0"], time.monotonic() - 1.0)
    assert clock.now_ms() > 9_000_000


def crc(data: bytes) -> int:
    """What a dumped value ends with: CRC-64/REDIS (https://reveng.sourceforge.io/crc-catalogue/17plus.htm)."""
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x95AC9329AC4BC9B5 if value & 1 else 0)
    return value


def put_ahead(raw: redis.Redis, stream: str, ms: int) -> None:
    """Every claim on a stream is as if the server's clock had gone back since. No command of Redis can do that."""
    dumped: bytes = raw.dump(stream)[:-8]
    for group in raw.xinfo_stream(stream, full=True)["groups"]:
        for _, _, delivered, _ in group["pending"]:
            dumped = dumped.replace(struct.pack("<q", delivered), struct.pack("<q", delivered + ms))
    raw.restore(stream, 0, dumped + struct.pack("<Q", crc(dumped)), replace=True)


async def test_a_claim_that_lies_ahead_of_the_servers_clock_is_of_now_after_a_heartbeat_of_anybody(
    bus: Bus, raw: redis.Redis
) -> None:
    raw.xgroup_create(WORK, GROUP, "0", mkstream=True)
    ids = [raw.xadd(WORK, {"payload": n}).decode() for n in range(3)]
    raw.xreadgroup(GROUP, "dead", {WORK: ">"}, count=1)
    raw.xreadgroup(GROUP, "silent", {WORK: ">"}, count=1)
    raw.xreadgroup(GROUP, "r1", {WORK: ">"})
    put_ahead(raw, WORK, 3_600_000)
    raw.xclaim(WORK, GROUP, "silent", 0, [ids[1]], idle=60_000, justid=True)

    def ago() -> list[tuple[str, str, int, int]]:
        """Who has each entry, for how many minutes, and how often it was delivered."""
        seconds, _ = raw.time()
        (group,) = raw.xinfo_stream(WORK, full=True)["groups"]
        return [
            (entry_id.decode(), owner.decode(), round((seconds - delivered / 1000) / 60), count)
            for entry_id, owner, delivered, count in group["pending"]
        ]

    before = [(ids[0], "dead", -60, 1), (ids[1], "silent", 1, 1), (ids[2], "r1", -60, 1)]
    assert ago() == before
    await bus.link.call(*RENEW_CLAIMS((WORK,), GROUP, "r1", "heir", 600_000))
    # what is held by whoever asks is renewed when it is named
    assert ago() == [(ids[0], "dead", 0, 1), *before[1:]]
