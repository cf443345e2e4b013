"""Redis restarted, emptied or away, and networks that lose, delay and cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM, Recorder, consuming
from support.proxy import Proxy
from support.services import announced, running
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus, Delivery
from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient


@pytest.fixture
def own(redis_server: EmbeddedRedis) -> Any:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


def restart(server: EmbeddedRedis) -> None:
    server.kill()
    server.start()


async def test_a_redis_killed_and_restarted_under_load_loses_nothing_accepted(
    redis_server: EmbeddedRedis, own: redis.Redis
) -> None:
    accepted: list[str] = []
    first, second = Recorder(0.005), Recorder(0.005)
    async with (
        consuming(redis_server.url, first, replica="r1", heartbeat=0.1),
        consuming(redis_server.url, second, replica="r2", heartbeat=0.1),
        Bus(redis_server.url, "test/publisher") as publisher,
    ):
        publishing = True

        async def publish() -> None:
            while publishing:
                reply = await publisher.link.call("XADD", STREAM, "*", "payload", "x")
                accepted.append(reply.decode())
                await asyncio.sleep(0.001)

        task = asyncio.create_task(publish())
        await eventually(lambda: len(accepted) > 50)
        for _ in range(2):
            await asyncio.to_thread(restart, redis_server)
            before = len(first.seen) + len(second.seen)
            await eventually(lambda: len(first.seen) + len(second.seen) > before + 20)  # noqa: B023
        publishing = False
        await task
        await eventually(lambda: set(accepted) <= {*first.seen, *second.seen})
        await eventually(lambda: own.xpending(STREAM, GROUP)["pending"] == 0)


async def test_after_a_flush_the_groups_are_there_again_and_work_goes_on(redis_url: str, raw: redis.Redis) -> None:
    first, second = Recorder(), Recorder()
    async with consuming(redis_url, first, replica="r1"), consuming(redis_url, second, replica="r2"):
        for turn in range(3):
            raw.xadd(STREAM, {"payload": "before"})
            await eventually(lambda: len(first.seen) + len(second.seen) == 2 * turn + 1)  # noqa: B023
            raw.flushall()
            raw.xadd(STREAM, {"payload": "after"})
            await eventually(lambda: len(first.seen) + len(second.seen) == 2 * turn + 2)  # noqa: B023
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)


async def test_a_flush_in_the_middle_of_work_stops_no_participant(redis_url: str, raw: redis.Redis) -> None:
    slow = Recorder(0.5)
    async with consuming(redis_url, slow, heartbeat=0.1):
        raw.xadd(STREAM, {"payload": "x"})
        await eventually(lambda: slow.now == 1)
        raw.flushall()
        await eventually(lambda: slow.now == 0)
        raw.xadd(STREAM, {"payload": "y"})
        await eventually(lambda: len(slow.seen) == 2 and slow.now == 0)
        await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)


async def test_tools_answer_by_message_again_after_a_flush(
    redis_url: str, raw: redis.Redis, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look = ToolClient._look

    async def looking(client: ToolClient, call: Any) -> None:
        looked.append(call.call_id)
        await look(client, call)

    monkeypatch.setattr(ToolClient, "_look", looking)
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5)
    async with running(probe, settings), open_context("asker", settings) as context:
        client = ToolClient(context)
        await announced(redis_url, "probe")

        async def answered(n: int) -> bool:
            """By message, and not by looking the stored result up."""
            answer = await client.call("probe", {"text": f"t{n}"}, call_id=f"c{n}", caller=Caller("1-1"), timeout=3)
            assert answer.result == f"you said t{n}" or "unavailable" in answer.result or "unknown" in answer.result
            return answer.error is None and f"c{n}" not in looked

        await answered(0)
        raw.flushall()
        n = 1
        async with asyncio.timeout(60):
            while not await answered(n):
                n += 1


async def test_redis_away_at_the_start_is_waited_for(redis_server: EmbeddedRedis, own: redis.Redis) -> None:
    recorder = Recorder()
    await asyncio.to_thread(redis_server.kill)
    async with consuming(redis_server.url, recorder):
        await asyncio.sleep(0.3)
        await asyncio.to_thread(redis_server.start)
        own.xadd(STREAM, {"payload": "x"})
        await eventually(lambda: recorder.seen)


@asynccontextmanager
async def through(url: str, **faults: Any) -> AsyncIterator[Proxy]:
    async with Proxy(url, **faults) as proxy:
        yield proxy


async def test_what_a_lost_reply_held_is_taken_up_and_uses_up_no_delivery(redis_url: str, raw: redis.Redis) -> None:
    recorder = Recorder()
    recorder.gate = asyncio.Event()
    async with through(redis_url) as proxy, consuming(proxy.url, recorder, timeout=0.2, heartbeat=30.0) as consumer:
        await eventually(lambda: raw.exists(STREAM) and raw.xinfo_groups(STREAM))
        proxy.freeze()
        ids = [raw.xadd(STREAM, {"payload": "x"}, id=f"{number}-1").decode() for number in (1, 2)]
        # read by this replica, which never sees the reply
        raw.xreadgroup(GROUP, "r1", {STREAM: ">"})
        proxy.cut()
        proxy.thaw()
        await eventually(lambda: recorder.seen == ids)
        assert [row["times_delivered"] for row in raw.xpending_range(STREAM, GROUP, "-", "+", 10)] == [1, 1]
        recorder.gate.set()
        await eventually(lambda: consumer.handled == 2)
    assert recorder.deliveries == [1, 1]


async def test_a_write_that_outlived_its_claim_in_a_dead_network_is_not_made(redis_url: str, raw: redis.Redis) -> None:
    go = asyncio.Event()

    async def slow(delivery: Delivery) -> list[Any]:
        await go.wait()
        return [("RPUSH", "effects", "late")]

    async def fresh(delivery: Delivery) -> list[Any]:
        return [("RPUSH", "effects", "fresh")]

    async with through(redis_url) as proxy:
        async with consuming(proxy.url, slow, replica="cut-off", timeout=0.3) as consumer:
            raw.xadd(STREAM, {"payload": "x"})
            await eventually(lambda: consumer.held)
            proxy.freeze()
            proxy.cut()
            go.set()
            async with consuming(redis_url, fresh, replica="healthy"):
                await eventually(lambda: raw.lrange("effects", 0, -1) == [b"fresh"])
                proxy.thaw()
                await eventually(lambda: raw.client_list() and any("cut-off" in c["name"] for c in raw.client_list()))
                await asyncio.sleep(0.5)
        assert raw.lrange("effects", 0, -1) == [b"fresh"]
