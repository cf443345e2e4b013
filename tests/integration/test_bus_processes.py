"""Replicas as processes of their own: killed, stopped, continued and told to leave."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import redis
from support.services import announced, child
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.contracts import RESPONSE_GENERATION, USER_FEEDBACK, ResponseGeneration

STREAM = RESPONSE_GENERATION.stream
GROUP = "judge"
RESPONSE = ResponseGeneration(
    query_id="1-1",
    response_id="1-1:A",
    session_id="s",
    user_id="u",
    respondent_id="A",
    generator_id="g",
    query="q",
    answer="a",
    model="m",
    finish_reason="stop",
)


async def publish(url: str, count: int) -> list[str]:
    async with Bus(url, "test/1") as bus:
        return await bus.publish(*[RESPONSE_GENERATION.of(RESPONSE)] * count)


def pending(raw: redis.Redis) -> int:
    return int(raw.xpending(STREAM, GROUP)["pending"])


def judged(raw: redis.Redis) -> int:
    return int(raw.get("judged") or 0)


async def test_a_killed_replicas_entries_are_taken_over_and_published_once(redis_url: str, raw: redis.Redis) -> None:
    with child("judge", redis_url, SECONDS="0.5") as doomed:
        await announced(redis_url, "judge")
        await publish(redis_url, 5)
        await eventually(lambda: judged(raw) == 5)
        doomed.send(signal.SIGKILL)
        assert await doomed.ended() == -signal.SIGKILL
    assert raw.xlen(USER_FEEDBACK.stream) == 0
    with child("judge", redis_url):
        await eventually(lambda: raw.xlen(USER_FEEDBACK.stream) == 5, timeout=10)
        await eventually(lambda: pending(raw) == 0)
    assert judged(raw) == 10


async def test_a_replica_stopped_past_its_claim_publishes_nothing_when_it_goes_on(
    redis_url: str, raw: redis.Redis
) -> None:
    with child("judge", redis_url, SECONDS="0.4") as zombie:
        await announced(redis_url, "judge")
        await publish(redis_url, 3)
        await eventually(lambda: judged(raw) == 3)
        zombie.send(signal.SIGSTOP)
        with child("judge", redis_url):
            await eventually(lambda: raw.xlen(USER_FEEDBACK.stream) == 3, timeout=10)
            zombie.send(signal.SIGCONT)
            await announced(redis_url, "judge", replicas=2)
            zombie.send(signal.SIGTERM)
            assert await zombie.ended() == 0
            assert raw.xlen(USER_FEEDBACK.stream) == 3
            assert len(raw.xinfo_consumers(STREAM, GROUP)) == 1


async def test_a_replica_told_to_leave_hands_over_what_it_cannot_finish(redis_url: str, raw: redis.Redis) -> None:
    with child("judge", redis_url, SECONDS="60", LOCAL2_DRAIN="0.2") as leaving:
        await announced(redis_url, "judge")
        ids = await publish(redis_url, 3)
        await eventually(lambda: judged(raw) == 3)
        leaving.send(signal.SIGTERM)
        assert await leaving.ended() == 0
    rows: list[dict[str, Any]] = raw.xpending_range(STREAM, GROUP, "-", "+", 10)
    assert [(row["message_id"].decode(), row["consumer"], row["times_delivered"]) for row in rows] == [
        (entry_id, b"handover", 0) for entry_id in ids
    ]
    assert all(row["time_since_delivered"] > 600 for row in rows)
    with child("judge", redis_url):
        await eventually(lambda: raw.xlen(USER_FEEDBACK.stream) == 3, timeout=10)


async def test_a_replica_told_to_leave_while_idle_leaves_nothing_behind(redis_url: str, raw: redis.Redis) -> None:
    with child("judge", redis_url) as leaving:
        await announced(redis_url, "judge")
        await publish(redis_url, 3)
        await eventually(lambda: raw.xlen(USER_FEEDBACK.stream) == 3)
        leaving.send(signal.SIGTERM)
        assert await leaving.ended(5.0) == 0
    assert raw.xinfo_consumers(STREAM, GROUP) == []
    assert raw.keys("local2:replica:*") == []
    assert raw.keys("local2:inbox:judge:*") == []


async def test_a_process_told_to_leave_ends_while_redis_is_away(redis_server: EmbeddedRedis) -> None:
    with child("judge", redis_server.url, LOCAL2_DRAIN="0.5") as leaving:
        await announced(redis_server.url, "judge")
        await asyncio.to_thread(redis_server.kill)
        leaving.send(signal.SIGTERM)
        assert await leaving.ended(10.0) == 0


async def test_a_process_that_waits_for_redis_can_be_told_to_leave(redis_server: EmbeddedRedis) -> None:
    await asyncio.to_thread(redis_server.kill)
    with child("judge", redis_server.url, LOCAL2_DRAIN="0.5", LOCAL2_LOG_LEVEL="warning") as waiting:
        status = Path(f"/proc/{waiting.process.pid}/status")

        def listens() -> bool:
            """Whether it catches SIGTERM by now."""
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
            return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))

        await eventually(listens, 20, "the process is up")
        await asyncio.sleep(0.5)
        assert waiting.process.poll() is None
        waiting.send(signal.SIGTERM)
        assert await waiting.ended(8.0) == 0
