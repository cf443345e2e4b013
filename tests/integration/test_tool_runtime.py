"""Tools over the bus: run once, answered always, cancelled, reconfigured and announced."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.apps import ProbeSettings, probe
from support.proxy import Proxy
from support.services import announced, child, running
from support.waiting import always, eventually

from shared.bus import Bus
from shared.bus.keys import result_key
from shared.contracts import (
    QUERY_CANCEL,
    SETTINGS_UPDATE,
    TOOL_REQUEST,
    TOOL_SCHEMA,
    TOOL_SCHEMA_REQUEST,
    QueryCancel,
    SettingsUpdate,
    ToolRequest,
    ToolSchemaRequest,
    encode,
)
from shared.envelope import now_ms
from shared.errors import BusUnavailable
from shared.participant.service import Context, open_context
from shared.participant.tool import failure
from shared.participant.tool_client import Caller, ToolClient
from shared.telemetry import metrics
from shared.telemetry.meter import Meter

STREAM = TOOL_REQUEST.for_tool("probe").stream
RESULTS = "local2:tool.result.probe"
CALLER = Caller("1-1", session_id="s", user_id="u")


@pytest.fixture
def probing(redis_url: str, tmp_path: Path) -> ProbeSettings:
    return ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=1.0)


@asynccontextmanager
async def asking(settings: ProbeSettings) -> AsyncIterator[tuple[ToolClient, Context[Any]]]:
    async with open_context("asker", settings) as context:
        yield ToolClient(context), context


@asynccontextmanager
async def both(settings: ProbeSettings) -> AsyncIterator[tuple[ToolClient, Context[Any]]]:
    """A worker and somebody who asks."""
    async with running(probe, settings):
        await announced(settings.redis_url, "probe")
        async with asking(settings) as pair:
            yield pair


def runs(raw: redis.Redis, text: str) -> int:
    return int(raw.hget("effects", text) or 0)


async def ask(client: ToolClient, text: str, call_id: str = "c1", timeout: float = 5.0, **args: Any) -> Any:
    return await client.call("probe", {"text": text, **args}, call_id=call_id, caller=CALLER, timeout=timeout)


async def test_a_call_is_answered_with_text_and_data(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (client, _):
        answer = await ask(client, "hello")
    assert (answer.result, answer.error, answer.data) == ("you said hello", None, {"text": "hello"})
    assert (answer.query_id, answer.call_id, answer.tool, answer.session_id) == ("1-1", "c1", "probe", "s")
    published = raw.xrange(RESULTS)
    assert len(published) == 1
    assert published[0][1][b"correlation_id"] == b"1-1"
    assert orjson.loads(published[0][1][b"payload"])["result"] == "you said hello"


async def test_a_repeated_call_id_is_answered_from_the_stored_result(
    probing: ProbeSettings, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by message: nobody looks the result up in this time
    monkeypatch.setattr("shared.participant.tool_client._PATIENCE", 60.0)
    async with both(probing) as (client, _), asyncio.timeout(50):
        first = await ask(client, "hello", timeout=60)
        for _ in range(3):
            assert await ask(client, "hello", timeout=60) == first
    assert runs(raw, "hello") == 1
    assert raw.xlen(RESULTS) == 1


async def test_duplicates_at_the_same_time_run_once_and_all_are_answered(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    async with running(probe, probing), both(probing) as (client, _), asking(probing) as (other, _context):
        await announced(probing.redis_url, "probe", replicas=2)
        answers = await asyncio.gather(
            *(ask(one, "hello", seconds=0.3) for one in (client, client, client, other, other))
        )
        assert {answer.result for answer in answers} == {"you said hello"}
        await eventually(lambda: raw.xpending(STREAM, "probe")["pending"] == 0)
    assert runs(raw, "hello") == 1
    assert raw.xlen(RESULTS) == 1


async def test_many_racing_duplicates_never_run_twice(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with running(probe, probing), both(probing) as (client, _), asking(probing) as (other, _context):
        await announced(probing.redis_url, "probe", replicas=2)
        await asyncio.gather(*(ask(one, f"t{n}", f"c{n}") for n in range(150) for one in (client, other, client)))
    assert {int(count) for count in raw.hvals("effects")} == {1}
    assert raw.hlen("effects") == 150


async def test_a_worker_killed_in_the_middle_of_a_call_is_replaced_and_the_call_answered_once(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    with child("probe", probing.redis_url) as doomed:
        await announced(probing.redis_url, "probe")
        async with asking(probing) as (client, _):
            call = asyncio.create_task(ask(client, "hello", seconds=0.5, timeout=10))
            await eventually(lambda: runs(raw, "hello") == 1)
            doomed.send(signal.SIGKILL)
            async with running(probe, probing):
                answer = await call
                await eventually(lambda: raw.xpending(STREAM, "probe")["pending"] == 0)
    assert answer.result == "you said hello"
    assert runs(raw, "hello") == 2
    assert raw.xlen(RESULTS) == 1


async def test_a_worker_told_to_stop_finishes_its_call_and_leaves_no_consumer(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    with child("probe", probing.redis_url) as leaving:
        await announced(probing.redis_url, "probe")
        async with asking(probing) as (client, _):
            call = asyncio.create_task(ask(client, "hello", seconds=0.5))
            await eventually(lambda: runs(raw, "hello") == 1)
            leaving.send(signal.SIGTERM)
            assert (await call).result == "you said hello"
            assert await leaving.ended() == 0
    assert raw.xinfo_consumers(STREAM, "probe") == []
    (group,) = raw.xinfo_groups(STREAM)
    assert (group["lag"], group["pending"]) == (0, 0)
    assert raw.hget("closed", "you said") == b"1"
    assert not raw.keys("local2:replica:probe:*")
    assert not raw.keys("local2:inbox:probe:*")


async def test_a_worker_stopped_past_its_claim_writes_nothing_when_it_goes_on(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    with child("probe", probing.redis_url) as zombie:
        await announced(probing.redis_url, "probe")
        async with asking(probing) as (client, _):
            call = asyncio.create_task(ask(client, "hello", seconds=1.5, timeout=60))
            await eventually(lambda: runs(raw, "hello") == 1)
            zombie.send(signal.SIGSTOP)
            async with running(probe, probing):
                assert (await call).result == "you said hello"
                handled = raw.xlen(RESULTS)
                zombie.send(signal.SIGCONT)
                # it has gone on when it serves again
                await eventually(lambda: int(raw.hget("ended", "hello") or 0) == 2)
                await announced(probing.redis_url, "probe", replicas=2)
                await asyncio.sleep(0.4)
                assert raw.xlen(RESULTS) == handled == 1
    assert runs(raw, "hello") == 2


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({}, "missing text argument"),
        ({"text": ""}, "missing text argument"),
        ({"text": "x", "seconds": "soon"}, "argument seconds: "),
        ({"text": ["x"]}, "argument text: "),
    ],
)
async def test_wrong_arguments_are_an_error_that_names_them(
    args: dict[str, Any], error: str, probing: ProbeSettings
) -> None:
    async with both(probing) as (client, _):
        answer = await client.call("probe", args, call_id="c", caller=CALLER, timeout=3)
    assert answer.error is not None
    assert answer.error.startswith(error)
    assert answer.result == f"[tool error: {answer.error}]"


async def test_a_tools_own_error_is_a_text_for_the_model(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (client, _):
        answer = await ask(client, "x", fail="search failed: 503")
        assert await ask(client, "x", fail="search failed: 503") == answer
    assert (answer.error, answer.result) == ("search failed: 503", "[tool error: search failed: 503]")
    assert runs(raw, "x") == 1


async def test_a_tool_that_nobody_ever_served_is_unknown(probing: ProbeSettings) -> None:
    async with asking(probing) as (client, _):
        answer = await client.call("nosuch", {}, call_id="c", caller=CALLER, timeout=3)
    assert answer.result == "[unknown tool: 'nosuch']"


async def test_a_tool_without_a_live_worker_is_not_asked(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with running(probe, probing):
        await announced(probing.redis_url, "probe")
    async with asking(probing) as (client, _):
        answer = await ask(client, "x")
    assert answer.result == "[tool unavailable]"
    assert raw.xlen(TOOL_REQUEST.for_tool("probe").stream) == 0


async def test_a_killed_worker_is_unavailable_after_three_heartbeats(probing: ProbeSettings) -> None:
    with child("probe", probing.redis_url) as doomed:
        await announced(probing.redis_url, "probe")
        doomed.send(signal.SIGKILL)
    async with asking(probing) as (client, _):
        async with asyncio.timeout(30):
            while await client.schemas():
                await asyncio.sleep(0.02)
        assert (await ask(client, "x")).result == "[tool unavailable]"


async def test_a_tool_that_takes_too_long_is_a_timeout_and_is_stopped(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (client, _):
        started = time.monotonic()
        answer = await ask(client, "slow", seconds=60, timeout=0.5)
        assert answer.result == "[tool timeout after 0.5s]"
        await eventually(lambda: raw.hget("ended", "slow") == b"1")
        # long before the tool would have ended by itself
        assert time.monotonic() - started < 30


async def test_the_querys_deadline_bounds_a_call(probing: ProbeSettings) -> None:
    async with both(probing) as (client, _):
        started = time.monotonic()
        caller = Caller("1-1", deadline=now_ms() + 900)
        answer = await client.call("probe", {"text": "x", "seconds": 60}, call_id="c", caller=caller, timeout=50)
        assert time.monotonic() - started < 30
    assert answer.result.startswith("[tool timeout after 0.")


async def test_a_call_whose_deadline_has_passed_is_not_started_and_may_be_asked_for_again(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    async with both(probing) as (_, context):
        request = ToolRequest(
            query_id="1-1", call_id="late", tool="probe", args={"text": "late"}, session_id="s", user_id="u",
            reply_to=context.inbox,
        )  # fmt: skip
        answers: list[Any] = []
        context.on_inbox("tool.result", lambda _id, fields: answers.append(orjson.loads(fields[b"payload"])))
        await context.bus.publish(TOOL_REQUEST.for_tool("probe").of(request, deadline=context.bus.now_ms() - 1))
        await eventually(lambda: answers)
        assert answers[0]["error"] == "the query's deadline has passed"
        assert runs(raw, "late") == 0
        # that it was not begun is no result of it
        await context.bus.publish(TOOL_REQUEST.for_tool("probe").of(request, attempt=2))
        await eventually(lambda: len(answers) == 2)
        assert (answers[1]["error"], answers[1]["result"]) == (None, "you said late")


async def test_cancelling_a_query_stops_its_calls_and_no_other(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (client, context):
        doomed = asyncio.create_task(ask(client, "doomed", "c1", seconds=60, timeout=60))
        other = asyncio.create_task(
            client.call("probe", {"text": "other", "seconds": 0.5}, call_id="c2", caller=Caller("2-2"), timeout=30)
        )
        await eventually(lambda: runs(raw, "doomed") == 1 and runs(raw, "other") == 1)
        await context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="1-1")))
        async with asyncio.timeout(30):
            answer = await doomed
        assert answer.error == "cancelled"
        assert (await other).result == "you said other"
    assert raw.hget("ended", "doomed") == b"1"


async def test_new_settings_apply_to_new_calls_and_drop_none(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (client, context):
        slow = asyncio.create_task(ask(client, "slow", "c0", seconds=0.8))
        await eventually(lambda: runs(raw, "slow") == 1)
        update = SettingsUpdate(participant="probe", values={"greeting": "they said"})
        await context.bus.publish(SETTINGS_UPDATE.of(update))
        n = 0
        async with asyncio.timeout(30):
            while (await ask(client, "x", f"n{(n := n + 1)}")).result != "they said x":
                pass
        assert not raw.hexists("closed", "you said"), "the old resources are open while their call runs"
        assert (await slow).result == "you said slow"
        await eventually(lambda: raw.hget("closed", "you said") == b"1")


@pytest.mark.parametrize("values", [{"greeting": ""}, {"nosuch": 1}, {"redis_url": "redis://elsewhere"}])
async def test_wrong_settings_change_nothing_and_stop_nobody(values: dict[str, Any], probing: ProbeSettings) -> None:
    async with both(probing) as (client, context):
        await context.bus.publish(SETTINGS_UPDATE.of(SettingsUpdate(participant="probe", values=values)))
        await context.bus.link.call("XADD", SETTINGS_UPDATE.stream, "*", "payload", b"\xff")
        update = SettingsUpdate(participant="probe", values={"greeting": "still"})
        await context.bus.publish(SETTINGS_UPDATE.of(update))
        n = 0
        async with asyncio.timeout(30):
            while (await ask(client, "x", f"n{(n := n + 1)}")).result != "still x":
                pass


async def test_callers_wait_as_long_as_a_tool_says_and_never_less_than_usual(probing: ProbeSettings) -> None:
    async with both(probing.model_copy(update={"timeout": 30.0})) as (client, context):

        async def patience(usual: float, limit: float | None = None) -> float:
            await context.registry.replicas(fresh=True)
            return await client.patience("probe", {}, limit, usual)

        assert [await patience(usual) for usual in (15.0, 60.0)] == [30.0, 60.0]
        assert await client.patience("unknown", {}, None, 15.0) == 15.0
        # a limit that the operator has set goes before both
        assert [await patience(15.0, limit) for limit in (20.0, 60.0, 5.0)] == [20.0, 60.0, 5.0]
        # an operator changes it while the tool runs
        update = SettingsUpdate(participant="probe", values={"timeout": 45.0})
        await context.bus.publish(SETTINGS_UPDATE.of(update))

        async def changed() -> bool:
            return await patience(15.0) == 45.0

        await eventually(changed, what="the new time-out is announced")


@pytest.mark.parametrize(("announced_by_somebody", "waited"), [("soon", 15), (-1, 15), (True, 15), (1e300, 3_600)])
async def test_nobody_is_waited_for_without_an_end_whatever_is_announced(
    probing: ProbeSettings, announced_by_somebody: Any, waited: float
) -> None:
    async with both(probing) as (client, context):
        served = {"probe": {"timeout": announced_by_somebody}}

        async def entry(name: str) -> dict[str, Any]:
            return served[name]

        context.registry.served = entry  # type: ignore[method-assign, assignment]
        assert await client.patience("probe", {}, None, 15) == waited


async def test_the_schema_is_announced_at_start_and_on_request(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (_, context):
        first = [orjson.loads(fields[b"payload"]) for _, fields in raw.xrange(TOOL_SCHEMA.stream)]
        assert len(first) == 1
        assert first[0]["type"] == "function"
        assert first[0]["participant"] == "probe"
        function = first[0]["function"]
        assert function["name"] == "probe"
        assert function["parameters"]["required"] == ["text"]
        await context.bus.publish(TOOL_SCHEMA_REQUEST.of(ToolSchemaRequest()))
        await eventually(lambda: raw.xlen(TOOL_SCHEMA.stream) == 2)


async def test_an_answer_to_a_dead_requester_makes_no_inbox(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with running(probe, probing):
        await announced(probing.redis_url, "probe")
        async with Bus(probing.redis_url, "test/1") as bus:
            request = ToolRequest(
                query_id="1-1", call_id="c", tool="probe", args={"text": "x"}, reply_to="local2:inbox:asker:dead"
            )
            await bus.publish(TOOL_REQUEST.for_tool("probe").of(request))
        await eventually(lambda: raw.xlen(RESULTS) == 1)
    assert not raw.exists("local2:inbox:asker:dead")


async def test_the_inbox_of_a_killed_process_expires(probing: ProbeSettings, raw: redis.Redis) -> None:
    with child("probe", probing.redis_url):
        await announced(probing.redis_url, "probe")
    (inbox,) = raw.keys("local2:inbox:probe:*")
    assert 0 < raw.ttl(inbox) <= 60


async def test_an_answer_that_went_to_a_dead_owner_is_found_by_its_successor(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    async with both(probing) as (client, _):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2), asking(probing) as (dying, _context):
                await ask(dying, "hello", seconds=0.6)
        assert (await ask(client, "hello", seconds=0.6)).result == "you said hello"
    assert runs(raw, "hello") == 1


async def test_only_an_answer_with_the_calls_own_token_is_heard(
    probing: ProbeSettings, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter("asker")
    monkeypatch.setattr(metrics, "_meter", meter)
    async with both(probing) as (client, context):
        asked = [asyncio.create_task(ask(client, f"t{n}", f"c{n}", seconds=0.6)) for n in range(2)]
        await eventually(lambda: runs(raw, "t0") and runs(raw, "t1"))
        payload = encode(failure(ToolRequest(query_id="1-1", call_id="c0", tool="probe", args={}), "forged"))
        others = client._waiting["c1"].copy().pop().token
        forged = {"type": "tool.result", "call_id": "c0", "payload": payload}
        for token in ({}, {"token": ""}, {"token": "guessed"}, {"token": others}, {"token": b"\xff\x00"}):
            raw.xadd(context.inbox, {**forged, **token})
        raw.xadd(context.inbox, {**forged, "call_id": "no such call", "token": others})
        raw.xadd(context.inbox, {**forged, "type": "nonsense"})
        raw.xadd(context.inbox, {**forged, "call_id": "c1", "token": others, "payload": "no result"})
        assert [answer.result for answer in await asyncio.gather(*asked)] == ["you said t0", "you said t1"]
    counted = {why: meter._ignored.labels(why)._value.get() for why in ("late", "token", "malformed", "unknown")}
    assert counted == {"late": 1, "token": 5, "malformed": 1, "unknown": 1}


async def test_an_answer_without_a_token_is_taken_from_where_its_worker_alone_can_write(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    async with both(probing) as (client, context):
        asked = asyncio.create_task(ask(client, "x", seconds=30, timeout=20))
        await eventually(lambda: client._waiting)
        request = ToolRequest(query_id="1-1", call_id="c1", tool="probe", args={})
        for text, write in (("forged", False), ("stored", True)):
            result = encode(failure(request, text))
            raw.xadd(context.inbox, {"type": "tool.result", "call_id": "c1", "payload": result})
            if write:
                raw.set(result_key("probe", "c1"), result)
        assert (await asked).error == "stored"


LAST = "18446744073709551615-18446744073709551615"


async def test_an_inbox_that_is_emptied_and_shut_by_its_last_id_is_open_again_within_a_heartbeat(
    probing: ProbeSettings, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may answer may choose an id, and a length, too."""
    async with both(probing) as (client, context):
        asked = asyncio.create_task(ask(client, "x", "c0", seconds=0.5))
        await eventually(lambda: runs(raw, "x"))
        raw.execute_command("XADD", context.inbox, "MAXLEN", "0", LAST, "type", "nonsense")
        assert (await asked).result == "you said x"
        await eventually(lambda: raw.xinfo_stream(context.inbox)["last-generated-id"] != LAST.encode())
        # by message, not by looking the result up
        monkeypatch.setattr("shared.participant.tool_client._PATIENCE", 60.0)
        assert (await ask(client, "y", "c1", timeout=20)).result == "you said y"


async def test_what_has_been_read_of_an_inbox_is_removed(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (_, context):
        for _ in range(20):
            pipe = raw.pipeline(transaction=False)
            for _ in range(500):
                pipe.xadd(context.inbox, {"type": "nonsense", "junk": "x" * 1_000})
            pipe.execute()
        await eventually(lambda: raw.xlen(context.inbox) < 500, what="it is short again")


async def test_a_poisoned_call_is_answered_too(probing: ProbeSettings, raw: redis.Redis) -> None:
    raw.set("text", "not a stream")
    async with both(probing) as (client, context):
        bad = ToolRequest(query_id="1-1", call_id="bad", tool="probe", args={"text": "x"}, reply_to="text")
        for _ in range(3):
            await context.bus.publish(TOOL_REQUEST.for_tool("probe").of(bad))
        assert (await ask(client, "good")).result == "you said good"
        await eventually(lambda: raw.exists(result_key("probe", "bad")))


async def test_older_names_of_a_tool_reach_it(probing: ProbeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("shared.contracts", fromlist=["x"]).TOOL_ALIASES, "old_probe", "probe")
    async with both(probing) as (client, _):
        answer = await client.call("old_probe", {"text": "x"}, call_id="c", caller=CALLER, timeout=3)
    assert (answer.tool, answer.result) == ("probe", "you said x")


async def test_a_call_that_is_under_way_when_its_process_leaves_is_told(probing: ProbeSettings) -> None:
    async with running(probe, probing), Proxy(probing.redis_url) as proxy:
        await announced(probing.redis_url, "probe")
        far = probing.model_copy(update={"redis_url": proxy.url, "redis_timeout": 0.5})
        async with asking(far) as (client, _):
            assert (await ask(client, "before")).error is None
            proxy.freeze()
            waiting = asyncio.create_task(ask(client, "during", "c2", timeout=60))
            await asyncio.sleep(0.1)
        with pytest.raises(BusUnavailable):
            await asyncio.wait_for(waiting, 10)


async def test_a_requesters_connections_do_not_grow_with_its_calls(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (client, context):
        name = f"{context.bus.source}:"

        def connections() -> int:
            return sum(row["name"].startswith(name) for row in raw.client_list())

        await ask(client, "x")
        before = connections()
        # commands, signs of life, and three that wait: for its group, its inbox and what it follows
        assert before <= 5
        tasks = [asyncio.create_task(ask(client, f"t{n}", f"c{n}", seconds=0.1, timeout=60)) for n in range(200)]
        while not all(task.done() for task in tasks):
            assert connections() == before
            await asyncio.sleep(0.02)
        assert {task.result().error for task in tasks} == {None}


async def test_a_first_request_that_was_held_up_on_its_way_is_looked_up(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    """Whoever took its query over may have asked for the same call meanwhile."""
    async with running(probe, probing), Proxy(probing.redis_url) as proxy:
        await announced(probing.redis_url, "probe")
        cut_off = probing.model_copy(update={"redis_url": proxy.url})
        async with asking(cut_off) as (first, _), asking(probing) as (second, _):
            await eventually(first.schemas)
            proxy.freeze()
            held = asyncio.create_task(
                first.call("probe", {"text": "x"}, call_id="c1", caller=CALLER, timeout=20.0, attempt=1)
            )
            await asyncio.sleep(1.5)
            again = await second.call("probe", {"text": "x"}, call_id="c1", caller=CALLER, timeout=5.0, attempt=2)
            assert again.result == "you said x"
            proxy.thaw()
            assert (await held).result == "you said x"
    assert runs(raw, "x") == 1


async def test_a_call_asked_for_again_is_answered_though_the_earlier_request_is_too_late(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    """A worker that died holds the earlier one, whose deadline passes before it is taken over."""
    earlier = ToolRequest(query_id="1-1", call_id="c1", tool="probe", args={"text": "x"})
    raw.xgroup_create(STREAM, "probe", "0", mkstream=True)
    async with Bus(probing.redis_url, "test/1") as bus:
        await bus.publish(TOOL_REQUEST.for_tool("probe").of(earlier, deadline=now_ms() + 100))
    assert raw.xreadgroup("probe", "dead", {STREAM: ">"})
    async with both(probing) as (client, _):
        again = await client.call("probe", {"text": "x"}, call_id="c1", caller=CALLER, timeout=10.0, attempt=2)
    assert (again.result, again.error) == ("you said x", None)
    assert runs(raw, "x") == 1


async def test_a_call_is_found_though_the_clocks_of_two_masters_differ(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    """The id of the query may be later than that of its call's entry."""
    caller = Caller(f"{now_ms() + 300_000}-0")
    async with both(probing) as (client, _):

        async def twice() -> str:
            args = {"text": "x", "seconds": 0.3}
            return (await client.call("probe", args, call_id="c1", caller=caller, timeout=5.0)).result

        assert await asyncio.gather(twice(), twice()) == ["you said x"] * 2
    assert runs(raw, "x") == 1


async def test_a_result_is_looked_for_once_at_a_time(probing: ProbeSettings) -> None:
    """While Redis is away, looks do not pile up."""
    async with running(probe, probing), Proxy(probing.redis_url) as proxy:
        await announced(probing.redis_url, "probe")
        async with asking(probing.model_copy(update={"redis_url": proxy.url})) as (client, _):
            await eventually(client.schemas)
            asked = asyncio.create_task(ask(client, "x", seconds=1.0, timeout=30.0))
            await eventually(lambda: client._waiting)
            proxy.freeze()
            await eventually(lambda: client._looking)
            await always(lambda: len(client._looking) <= 1, 2.5)
            proxy.thaw()
            assert (await asked).result == "you said x"


async def test_an_earlier_request_that_is_not_finished_is_found_among_many_of_other_calls(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    subject = TOOL_REQUEST.for_tool("probe")

    def request(call_id: str, seconds: float) -> ToolRequest:
        args = {"text": call_id, "seconds": seconds}
        return ToolRequest(query_id="1-1", call_id=call_id, tool="probe", args=args, session_id="s", user_id="u")

    async with both(probing.model_copy(update={"concurrency": 64})) as (_, context):
        # the same call before and behind others that mention it
        await context.bus.publish(subject.of(request("wanted", 1.0)))
        for number in range(23):
            await context.bus.publish(subject.of(request(f"wanted-{number}", 0.0)))
        await context.bus.publish(subject.of(request("wanted", 1.0), attempt=2))
        await eventually(lambda: runs(raw, "wanted") == 1 and runs(raw, "wanted-22") == 1)
        await eventually(lambda: raw.xpending(STREAM, "probe")["pending"] == 0)
        assert runs(raw, "wanted") == 1
