"""What a caller of a tool is promised: its own result or a clear error, in time, whatever happens to the worker."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import redis
from contract.bus.calling import REQUESTS, RESULTS, Callers, Effects, request
from contract.bus.servers import Server
from contract.bus.surface import PREFIX, Caller, ToolResultMessage, encode, result_key
from support.waiting import eventually

# The answer to a call that no worker runs is expected within this time, in seconds: far less than any timeout here.
AT_ONCE = 5.0


async def test_tool_call_is_answered_with_text_data_and_ids(server: Server, callers: Callers) -> None:
    async with callers.both(server) as asker:
        answer = await asker.ask("hello", "c1", query_id="1-1")
    assert (answer.result, answer.error, answer.data) == ("you said hello", None, {"text": "hello"})
    assert (answer.query_id, answer.call_id, answer.tool, answer.session_id) == ("1-1", "c1", "probe", "s")


async def test_tool_calls_concurrent_get_their_own_results(server: Server, callers: Callers, effects: Effects) -> None:
    async with callers.worker(server, concurrency=16), callers.asker(server) as one, callers.asker(server) as other:
        asked = [
            asker.ask(f"{name} {n}", f"{name} {n}", seconds=(n % 7) / 50, timeout=60)
            for n in range(100)
            for name, asker in (("one", one), ("other", other))
        ]
        answers = await asyncio.gather(*asked)
    expected = [f"you said {name} {n}" for n in range(100) for name in ("one", "other")]
    assert [answer.result for answer in answers] == expected
    assert set(effects.all_runs().values()) == {1}


async def test_tool_result_names_its_requests_entry(server: Server, callers: Callers, client: redis.Redis) -> None:
    async with callers.both(server) as asker:
        answer = await asker.ask("hello")
        await eventually(lambda: client.xlen(RESULTS.stream) == 1)
        ((entry_id, published),) = client.xrange(RESULTS.stream)
        assert json.loads(published["payload"])["request_id"] == answer.request_id
        assert (published["causation_id"], published["correlation_id"]) == (answer.request_id, "1-1")
        assert entry_id != answer.request_id


async def test_tool_call_with_large_arguments_and_result(server: Server, callers: Callers, client: redis.Redis) -> None:
    text = "y" * 4_000_000
    async with callers.both(server) as asker:
        large, small = await asyncio.gather(asker.ask(text, "c1", size=4_000_000, timeout=60), asker.ask("small", "c2"))
    assert large.error is None
    assert large.result == f"you said {text}" + "x" * 4_000_000
    assert small.result == "you said small"


# ── the same call again ──────────────────────────────────────────────────────────────────────────────────────────


async def test_tool_call_repeated_id_gets_the_stored_result(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.both(server) as asker:
        first = await asker.ask("hello")
        for _ in range(3):
            assert await asker.ask("hello") == first
    assert effects.runs("hello") == 1
    assert client.xlen(RESULTS.stream) == 1


async def test_tool_call_repeated_id_gets_the_stored_error(server: Server, callers: Callers, effects: Effects) -> None:
    async with callers.both(server) as asker:
        first = await asker.ask("hello", fail="search failed: 503")
        assert await asker.ask("hello", fail="search failed: 503") == first
    assert first.error == "search failed: 503"
    assert effects.runs("hello") == 1


async def test_tool_call_duplicates_at_once_run_once(server: Server, callers: Callers, effects: Effects) -> None:
    async with (
        callers.worker(server),
        callers.worker(server, replicas=2),
        callers.asker(server) as one,
        callers.asker(server) as other,
    ):
        asked = [asker.ask("hello", seconds=0.3) for asker in (one, one, one, other, other)]
        answers = await asyncio.gather(*asked)
    assert {answer.result for answer in answers} == {"you said hello"}
    assert effects.runs("hello") == 1


async def test_tool_calls_many_racing_duplicates_run_once(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with (
        callers.worker(server),
        callers.worker(server, replicas=2),
        callers.asker(server) as one,
        callers.asker(server) as other,
    ):
        asked = [asker.ask(f"t{n}", f"c{n}", timeout=60) for n in range(100) for asker in (one, other, one)]
        answers = await asyncio.gather(*asked)
        await eventually(lambda: client.xpending(REQUESTS.stream, "probe")["pending"] == 0)
    assert [answer.result for answer in answers] == [f"you said t{n}" for n in range(100) for _ in range(3)]
    assert effects.all_runs() == {f"t{n}": 1 for n in range(100)}
    assert client.xlen(RESULTS.stream) == 100


async def test_tool_call_answer_lost_with_caller_is_found(server: Server, callers: Callers, effects: Effects) -> None:
    """The caller dies while its call runs. The next one asks for the same call."""
    async with callers.worker(server), callers.asker(server) as successor:
        with callers.asker_process(server, "hello", "c1", seconds=0.5) as caller:
            await eventually(lambda: effects.runs("hello") == 1)
            caller.process.kill()
        answer = await successor.ask("hello", "c1", seconds=0.5, attempt=2)
    assert answer.result == "you said hello"
    assert effects.runs("hello") == 1


async def test_tool_result_is_kept_for_a_bounded_time(server: Server, callers: Callers, client: redis.Redis) -> None:
    async with callers.both(server) as asker:
        await asker.ask("hello", "small")
        await asker.ask("hello", "large", size=100_000)
    assert 3_600 < client.ttl(result_key("probe", "small")) <= 86_400
    assert 0 < client.ttl(result_key("probe", "large")) <= 3_600


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "error"),
    [
        pytest.param({}, "missing text argument", id="missing"),
        pytest.param({"text": ""}, "missing text argument", id="empty"),
        pytest.param({"text": "x", "seconds": "soon"}, "argument seconds: ", id="wrong type"),
        pytest.param({"text": ["x"]}, "argument text: ", id="list"),
    ],
)
async def test_tool_call_wrong_argument_is_named_in_error(
    args: dict[str, Any], error: str, server: Server, callers: Callers
) -> None:
    async with callers.both(server) as asker:
        answer = await asker.client.call("probe", args, call_id="c", caller=Caller("1-1"), timeout=10)
    assert answer.error is not None
    assert answer.error.startswith(error)
    assert answer.result == f"[tool error: {answer.error}]"


async def test_tool_error_is_a_text_for_the_model(server: Server, callers: Callers) -> None:
    async with callers.both(server) as asker:
        answer = await asker.ask("x", fail="search failed: 503")
    assert (answer.error, answer.result) == ("search failed: 503", "[tool error: search failed: 503]")


async def test_tool_call_of_unknown_tool_is_answered_at_once(
    server: Server, callers: Callers, client: redis.Redis
) -> None:
    async with callers.asker(server) as asker, asyncio.timeout(AT_ONCE):
        answer = await asker.client.call("nosuch", {}, call_id="c", caller=Caller("1-1"), timeout=60)
    assert answer.result == "[unknown tool: 'nosuch']"
    assert answer.error == "unknown tool: 'nosuch'"


async def test_tool_call_without_live_worker_is_answered_at_once(
    server: Server, callers: Callers, client: redis.Redis
) -> None:
    async with callers.worker(server):
        pass
    async with callers.asker(server) as asker, asyncio.timeout(AT_ONCE):
        answer = await asker.ask("x", timeout=60)
    assert (answer.error, answer.result) == ("tool unavailable", "[tool unavailable]")
    assert client.xlen(REQUESTS.stream) == 0


async def test_tool_of_killed_worker_becomes_unavailable(server: Server, callers: Callers) -> None:
    async with callers.asker(server) as asker:
        async with callers.process(server) as doomed:
            await eventually(asker.client.schemas)
            doomed.process.kill()

            async def gone() -> bool:
                return not await asker.client.schemas()

            await eventually(gone, what="the tool is not offered any more")
        assert (await asker.ask("x", timeout=60)).error == "tool unavailable"


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("timeout", "deadline"), [(0.5, 60.0), (60.0, 0.5)], ids=["tool", "query"])
async def test_tool_call_smaller_of_both_limits_ends_it(
    timeout: float, deadline: float, server: Server, callers: Callers, effects: Effects
) -> None:
    async with callers.both(server) as asker:
        started = time.monotonic()
        until = asker.bus.now_ms() + int(deadline * 1000)
        answer = await asker.ask("slow", seconds=60, timeout=timeout, deadline=until)
        assert (answer.error or "").startswith(f"tool timeout after {'0.5s' if timeout < deadline else '0.4'}")
        # the worker stops it too, long before the tool ends by itself
        await eventually(lambda: effects.ended("slow") == 1)
        assert time.monotonic() - started < 30


async def test_tool_call_waits_as_long_as_the_tool_announces(server: Server, callers: Callers) -> None:
    async with callers.both(server, timeout=30.0) as asker:
        assert await asker.client.patience("probe", {}, None, 15.0) == 30.0
        assert await asker.client.patience("probe", {}, None, 45.0) == 45.0
        assert await asker.client.patience("probe", {}, 5.0, 15.0) == 5.0


async def test_tool_call_late_result_is_not_given_to_another(
    server: Server, callers: Callers, effects: Effects
) -> None:
    """The first call does not stop at its deadline, and its result comes while the second one runs."""
    async with callers.both(server) as asker:
        first = await asker.ask("late", "c1", seconds=1.0, stubborn=True, timeout=0.3)
        assert first.error == "tool timeout after 0.3s"
        second = asyncio.create_task(asker.ask("second", "c2", seconds=1.5, timeout=60))
        await eventually(lambda: effects.ended("late") == 1)
        assert (await second).result == "you said second"


async def test_tool_answer_without_the_calls_token_is_ignored(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.both(server) as asker:
        asked = asyncio.create_task(asker.ask("x", "c1", seconds=0.5))
        other = asyncio.create_task(asker.ask("y", "c2", seconds=0.5))
        await eventually(lambda: effects.runs("x") == effects.runs("y") == 1)
        requests = [json.loads(fields["payload"]) for _, fields in client.xrange(REQUESTS.stream)]
        tokens = {one["call_id"]: one["token"] for one in requests}
        forged = ToolResultMessage(query_id="1-1", call_id="c1", tool="probe", result="forged", duration_ms=1)
        fields = {"type": "tool.result", "call_id": "c1", "payload": encode(forged)}
        for token in ({}, {"token": ""}, {"token": "guessed"}, {"token": tokens["c2"]}):
            client.xadd(asker.context.inbox, {**fields, **token})
        client.xadd(asker.context.inbox, {"type": "nonsense", "payload": "{"})
        client.xadd(asker.context.inbox, {**fields, "token": tokens["c1"], "payload": "no result"})
        assert [(await one).result for one in (asked, other)] == ["you said x", "you said y"]


async def test_tool_request_of_any_client_is_answered(server: Server, callers: Callers, client: redis.Redis) -> None:
    """A request needs a payload only; its answer is stored and published."""
    async with callers.worker(server):
        payload = {"query_id": "test", "call_id": "test-1", "tool": "probe", "args": {"text": "plain"}}
        client.xadd(REQUESTS.stream, {"payload": json.dumps(payload)})
        stored = await eventually(lambda: client.get(result_key("probe", "test-1")))
    assert json.loads(stored)["result"] == "you said plain"
    assert client.xlen(RESULTS.stream) == 1


async def test_tool_answer_to_gone_caller_makes_no_inbox(server: Server, callers: Callers, client: redis.Redis) -> None:
    async with callers.both(server) as asker:
        await asker.bus.publish(REQUESTS.of(request("c", "x", reply_to=f"{PREFIX}inbox:asker:gone")))
        await eventually(lambda: client.xlen(RESULTS.stream) == 1)
    assert not client.exists(f"{PREFIX}inbox:asker:gone")
