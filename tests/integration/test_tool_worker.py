"""One participant with several tools on a real Redis: what a request of any form gets, stores and publishes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from pydantic import BaseModel, Field
from support.services import announced, running
from support.waiting import eventually

from shared.bus import TOGETHER, Command
from shared.bus.keys import result_key
from shared.contracts import (
    NOT_RUN,
    QUERY_CANCEL,
    TOOL_REQUEST,
    TOOL_RESULT,
    QueryCancel,
    ToolRequest,
    ToolResultMessage,
    encode,
)
from shared.participant.registry import ReplicaInfo, announcing
from shared.participant.service import Context, Service, Work, open_context
from shared.participant.settings import Settings
from shared.participant.tool import Tool, ToolResult, failure, open_tools
from shared.participant.tool_client import Caller, ToolClient

INTERNAL_SECONDS, LARGE_SECONDS, RETENTION = 300, 3_600, 9_000
CALLER = Caller("1-1", session_id="s", user_id="ann")
BOB = Caller("1-1", respondent_id="B")


class Place(BaseModel):
    """A part of Say's arguments."""

    city: str = Field(min_length=1)


class Say(BaseModel):
    """Says something back."""

    text: str = ""
    tone: str = "kind"
    size: int = 0
    most: int | None = 3
    gives: str = ""
    places: list[Place] = []
    parts: list[int] = Field(default=[1], min_length=1)
    seconds: float = 0.0
    number: int = 0


class Hang(BaseModel):
    """Never answers."""


class Model(BaseModel):
    n: int


GIVES: dict[str, Any] = {"": None, "large integer": 2**70, "model": Model(n=3), "object": object()}


async def say(args: Say, _request: ToolRequest) -> ToolResult:
    await asyncio.sleep(args.seconds)
    return ToolResult(f"{args.tone} {args.text}{args.most or ''}{'x' * args.size}", GIVES[args.gives])


async def hang(_args: Hang, _request: ToolRequest) -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError


@contextlib.asynccontextmanager
async def build(_settings: Settings) -> AsyncIterator[Sequence[Tool[Any]]]:
    yield [
        Tool("say", Say, say),
        Tool("hidden", Say, say, internal=True),
        Tool("hang", Hang, hang),
        Tool("change", Say, say, read_only=False),
        # tools with earlier names
        Tool("search_memory", Say, say),
        Tool("recall_topic", Say, say),
        Tool("save_topic", Say, say),
    ]


def opened(context: Context[Settings]) -> contextlib.AbstractAsyncContextManager[Sequence[Work]]:
    return open_tools(context, build)


shop = Service("shop", Settings, opened)


@pytest.fixture
def shop_settings(redis_url: str, tmp_path: Path) -> Settings:
    return Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.3, drain=1.0, retention=RETENTION)


class Asker:
    def __init__(self, context: Context[Any]) -> None:
        self.context = context
        self.client = ToolClient(context)

    async def ask(self, tool: str, call_id: str = "c", caller: Caller = CALLER, **how: Any) -> ToolResultMessage:
        args = how.pop("args", {"text": "hi"})
        return await self.client.call(tool, args, call_id=call_id, caller=caller, **{"timeout": 20.0, **how})


@pytest.fixture
async def asker(shop_settings: Settings) -> AsyncIterator[Asker]:
    """A caller beside a running shop."""
    async with running(shop, shop_settings):
        await announced(shop_settings.redis_url, "shop")
        async with open_context("asker", shop_settings) as context:
            yield Asker(context)


# ── what a worker makes of a request ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tool", "size", "seconds"),
    [
        ("say", 0, RETENTION),
        ("say", 70_000, LARGE_SECONDS),
        ("hidden", 0, INTERNAL_SECONDS),
        ("hidden", 70_000, INTERNAL_SECONDS),
    ],
)
async def test_tool_result_is_stored_published_and_expires(
    tool: str, size: int, seconds: int, asker: Asker, raw: redis.Redis
) -> None:
    request = ToolRequest(query_id="1-1", call_id="c", tool=tool, args={"size": size})
    raw.xadd(TOOL_REQUEST.for_tool(tool).stream, {"payload": encode(request)})
    stored = await eventually(lambda: raw.get(result_key(tool, "c")))
    assert seconds - 60 < raw.ttl(result_key(tool, "c")) <= seconds
    results = raw.xrange(TOOL_RESULT.for_tool(tool).stream)
    assert [fields[b"payload"] for _, fields in results] == ([] if tool == "hidden" else [stored])


async def test_tool_result_large_is_read_from_its_key_not_inbox(asker: Asker, raw: redis.Redis) -> None:
    """Everything else in the inbox would wait behind it."""
    answer = await asker.ask("say", args={"size": 70_000})
    assert answer.result.endswith("x" * 70_000)
    assert raw.strlen(result_key("say", "c")) > 70_000
    assert raw.memory_usage(asker.context.inbox) < 20_000


async def test_tool_result_large_announced_twice_is_read_once(asker: Asker, raw: redis.Redis) -> None:
    asked = asyncio.create_task(asker.ask("hang", args={}, token="t", timeout=60))
    await eventually(lambda: raw.xlen(TOOL_REQUEST.for_tool("hang").stream))
    request = ToolRequest(query_id="1-1", call_id="c", tool="hang", args={})
    raw.set(result_key("hang", "c"), encode(failure(request, "x" * 70_000)))
    with raw.monitor() as monitor:
        with raw.pipeline() as pipe:
            for _ in range(3):
                pipe.xadd(asker.context.inbox, {"type": "tool.result", "call_id": "c", "token": "t"})
            pipe.execute()
        assert (await asked).error == "x" * 70_000
        raw.echo("end")
        commands = [*iter(lambda: monitor.next_command()["command"], "ECHO end")]
    assert commands.count(f"GET {result_key('hang', 'c')}") == 1
    await asker.context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="1-1")))


@pytest.mark.parametrize(
    ("args", "result"),
    [
        ({"text": "hi", "tone": None, "most": None}, "kind hi3"),
        ({"text": "hi", "most": None}, "kind hi"),
        ({"places": [{"city": ""}]}, "[tool error: missing places.0.city argument]"),
        ({"places": [{}]}, "[tool error: missing places.0.city argument]"),
        ({"parts": []}, "[tool error: missing parts argument]"),
        ({"parts": [1, "x"]}, "[tool error: argument parts.1: Input should be a valid integer"),
        ({"text": None, "size": "x", "parts": [1]}, "[tool error: argument size: Input should be a valid integer"),
        ({"gives": "object"}, "[tool error: its result cannot be sent"),
    ],
)
async def test_tool_arguments_and_data_of_odd_forms(args: dict[str, Any], result: str, asker: Asker) -> None:
    answer = await asker.ask("say", args=args)
    assert answer.result == result or (answer.result.startswith(result) and answer.error is not None)


@pytest.mark.parametrize(("gives", "data"), [("large integer", 2**70), ("model", {"n": 3}), ("", None)])
async def test_tool_data_is_what_json_can_carry(gives: str, data: Any, asker: Asker) -> None:
    assert (await asker.ask("say", args={"gives": gives})).data == data


async def test_tool_request_of_dead_worker_is_answered_from_its_result(
    shop_settings: Settings, raw: redis.Redis
) -> None:
    """The request says that it is the first one, but Redis counts two deliveries."""
    subject = TOOL_REQUEST.for_tool("say")
    raw.xgroup_create(subject.stream, "shop", "0", mkstream=True)
    async with open_context("asker", shop_settings) as context:
        request = ToolRequest(query_id="1-1", call_id="c", tool="say", args={}, reply_to=context.inbox, token="t")
        await context.bus.publish(subject.of(request, attempt=1))
        raw.xreadgroup("shop", "dead", {subject.stream: ">"})
        raw.set(result_key("say", "c"), encode(failure(request, "stored")))
        async with running(shop, shop_settings):
            await eventually(lambda: raw.xpending(subject.stream, "shop")["pending"] == 0)
    assert raw.xlen(TOOL_RESULT.for_tool("say").stream) == 0, "it was run again"


@pytest.mark.parametrize(
    ("name", "args", "tool"),
    [
        ("recall_memory", {"text": "x"}, "search_memory"),
        ("recall_memory", {"topic": "x"}, "recall_topic"),
        ("memory_save", {"topic": "x"}, "save_topic"),
    ],
)
async def test_tool_earlier_name_reaches_it(
    name: str, args: dict[str, Any], tool: str, asker: Asker, raw: redis.Redis
) -> None:
    answer = await asker.ask(name, args=args)
    assert (answer.tool, answer.error) == (tool, None)
    # a client that knows only the earlier name writes to the earlier stream
    request = ToolRequest(query_id="1-1", call_id="raw", tool=name, args=args)
    raw.xadd(TOOL_REQUEST.for_tool(name).stream, {"payload": encode(request), "session_id": "s"})
    stored = await eventually(lambda: raw.get(result_key(tool, "raw")))
    assert orjson.loads(stored)["tool"] == tool


async def test_tool_queries_cancelled_before_start_beside_malformed_one(
    shop_settings: Settings, raw: redis.Redis
) -> None:
    raw.xadd(QUERY_CANCEL.stream, {"payload": "{"})
    raw.xadd(QUERY_CANCEL.stream, {"payload": encode(QueryCancel(query_id="7-0"))})
    async with running(shop, shop_settings):
        await announced(shop_settings.redis_url, "shop")
        async with open_context("asker", shop_settings) as context:
            answer = await Asker(context).ask("say", caller=Caller("7-0"))
    assert answer.error == "cancelled"
    assert not raw.exists(result_key("say", "c")), "the session of a cancelled query may have been deleted"


async def test_tool_query_cancelled_ends_its_calls_of_every_tool(asker: Asker, raw: redis.Redis) -> None:
    calls = [asyncio.create_task(asker.ask("hang", f"c{n}", Caller("7-0"), args={})) for n in range(2)]
    other = asyncio.create_task(asker.ask("hang", "other", Caller("8-0"), args={}))
    stream = TOOL_REQUEST.for_tool("hang").stream
    await eventually(lambda: raw.xlen(stream) == 3 and raw.xpending(stream, "shop")["pending"] == 3)
    await asker.context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="7-0")))
    assert [answer.error for answer in await asyncio.gather(*calls)] == ["cancelled"] * 2
    assert not raw.exists(result_key("hang", "c0")), "its session may have been deleted"
    assert not other.done()
    await asker.context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="8-0")))
    assert (await other).error == "cancelled"


# ── what a caller may ask ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tool", "caller", "error"),
    [
        ("change", CALLER, None),
        # the second respondent's answer is not shown, so nothing is changed for it
        ("change", BOB, NOT_RUN),
        ("say", BOB, None),
        ("gone", BOB, "unknown tool: 'gone'"),
    ],
)
async def test_tool_call_that_changes_data_is_not_run_for_the_shadow(
    tool: str, caller: Caller, error: str | None, asker: Asker, raw: redis.Redis
) -> None:
    answer = await asker.ask(tool, caller=caller)
    assert (answer.error, answer.result) == (error, f"[{error}]" if error else "kind hi3")
    assert raw.xlen(TOOL_REQUEST.for_tool(tool).stream) == (0 if error else 1)


async def test_tool_request_names_its_user_time_zone_and_token(asker: Asker, raw: redis.Redis) -> None:
    caller = Caller("1-1", session_id="s", user_id="ann", traceparent="trace", time_zone="Asia/Tokyo")
    await asker.ask("say", caller=caller, token="before", args={"size": 3}, attempt=1)
    ((_, fields),) = raw.xrange(TOOL_REQUEST.for_tool("say").stream)
    said = {name: fields[name.encode()].decode() for name in ("correlation_id", "session_id", "user_id", "attempt")}
    assert said == {"correlation_id": "1-1", "session_id": "s", "user_id": "ann", "attempt": "1"}
    assert orjson.loads(fields[b"payload"]) == {
        "query_id": "1-1", "call_id": "c", "tool": "say", "args": {"size": 3}, "session_id": "s", "user_id": "ann",
        "reply_to": asker.context.inbox, "token": "before", "time_zone": "Asia/Tokyo",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "error"), [({"x": object()}, "the arguments cannot be sent: "), ({"number": 2**70}, "")]
)
async def test_tool_arguments_are_what_json_can_carry(args: dict[str, Any], error: str, asker: Asker) -> None:
    answer = await asker.ask("say", args=args)
    assert (answer.error or "").startswith(error)
    assert bool(answer.error) is bool(error)


@pytest.mark.parametrize(
    ("timeout", "grace", "left_ms", "error"),
    [
        (0.2, 0.0, None, "tool timeout after 0.2s"),
        (0.2, 0.3, None, "tool timeout after 0.2s"),
        (0.4, 60.0, 300, "tool timeout after 0."),
        (60.0, 0.0, -500, "tool timeout after 0s"),
    ],
)
async def test_tool_call_ends_at_the_smallest_of_its_limits(
    timeout: float, grace: float, left_ms: int | None, error: str, asker: Asker
) -> None:
    deadline = None if left_ms is None else asker.context.bus.now_ms() + left_ms
    async with asyncio.timeout(15):
        answer = await asker.ask("hang", caller=Caller("1-1", deadline=deadline), args={}, timeout=timeout, grace=grace)
    assert (answer.error or "").startswith(error)
    assert answer.result == f"[{answer.error}]"


async def test_tool_call_within_its_grace_is_answered(asker: Asker) -> None:
    answer = await asker.ask("say", args={"seconds": 1.5}, timeout=0.5, grace=18.0)
    assert answer.error is None


async def test_tool_calls_of_one_tick_all_get_their_results(asker: Asker, raw: redis.Redis) -> None:
    count = TOGETHER + 4
    answers = await asyncio.gather(*(asker.ask("say", f"c{n}", args={"text": f"{n} "}) for n in range(count)))
    assert [answer.result for answer in answers] == [f"kind {n} 3" for n in range(count)]
    assert raw.xlen(TOOL_REQUEST.for_tool("say").stream) == count


async def test_tool_call_whose_stream_is_damaged_fails_alone(asker: Asker, raw: redis.Redis) -> None:
    schema = {"type": "function", "function": {"name": "odd", "description": "d", "parameters": {}}}
    commands: list[Command] = announcing(ReplicaInfo("odd", "r", "ready", 1, 1, tools=[schema]), 60_000)
    await asker.context.bus.link.pipe(commands)
    raw.set(TOOL_REQUEST.for_tool("odd").stream, "not a stream")
    await asker.context.registry.replicas(fresh=True)
    odd, good = await asyncio.gather(asker.ask("odd", "c1"), asker.ask("say", "c2"), return_exceptions=True)
    assert isinstance(odd, Exception)
    assert "WRONGTYPE" in str(odd)
    assert isinstance(good, ToolResultMessage)
    assert good.result == "kind hi3"


async def test_tool_call_left_by_one_of_two_callers_answers_the_other(asker: Asker, raw: redis.Redis) -> None:
    one, other = (asyncio.create_task(asker.ask("hang", args={}, token="t", timeout=1.0)) for _ in range(2))
    await eventually(lambda: raw.xlen(TOOL_REQUEST.for_tool("hang").stream) == 2)
    one.cancel()
    assert (await other).error == "tool timeout after 1s"


async def test_tool_awaited_by_its_earlier_name_until_a_worker_comes(shop_settings: Settings, raw: redis.Redis) -> None:
    async with open_context("asker", shop_settings) as context:
        client = ToolClient(context)
        async with asyncio.timeout(10):
            # no worker has ever served it
            await client.back("recall_memory", {"text": "x"}, 3_600.0)
        async with running(shop, shop_settings):
            await eventually(lambda: _served(client))
        await eventually(lambda: _gone(client))
        waiting = asyncio.create_task(client.back("recall_memory", {"text": "x"}, 60.0))
        await client.back("recall_memory", {"text": "x"}, 0.0)
        assert not waiting.done()
        async with running(shop, shop_settings):
            await asyncio.wait_for(waiting, 20)


async def _served(client: ToolClient) -> bool:
    return "search_memory" in await client.schemas()


async def _gone(client: ToolClient) -> bool:
    return not await client.schemas()
