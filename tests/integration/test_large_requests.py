"""Large requests: the gateway refuses them before Redis is full, and no unfinished work is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from pydantic import BaseModel, Field
from support.apps import ProbeSettings
from support.http_gateway import Site, gateway_settings, serving
from support.redis_servers import UNSYNCED
from support.services import announced, running
from support.stack import stage
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.gateway.http.gateway import MOST_CALLS
from shared.bus import Bus
from shared.contracts import TOOL_REQUEST
from shared.participant.registry import MOST_WAITING, RELEASE, ReplicaInfo, announcing
from shared.participant.room import LargeMessages, TooMuchUnderWay
from shared.participant.tool import Run, ToolResult, tool_service
from shared.records.journal import EntryType

MEMORY = 64 * 1024**2
LARGE = "x" * 3_000_000


class Sink(BaseModel):
    """Takes a text and keeps nothing of it. Call it in tests."""

    name: str = Field(description="What the call is counted as")
    text: str = Field(default="", description="Anything")
    seconds: float = Field(default=0.0, description="How long to take")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis with little memory."""
    with EmbeddedRedis(tmp_path / "redis", extra={**UNSYNCED, "maxmemory": str(MEMORY)}) as server:
        yield server


@dataclass
class Place:
    """runs: the number of runs of each call, by its name."""

    site: Site
    raw: redis.Redis
    ann: httpx.AsyncClient
    bob: httpx.AsyncClient
    runs: Counter[str]


@pytest.fixture
async def place(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Place]:
    """A gateway, a tool with sixteen calls at once, and two users. The janitor runs every five seconds."""
    url, runs = redis_server.url, Counter[str]()

    @asynccontextmanager
    async def opened(_settings: ProbeSettings) -> AsyncIterator[Run[Sink]]:
        async def run(args: Sink) -> ToolResult:
            runs[args.name] += 1
            await asyncio.sleep(args.seconds)
            return ToolResult("done")

        yield run

    sink = tool_service("sink", Sink, ProbeSettings, opened)
    with redis.Redis.from_url(url) as raw:
        async with AsyncExitStack() as stack:
            settings = ProbeSettings(redis_url=url, data_dir=tmp_path, heartbeat=1, drain=0.5, concurrency=16)
            await stack.enter_async_context(running(sink, settings))
            site = await stack.enter_async_context(serving(gateway_settings(url, tmp_path, heartbeat=1, bus_wait=30)))
            await announced(url, "sink")
            ann, bob = [await stack.enter_async_context(await site.key(name)) for name in ("ann", "bob")]
            yield Place(site, raw, ann, bob, runs)


async def call(
    user: httpx.AsyncClient, name: str, seconds: float, text: str = "", tool: str = "sink"
) -> httpx.Response:
    return await user.post(f"/tools/{tool}/call", json={"args": {"name": name, "text": text, "seconds": seconds}})


def outcome(answer: httpx.Response) -> tuple[int, str | None]:
    """Return the status, and the code of a refusal or the error of a call."""
    error = answer.json()["error"]
    return answer.status_code, error["code"] if isinstance(error, dict) else error


async def test_small_call_survives_another_users_large_ones(place: Place) -> None:
    small = asyncio.create_task(call(place.ann, "small", 8.0))
    await eventually(lambda: place.runs["small"])
    large = [asyncio.create_task(call(place.bob, f"large {n}", 7.0, LARGE)) for n in range(20)]
    answers = Counter([outcome(answer) for answer in await asyncio.gather(*large)])
    # Two of them fit into one user's share.
    assert answers == {(200, None): 2, (429, "too_many_requests"): 18}
    assert outcome(await small) == (200, None)
    assert set(place.runs.values()) == {1}
    # The user may call again when they have ended.
    assert outcome(await call(place.bob, "again", 0, LARGE)) == (200, None)


async def test_large_calls_of_many_users_leave_room_for_small_ones(place: Place) -> None:
    async with AsyncExitStack() as stack:
        users = [await stack.enter_async_context(await place.site.key(f"user-{n}")) for n in range(24)]
        large = [asyncio.create_task(call(user, f"large {n}", 7.0, LARGE)) for n, user in enumerate(users)]
        await eventually(lambda: len(place.runs) >= 4)
        small = [await call(place.ann, f"small {n}", 0) for n in range(10)]
        assert {outcome(answer) for answer in small} == {(200, None)}
        answers = await asyncio.gather(*large)
        assert {outcome(answer) for answer in answers} == {(200, None), (503, "bus_full")}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert "65,536 bytes" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
    assert set(place.runs.values()) == {1}


async def test_calls_of_one_user_in_progress_are_bounded(place: Place) -> None:
    asked = [asyncio.create_task(call(place.bob, f"slow {n}", 60.0)) for n in range(MOST_CALLS)]
    await eventually(lambda: len(place.runs) == MOST_CALLS)
    refused = await call(place.bob, "more", 0)
    assert outcome(refused) == (429, "too_many_requests")
    assert int(refused.headers["retry-after"]) > 0
    assert f"{MOST_CALLS} tool calls of yours are in progress" in refused.json()["error"]["message"]
    # calls whose client has left do not count
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)

    async def accepted() -> bool:
        # the worker still runs the calls: an unknown tool is answered without it
        return (await call(place.bob, "x", 0, tool="none")).status_code == 404

    await eventually(accepted)


async def test_call_of_a_user_runs_beside_many_of_another(place: Place) -> None:
    flood = [asyncio.create_task(call(place.bob, f"slow {n}", 2.0)) for n in range(60)]
    await eventually(lambda: len(place.runs) == MOST_CALLS)
    assert outcome(await call(place.ann, "fast", 0)) == (200, None)
    answers = Counter([outcome(answer) for answer in await asyncio.gather(*flood)])
    assert answers == {(200, None): MOST_CALLS, (429, "too_many_requests"): 60 - MOST_CALLS}
    assert outcome(await call(place.bob, "again", 0)) == (200, None)


ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "query": ("/query?wait=false", {"query": "go on", "messages": [{"role": "user", "content": LARGE}]}),
    "response": ("/v1/responses", {"background": True, "input": [{"role": "user", "content": LARGE[:390_000]}] * 4}),
}


@pytest.mark.parametrize(("path", "body"), ASKING.values(), ids=ASKING)
async def test_large_queries_of_one_user_are_bounded(place: Place, path: str, body: dict[str, Any]) -> None:
    answers = [outcome_of_query(await place.bob.post(path, json=body)) for _ in range(4)]
    assert answers == ["", "", "too_many_requests", "too_many_requests"]
    other = await place.ann.post("/query?wait=false", json={"query": "hello"})
    assert other.status_code == 202
    # Answered queries do not count.
    place.raw.xgroup_create("local2:query.received", "generator", "$")
    assert outcome_of_query(await place.bob.post(path, json=body)) == ""


def outcome_of_query(answer: httpx.Response) -> str:
    """Return the code of a refusal; empty for an accepted query."""
    if answer.is_success:
        return ""
    assert answer.status_code == 429
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize(("worker", "name"), [("web_x", "web_x"), ("mcp", "server__x")])
async def test_calls_of_an_idle_untrusted_worker_are_refused(
    worker: str, name: str, place: Place, redis_server: EmbeddedRedis
) -> None:
    stream = TOOL_REQUEST.for_tool(name).stream
    place.raw.xgroup_create(stream, worker, "0", mkstream=True)
    tool = {"type": "function", "function": {"name": name, "description": "x", "parameters": {}}}
    info = ReplicaInfo(worker, "r1", "ready", 1, 1, tools=[tool], release=RELEASE)
    async with Bus(redis_server.url, "test/1") as bus:
        await bus.link.pipe(announcing(info, 60_000))
        await bus.link.pipe([("XADD", stream, "*", "payload", "{}") for _ in range(MOST_WAITING + 1)])

        async def refused() -> bool:
            answer = await call(place.ann, "x", 0, tool=name)
            return answer.status_code == 200 and f"too many calls of {name} wait" in answer.json()["error"]

        await eventually(refused)
        before = place.raw.xlen(stream)
        assert await refused()
        assert place.raw.xlen(stream) == before >= MOST_WAITING
    # Calls of other tools still work.
    assert outcome(await call(place.ann, "x", 0)) == (200, None)


async def test_renamed_message_still_counts_before_later_ones(redis_server: EmbeddedRedis) -> None:
    size = 6_000_000
    async with Bus(redis_server.url, "test/1") as bus:
        large = LargeMessages(bus)
        await large.admit("ann", "asked", size)
        second = asyncio.create_task(large.admit("ann", "second", size))
        # the second message is counted and waits for Redis
        await asyncio.sleep(0)
        large.rename("ann", "asked", "1-0")
        with pytest.raises(TooMuchUnderWay, match="wait until one of them"):
            await second
        large.ended("ann", "1-0")
        await large.admit("ann", "second", size)


async def test_large_call_of_a_model_in_a_full_redis_is_an_error_text(redis_server: EmbeddedRedis) -> None:
    rules = [
        {"when": {"tool_results": 0},
         "respond": {"tool_calls": [{"name": "probe", "args": {"text": "x" * 80_000}}]}},
        {"respond": {"text": "It is done."}},
    ]  # fmt: skip
    with redis.Redis.from_url(redis_server.url) as raw:
        async with stage(redis_server.url, rules, probes=1) as on:
            while raw.info("memory")["used_memory"] < 0.8 * MEMORY:
                raw.rpush("ballast", b"x" * 500_000)
            query_id = await on.ask("go")
            assert await on.answer(query_id) == "It is done."
            told = on.server.requests[-1].body["messages"][-1]["content"]
            result = await on.seen(query_id, EntryType.TOOL_RESULT)
    assert told.startswith("[tool error: the bus is nearly out of memory")
    assert result.value()["error"].startswith("the bus is nearly out of memory")
