"""Tools over the bus: run once, answered always, cancelled, reconfigured and announced."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.apps import ProbeSettings, probe
from support.proxy import Proxy
from support.services import announced, running
from support.waiting import eventually

from shared.bus.keys import result_key
from shared.contracts import (
    SETTINGS_UPDATE,
    TOOL_REQUEST,
    TOOL_SCHEMA,
    TOOL_SCHEMA_REQUEST,
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


@pytest.fixture
def meter() -> Iterator[Meter]:
    yield metrics.start("asker")
    metrics.stop()


async def test_inbox_answers_without_the_calls_token_are_counted(
    probing: ProbeSettings, raw: redis.Redis, meter: Meter
) -> None:
    async with both(probing) as (client, context):
        asked = [asyncio.create_task(ask(client, f"t{n}", f"c{n}", seconds=0.6)) for n in range(2)]
        await eventually(lambda: runs(raw, "t0") and runs(raw, "t1"))
        requests = [orjson.loads(fields[b"payload"]) for _, fields in raw.xrange(STREAM)]
        others = next(request["token"] for request in requests if request["call_id"] == "c1")
        payload = encode(failure(ToolRequest(query_id="1-1", call_id="c0", tool="probe", args={}), "forged"))
        forged = {"type": "tool.result", "call_id": "c0", "payload": payload}
        for token in ({}, {"token": ""}, {"token": "guessed"}, {"token": others}, {"token": b"\xff\x00"}):
            raw.xadd(context.inbox, {**forged, **token})
        raw.xadd(context.inbox, {**forged, "call_id": "no such call", "token": others})
        raw.xadd(context.inbox, {**forged, "type": "nonsense"})
        raw.xadd(context.inbox, {**forged, "call_id": "c1", "token": others, "payload": "no result"})
        assert [answer.result for answer in await asyncio.gather(*asked)] == ["you said t0", "you said t1"]
    text = meter.text().decode()
    counted = dict(re.findall(r'local2_inbox_ignored_total{reason="(\w+)"} (\d)', text))
    assert counted == {"late": "1", "token": "5", "malformed": "1", "unknown": "1"}


async def test_an_answer_without_a_token_is_taken_from_where_its_worker_alone_can_write(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    async with both(probing) as (client, context):
        asked = asyncio.create_task(ask(client, "x", seconds=120, timeout=100))
        await eventually(lambda: runs(raw, "x"))
        request = ToolRequest(query_id="1-1", call_id="c1", tool="probe", args={})
        for text, write in (("forged", False), ("stored", True)):
            result = encode(failure(request, text))
            raw.xadd(context.inbox, {"type": "tool.result", "call_id": "c1", "payload": result})
            if write:
                raw.set(result_key("probe", "c1"), result)
        # long before the end of the call
        assert (await asyncio.wait_for(asked, 30)).error == "stored"


LAST = "18446744073709551615-18446744073709551615"


async def test_an_inbox_that_is_emptied_and_shut_by_its_last_id_is_open_again_within_a_heartbeat(
    probing: ProbeSettings, raw: redis.Redis
) -> None:
    """Whoever may answer may choose an id, and a length, too."""
    async with both(probing) as (client, context):
        asked = asyncio.create_task(ask(client, "x", "c0", seconds=0.5))
        await eventually(lambda: runs(raw, "x"))
        raw.execute_command("XADD", context.inbox, "MAXLEN", "0", LAST, "type", "nonsense")
        assert (await asked).result == "you said x"
        await eventually(lambda: raw.xinfo_stream(context.inbox)["last-generated-id"] != LAST.encode())
        heard: list[str] = []
        context.on_inbox("note", lambda entry_id, _fields: heard.append(entry_id))
        raw.xadd(context.inbox, {"type": "note"})
        await eventually(lambda: heard)
        assert (await ask(client, "y", "c1", timeout=20)).result == "you said y"


async def test_what_has_been_read_of_an_inbox_is_removed(probing: ProbeSettings, raw: redis.Redis) -> None:
    async with both(probing) as (_, context):
        for _ in range(20):
            pipe = raw.pipeline(transaction=False)
            for _ in range(500):
                pipe.xadd(context.inbox, {"type": "nonsense", "junk": "x" * 1_000})
            pipe.execute()
        await eventually(lambda: raw.xlen(context.inbox) < 500, what="it is short again")


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


async def test_tool_call_looks_for_its_result_once_at_a_time(probing: ProbeSettings, raw: redis.Redis) -> None:
    """While Redis is away, reads of the result do not pile up."""
    async with running(probe, probing), Proxy(probing.redis_url) as proxy:
        await announced(probing.redis_url, "probe")
        async with asking(probing.model_copy(update={"redis_url": proxy.url})) as (client, _):
            await eventually(client.schemas)
            asked = asyncio.create_task(ask(client, "x", seconds=2.0, timeout=30.0))
            await eventually(lambda: runs(raw, "x"))
            proxy.freeze()
            # three reads would be due meanwhile
            await asyncio.sleep(3.5)
            with raw.monitor() as monitor:
                proxy.thaw()
                assert (await asked).result == "you said x"
                raw.echo("end")
                commands = [*iter(lambda: monitor.next_command()["command"], "ECHO end")]
            assert sum(command == f"GET {result_key('probe', 'c1')}" for command in commands) <= 1


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
