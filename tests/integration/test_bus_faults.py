"""Redis restarted, emptied or away, and networks that lose, delay and cut."""

from __future__ import annotations

import asyncio
import contextlib
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
from shared.bus import Bus, ConnectionLost, Delivery
from shared.errors import BusUnavailable
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


async def test_a_participant_starts_when_redis_comes_up_after_it(redis_server: EmbeddedRedis, tmp_path: Any) -> None:
    await asyncio.to_thread(redis_server.kill)
    settings = ProbeSettings(redis_url=redis_server.url, data_dir=tmp_path, heartbeat=0.5)
    async with running(probe, settings) as task:
        await asyncio.sleep(0.3)
        assert not task.done()
        await asyncio.to_thread(redis_server.start)
        await announced(redis_server.url, "probe")


@asynccontextmanager
async def through(url: str, **faults: Any) -> AsyncIterator[Proxy]:
    async with Proxy(url, **faults) as proxy:
        yield proxy


@pytest.mark.parametrize("how", ["drop", "cut"])
async def test_replies_are_never_given_to_another_command(redis_url: str, how: str) -> None:
    every = 5 if how == "drop" else 0
    async with through(redis_url, drop_every=every) as proxy, Bus(proxy.url, "test/1", timeout=0.2) as bus:

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.03)
                proxy.cut()

        cutting = asyncio.create_task(cut()) if how == "cut" else None

        async def echo(n: int) -> None:
            await asyncio.sleep(n % 40 / 100)
            assert await bus.link.call("ECHO", f"n{n}") == b"n%d" % n
            replies = await bus.link.pipe([("ECHO", f"a{n}"), ("ECHO", f"b{n}")])
            assert replies == [b"a%d" % n, b"b%d" % n]

        await asyncio.gather(*(echo(n) for n in range(400)))
        # on a busy machine these may have left in so few writes that nothing happened to any
        async with asyncio.timeout(60):
            while bus.link.generation == 1:
                await echo(0)
        if cutting is not None:
            cutting.cancel()


async def test_a_command_that_may_not_be_repeated_fails_when_its_reply_is_lost(
    redis_url: str, raw: redis.Redis
) -> None:
    async with through(redis_url) as proxy, Bus(proxy.url, "test/1", timeout=0.2) as bus:
        await bus.link.call("PING")
        proxy.drop_every = 1
        sending = asyncio.create_task(bus.link.call("INCR", "count", retry=False))
        await eventually(lambda: raw.get("count") == b"1")
        with pytest.raises(ConnectionLost):
            await sending
        proxy.drop_every = 0
        assert await bus.link.call("GET", "count") == b"1"


async def test_what_had_no_answer_is_sent_again_in_its_order(redis_url: str, raw: redis.Redis) -> None:
    async with through(redis_url) as proxy, Bus(proxy.url, "test/1", timeout=5.0) as bus:
        await bus.link.call("PING")
        proxy.freeze()
        sending = []
        for number in range(20):
            sending.append(asyncio.create_task(bus.link.call("RPUSH", "order", number)))
            # some in one write, some in later ones
            await asyncio.sleep(0 if number % 4 else 0.02)
        proxy.cut()
        proxy.thaw()
        await asyncio.gather(*sending)
    assert [int(number) for number in raw.lrange("order", 0, -1)] == list(range(20))


async def test_whoever_waits_on_a_connection_that_is_closed_is_told(redis_url: str) -> None:
    async with through(redis_url) as proxy:
        async with Bus(proxy.url, "test/1") as bus:
            await bus.link.call("PING")
            proxy.freeze()
            sent = asyncio.create_task(bus.link.call("GET", "sent"))
            await asyncio.sleep(0.05)
            proxy.cut()
            # no connection takes this one
            queued = asyncio.create_task(bus.link.call("GET", "queued"))
            await asyncio.sleep(0.05)
        for waiting in (sent, queued):
            with pytest.raises(BusUnavailable):
                await asyncio.wait_for(waiting, 5.0)
        with pytest.raises(BusUnavailable):
            await asyncio.wait_for(bus.link.call("GET", "late"), 5.0)


async def test_what_is_under_way_when_its_connection_is_closed_is_told(redis_url: str) -> None:
    async with through(redis_url) as proxy:
        async with Bus(proxy.url, "test/1") as bus:
            await bus.link.call("PING")
            proxy.freeze()
            waiting = [
                asyncio.create_task(bus.link.call("GET", "x")),
                asyncio.create_task(bus.link.pipe([("GET", "x"), ("GET", "y")])),
                asyncio.ensure_future(bus.link.commit([("SET", "x", "y")])),
            ]
            await asyncio.sleep(0.05)
        for one in waiting:
            with pytest.raises(BusUnavailable):
                await asyncio.wait_for(one, 5.0)


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


async def test_a_reply_lost_in_the_handshake_does_not_stall_the_connection(redis_url: str) -> None:
    async with through(redis_url) as proxy, Bus(proxy.url, "test/1", timeout=0.2) as bus:
        await bus.link.call("PING")
        for lost in (1, 2, 3):
            proxy._chunks = 0
            proxy.drop_every = lost
            proxy.cut()
            await eventually(lambda: proxy.dropped > 0)
            proxy.dropped = proxy.drop_every = 0
            assert await asyncio.wait_for(bus.link.call("ECHO", "x"), 3.0) == b"x"


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


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", "cut"])
async def test_a_thousand_tool_calls_over_a_bad_network_are_answered_and_run_once(
    fault: str, redis_url: str, raw: redis.Redis, tmp_path: Any
) -> None:
    async with through(redis_url, drop_every=10 if fault == "drop" else 0) as proxy:
        settings = ProbeSettings(
            redis_url=proxy.url,
            effects_url=redis_url,
            data_dir=tmp_path,
            concurrency=32,
            # each reply that is lost is missed for so long
            redis_timeout=0.25,
        )

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.05)
                proxy.cut()

        cutting = asyncio.create_task(cut()) if fault == "cut" else None
        async with (
            running(probe, settings),
            running(probe, settings),
            open_context("asker", settings) as context,
        ):
            client = ToolClient(context)
            await announced(redis_url, "probe", replicas=2, timeout=20)
            await eventually(client.schemas, timeout=10)
            limit = asyncio.Semaphore(64)

            async def ask(n: int) -> None:
                async with limit:
                    answer = await client.call(
                        "probe", {"text": f"t{n}"}, call_id=f"c{n}", caller=Caller("1-1"), timeout=50
                    )
                    assert answer.result == f"you said t{n}"

            await asyncio.gather(*(ask(n) for n in range(1000)))
            stream = "local2:tool.request.probe"
            await eventually(lambda: raw.xpending(stream, "probe")["pending"] == 0, timeout=10)
            group = raw.xinfo_groups(stream)[0]
            assert group["lag"] in (0, None)
        if cutting is not None:
            cutting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cutting
        runs = {name.decode(): int(count) for name, count in raw.hgetall("effects").items()}
        assert runs == {f"t{n}": 1 for n in range(1000)}
        assert raw.xlen("local2:dead.letter") == 0
        assert (proxy.dropped if fault == "drop" else proxy.connections) > 20
