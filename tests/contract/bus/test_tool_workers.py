"""What becomes of a tool call when its worker dies, stops or stalls, and when its query is cancelled."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import redis
from contract.bus.calling import HEARTBEAT, REQUESTS, RESULTS, Callers, Effects, request
from contract.bus.servers import Server, network
from contract.bus.surface import DEAD_LETTERS, PREFIX, ToolResultMessage, encode, key, open_bus, result_key, url_of
from support.services import announced, child
from support.waiting import eventually


def pending(client: redis.Redis) -> int:
    return int(client.xpending(REQUESTS.stream, "probe")["pending"])


# ── a worker that dies ───────────────────────────────────────────────────────────────────────────────────────────


async def test_tool_worker_killed_mid_call_is_replaced(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.asker(server) as asker, callers.process(server) as doomed:
        call = asyncio.create_task(asker.ask("hello", seconds=0.5, timeout=60))
        await eventually(lambda: effects.runs("hello") == 1)
        doomed.process.kill()
        async with callers.worker(server):
            answer = await call
            await eventually(lambda: pending(client) == 0)
    assert answer.result == "you said hello"
    assert effects.runs("hello") == 2
    assert client.xlen(RESULTS.stream) == 1


async def test_tool_worker_killed_after_answer_runs_once(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    """The worker is killed before it learns that its answer and acknowledgement were written."""
    async with network(server) as net, callers.asker(server) as asker:
        async with callers.process(net, LOCAL2_HEARTBEAT="1") as doomed:
            call = asyncio.create_task(asker.ask("hello", seconds=0.3, timeout=60))
            await eventually(lambda: effects.runs("hello") == 1)
            net.set(drop_every=1)
            await eventually(lambda: client.exists(result_key("probe", "c1")))
            doomed.process.kill()
            # in a cluster, all clients come through the network
            net.set()
        async with callers.worker(server):
            assert (await call).result == "you said hello"
            assert (await asker.ask("hello", attempt=2)).result == "you said hello"
            await eventually(lambda: pending(client) == 0)
    assert effects.runs("hello") == 1
    assert client.xlen(RESULTS.stream) == 1


async def test_tool_worker_died_before_ack_answer_is_reused(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    """A worker of another kind (docs/worker-protocol.md) stored its result, and died before the acknowledgement."""
    client.xgroup_create(REQUESTS.stream, "probe", "0", mkstream=True)
    async with callers.asker(server) as asker:
        await asker.bus.publish(REQUESTS.of(request("c1", "hello")))
        assert client.xreadgroup("probe", "dead", {REQUESTS.stream: ">"})
        stored = ToolResultMessage(query_id="1-1", call_id="c1", tool="probe", result="the first", duration_ms=1)
        client.set(result_key("probe", "c1"), encode(stored), ex=60)
        async with callers.worker(server):
            await eventually(lambda: pending(client) == 0)
            assert (await asker.ask("hello", "c1", attempt=2)).result == "the first"
    assert effects.runs("hello") == 0


async def test_tool_worker_stopped_past_its_claim_is_fenced(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.asker(server) as asker, callers.process(server) as stalled:
        call = asyncio.create_task(asker.ask("hello", seconds=1.0, timeout=60))
        await eventually(lambda: effects.runs("hello") == 1)
        stalled.send(signal.SIGSTOP)
        async with callers.worker(server):
            assert (await call).result == "you said hello"
            stalled.send(signal.SIGCONT)
            # the stalled worker has gone on, and serves the next calls beside the other one
            await announced(url_of(server), "probe", replicas=2)
            await eventually(lambda: effects.ended("hello") == 2)
            stalled.send(signal.SIGTERM)
            assert await stalled.ended() == 0
    assert client.xlen(RESULTS.stream) == 1


async def test_tool_worker_told_to_stop_finishes_its_call(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.asker(server) as asker, callers.process(server) as leaving:
        call = asyncio.create_task(asker.ask("hello", seconds=0.5))
        await eventually(lambda: effects.runs("hello") == 1)
        leaving.send(signal.SIGTERM)
        assert (await call).result == "you said hello"
        assert await leaving.ended() == 0
    assert client.xinfo_consumers(REQUESTS.stream, "probe") == []
    assert list(client.scan_iter(f"{PREFIX}replica:probe:*")) == []
    assert list(client.scan_iter(f"{PREFIX}inbox:probe:*")) == []


async def test_tool_worker_killed_leaves_keys_that_expire(
    server: Server, callers: Callers, client: redis.Redis
) -> None:
    async with callers.process(server) as doomed:
        names = [*client.scan_iter(f"{PREFIX}inbox:probe:*"), *client.scan_iter(f"{PREFIX}replica:probe:*")]
        doomed.process.kill()
        await doomed.ended()
    # -1: it does not expire; -2: it has expired
    left_ms = [client.pttl(name) for name in names]
    assert left_ms
    assert all(left == -2 or 0 <= left <= 60_000 for left in left_ms)


async def test_tool_call_that_kills_workers_ends_with_an_error(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    """The request is dead-lettered, and its caller is told why."""
    url = url_of(server)
    names = {"LOCAL2_EFFECTS_URL": effects.url, "LOCAL2_MAX_DELIVERIES": "2"}
    async with callers.asker(server) as asker:
        async with callers.process(server, LOCAL2_MAX_DELIVERIES="2") as first:
            call = asyncio.create_task(asker.ask("deadly", lethal=True, timeout=120))
            assert await first.ended() == -signal.SIGKILL
        with child("probe", url, **names) as second:
            assert await second.ended(20) == -signal.SIGKILL
        with child("probe", url, **names):
            answer = await call
            assert (await asker.ask("harmless", "c2", timeout=60)).result == "you said harmless"
    assert answer.error is not None
    assert "deliver" in answer.error
    assert answer.result == f"[tool error: {answer.error}]"
    assert effects.runs("deadly") == 2
    assert client.xlen(DEAD_LETTERS) == 1


async def test_tool_request_that_cannot_be_read_blocks_no_other(
    server: Server, callers: Callers, client: redis.Redis
) -> None:
    async with callers.both(server) as asker:
        for payload in ("{", "[]", '{"call_id": 1}'):
            client.xadd(REQUESTS.stream, {"payload": payload})
        client.set(key("text"), "not a stream")
        await asker.bus.publish(REQUESTS.of(request("odd", "x", reply_to=key("text"))))
        assert (await asker.ask("good", "c2")).result == "you said good"
        await eventually(lambda: pending(client) == 0)
        await eventually(lambda: client.xlen(DEAD_LETTERS) >= 3)
        # a call whose answer cannot be delivered has a stored result all the same
        assert client.exists(result_key("probe", "odd"))


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────


async def stopped_within(callers: Callers, effects: Effects, server: Server, *, orphaned: bool) -> float:
    """Return the seconds from a cancellation to the end of the run. A busy machine alone makes one of them long."""
    best = float("inf")
    async with callers.both(server) as asker:
        for number in range(4):
            text, query_id = f"doomed {number}", f"{number + 1}-1"
            with callers.asker_process(server, text, text, query_id, timeout=120, seconds=60) as owner:
                await eventually(lambda text=text: effects.runs(text) == 1)
                if orphaned:
                    owner.process.kill()
                    owner.process.wait()
                started = time.monotonic()
                await asker.cancel(query_id)
                await eventually(lambda text=text: effects.ended(text) == 1)
                best = min(best, time.monotonic() - started)
                if not orphaned:
                    answer = await eventually(lambda text=text: effects.answer(text))
                    assert answer.error == "cancelled"
            if best < 1.0:
                break
    return best


@pytest.mark.parametrize("orphaned", [False, True], ids=["owner lives", "owner died"])
async def test_tool_call_cancelled_stops_within_a_second(
    orphaned: bool, server: Server, callers: Callers, effects: Effects
) -> None:
    assert await stopped_within(callers, effects, server, orphaned=orphaned) < 1.0


async def test_tool_call_cancelled_leaves_other_queries_alone(
    server: Server, callers: Callers, effects: Effects
) -> None:
    async with callers.both(server) as asker:
        doomed = asyncio.create_task(asker.ask("doomed", "c1", query_id="1-1", seconds=60, timeout=120))
        other = asyncio.create_task(asker.ask("other", "c2", query_id="2-2", seconds=0.5, timeout=60))
        await eventually(lambda: effects.runs("doomed") == 1 and effects.runs("other") == 1)
        await asker.cancel("1-1")
        assert (await doomed).error == "cancelled"
        assert (await other).result == "you said other"


async def test_tool_call_cancelled_in_queue_is_not_begun(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.both(server, concurrency=1) as asker:
        first = asyncio.create_task(asker.ask("first", "c1", query_id="1-1", seconds=1.0))
        await eventually(lambda: effects.runs("first") == 1)
        second = asyncio.create_task(asker.ask("second", "c2", query_id="2-2"))
        await eventually(lambda: client.xlen(REQUESTS.stream) == 2)
        await asker.cancel("2-2")
        assert ((await second).error, (await first).error) == ("cancelled", None)
    assert effects.runs("second") == 0


async def test_tool_call_cancelled_before_worker_comes_not_begun(
    server: Server, callers: Callers, effects: Effects
) -> None:
    async with open_bus(server) as bus, callers.asker(server) as asker:
        for query_id in ("1-1", "2-2"):
            await bus.publish(REQUESTS.of(request(query_id, query_id, query_id)))
        await asker.cancel("1-1")
        async with callers.worker(server):
            await eventually(lambda: effects.runs("2-2") == 1)
            assert (await asker.ask("last", "c3", query_id="3-3")).error is None
    assert effects.all_runs() == {"2-2": 1, "last": 1}


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tool_worker_is_offered_within_two_heartbeats(server: Server, callers: Callers) -> None:
    async with callers.asker(server) as asker:
        assert await asker.client.schemas() == {}
        async with callers.worker(server):
            schemas = await eventually(asker.client.schemas, 10 * HEARTBEAT)
    assert schemas["probe"]["function"]["parameters"]["required"] == ["text"]
