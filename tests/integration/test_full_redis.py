"""Redis full, or its disk, or without the replicas for a write: what the HTTP interface says, what starts meanwhile,
and what a crash then costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.apps import Probe, ProbeSettings
from support.http_gateway import gateway_settings, generating, serving
from support.http_stack import ModelProcess
from support.services import announced
from support.stack import Client, Participants
from support.waiting import always, eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.contracts import DEAD_LETTER, TOOL_REQUEST, TOOL_SCHEMA, ToolRequest
from shared.participant.service import open_context
from shared.participant.tool import Tool, ToolResult, open_tools

REASONS = {
    "memory": "the bus is out of memory",
    "memory far below use": "the bus is out of memory",
    "disk": "the bus cannot write to its disk",
    "replicas": "the bus has fewer replicas than it needs for a write",
}

Fill = Callable[[bool], None]


@pytest.fixture(params=list(REASONS))
def full(request: pytest.FixtureRequest, redis_server: EmbeddedRedis, spoil: Fill) -> tuple[Fill, str]:
    """Makes `redis_server` full, or not; and what users are told then."""

    def limit(reached: bool) -> None:
        with redis.Redis.from_url(redis_server.url) as raw:
            # The janitor cannot make enough room.
            used: int = raw.info("memory")["used_memory"]
            raw.config_set("maxmemory", used // 2 if reached else 0)

    def limit_far(reached: bool) -> None:
        with redis.Redis.from_url(redis_server.url) as raw:
            raw.config_set("maxmemory", int(reached))

    def lack(replicas: bool) -> None:
        with redis.Redis.from_url(redis_server.url) as raw:
            raw.config_set("min-replicas-to-write", int(replicas))

    ways = {"memory": limit, "memory far below use": limit_far, "disk": spoil, "replicas": lack}
    return ways[request.param], REASONS[request.param]


WRITING: list[tuple[str, str, Any]] = [
    ("POST", "/query", {"query": "say more"}),
    ("POST", "/query", {"query": "say more", "session_id": "s"}),
    ("POST", "/v1/chat/completions", {"model": "local2", "messages": [{"role": "user", "content": "hello"}]}),
    ("POST", "/queries/{query_id}/cancel", None),
    ("POST", "/feedback", {"query_id": "{query_id}", "stars": 5}),
    ("DELETE", "/feedback/{query_id}", None),
    ("PATCH", "/participants/generator/settings", {"log_level": "info"}),
    ("POST", "/keys", {"name": "k", "user_id": "u"}),
    ("PUT", "/preferences/consent", {"consent": True}),
    ("POST", "/tools/probe/call", {"args": {"text": "x"}}),
    ("DELETE", "/sessions/s", None),
]
READING = (
    "/health",
    "/sessions",
    "/sessions/s",
    "/queries/{query_id}",
    "/queries/{query_id}/events",
    "/participants",
    "/participants/generator/settings",
    "/bus/streams",
    "/dead-letters",
    "/keys",
    "/metrics",
    "/v1/models",
    "/ready?for=gateway",
)


async def test_what_writes_is_refused_with_a_reason_and_what_reads_goes_on(
    full: tuple[Fill, str], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    fill, reason = full
    url = redis_server.url
    with Participants(url, "http://127.0.0.1:9", tmp_path / "people") as people:
        for name in ("probe", "reward"):
            people.start(name)
        async with serving(gateway_settings(url, tmp_path)) as site, generating(url, tmp_path):
            for name in ("probe", "reward"):
                await people.ready(name)
            asked = await site.http.post("/query", json={"query": "say it", "session_id": "s"})
            query_id = asked.json()["query_id"]
            # one that is under way, so that there is something to cancel
            slow = await site.http.post("/query?wait=false", json={"query": "slow one", "session_id": "s"})
            fill(True)
            for method, path, body in WRITING:
                target = path.replace("{query_id}", slow.json()["query_id"])
                content = None if body is None else json.dumps(body).replace("{query_id}", query_id)
                headers = {"Content-Type": "application/json"}
                refused = await site.http.request(method, target, content=content, headers=headers)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["message"]) == (503, "bus_full", reason), path
                assert int(refused.headers["Retry-After"]) > 0
            for path in READING:
                found = await site.http.get(path.replace("{query_id}", query_id))
                assert found.status_code == 200, (path, found.text)
            # as of the next heartbeat
            ready = await eventually(lambda: not_ready(site.http))
            assert (ready["bus"]["ok"], ready["bus"]["reason"], ready["bus"]["readable"]) == (False, reason, True)
            fill(False)
            stopped = await site.http.post(f"/queries/{slow.json()['query_id']}/cancel")
            assert stopped.is_success
            await eventually(lambda: is_ready(site.http))
            assert (await site.http.delete("/sessions/s")).is_success
            assert (await site.http.get("/sessions/s")).status_code == 404


async def not_ready(http: httpx.AsyncClient) -> dict[str, Any] | None:
    """The parts, once one of them is not ready."""
    found = await http.get("/ready")
    return found.json()["parts"] if found.status_code == 503 else None


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/ready")).status_code == 200


async def test_everybody_who_starts_waits_and_the_gateway_reads(
    full: tuple[Fill, str], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    fill, reason = full
    names = ("generator", "memory", "critic", "reward", "probe")
    async with serving(gateway_settings(redis_server.url, tmp_path)) as site:
        made = await site.http.post("/keys", json={"name": "u", "user_id": "u"})
        fill(True)
        with Participants(redis_server.url, "http://127.0.0.1:9", tmp_path / "people") as people:
            for name in names:
                people.start(name)
            settings = gateway_settings(redis_server.url, tmp_path / "other", admin_key="another-administrator's-key")
            async with serving(settings, ready=False) as other:
                headers = {"Authorization": f"Bearer {made.json()['key']}"}

                async def reads() -> bool:
                    return (await other.http.get("/sessions", headers=headers)).status_code == 200

                await eventually(reads)
                refused = await other.http.post("/query", json={"query": "say it"}, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_full")
                assert (await other.http.get("/ready")).json()["parts"]["bus"]["reason"] == reason
                # long enough for all of them to start, and for several tries
                await eventually(lambda: all("presence.waiting" in one.log() for one in people.started), 30)
                await always(lambda: all(one.alive for one in people.started), 2.0)
                fill(False)
                for name in names:
                    await announced(redis_server.url, name, timeout=30)
                await announced(redis_server.url, "gateway", 2)
                # the administrator's key of the second gateway is known to the first one now
                hers = {"Authorization": "Bearer another-administrator's-key"}

                async def known() -> bool:
                    return (await site.http.get("/keys", headers=hers)).status_code == 200

                await eventually(known)


async def test_a_worker_whose_redis_fills_up_while_it_opens_its_tool_serves_and_announces_it_later(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    settings = ProbeSettings(redis_url=redis_server.url, data_dir=tmp_path / "probe", heartbeat=0.2)

    async def run(_args: Probe, _request: ToolRequest) -> ToolResult:
        raise AssertionError

    @contextlib.asynccontextmanager
    async def tools(_settings: ProbeSettings) -> AsyncIterator[list[Tool[Probe]]]:
        yield [Tool("probe", Probe, run)]

    with redis.Redis.from_url(redis_server.url) as raw:
        async with open_context("probe", settings) as context:
            raw.config_set("maxmemory", 1)
            async with open_tools(context, tools) as works:
                assert [work.stream for work in works] == [TOOL_REQUEST.for_tool("probe").stream]
                await asyncio.sleep(0.1)
                raw.config_set("maxmemory", 0)
                await eventually(lambda: raw.xlen(TOOL_SCHEMA.stream) == 1)


async def test_a_process_that_is_told_to_stop_while_redis_is_full_stops_quietly(
    full: tuple[Fill, str], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    fill, _ = full
    with Participants(redis_server.url, "http://127.0.0.1:9", tmp_path / "people") as people:
        for name in ("generator", "critic"):
            people.start(name)
            await people.ready(name)
        fill(True)
        for one in people.started:
            one.process.terminate()
        await eventually(lambda: not any(one.alive for one in people.started), 20)
        assert [(one.process.returncode, "Traceback" in one.log()) for one in people.started] == [(0, False)] * 2
        fill(False)


@dataclass
class Asked:
    """A generator and a worker as processes; runs are counted in another Redis, where there is room (`counts`)."""

    client: Client
    people: Participants
    counts: redis.Redis


@contextlib.asynccontextmanager
async def asking(server: EmbeddedRedis, folder: Path, **values: Any) -> AsyncIterator[Asked]:
    """Yield a stack whose model calls a tool of two seconds. values: settings of the participants."""
    call = {"name": "probe", "args": {"text": "<<query>>", "seconds": 2}}
    model = ModelProcess(folder / "model.log")
    try:
        model.start()
        model.play([{"when": {"tool_results": 0}, "respond": {"tool_calls": [call]}}, {"respond": {"text": "Done."}}])
        with (
            EmbeddedRedis(folder / "effects") as effects,
            redis.Redis.from_url(effects.url) as counts,
            Participants(server.url, model.url, folder / "people", effects_url=effects.url, **values) as people,
        ):
            for name in ("probe", "generator"):
                people.start(name)
                await people.ready(name)
            async with Bus(server.url, "test/client") as bus:
                yield Asked(Client(bus), people, counts)
    finally:
        model.close()


async def test_a_result_that_was_refused_is_offered_again_and_the_tool_is_not_run_again(
    full: tuple[Fill, str], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    fill, _ = full
    async with asking(redis_server, tmp_path) as on:
        query_id = await on.client.ask("go", deadline=120)
        await eventually(lambda: on.counts.hexists("effects", "go"))
        fill(True)
        await eventually(lambda: on.counts.hexists("ended", "go"))
        # Redis refuses the result repeatedly, during several rounds of the janitor.
        await asyncio.sleep(4.0)
        fill(False)
        assert await on.client.answer(query_id, 30) == "Done."
        assert on.counts.hgetall("effects") == {b"go": b"1"}


@pytest.mark.parametrize("full", ["memory far below use"], indirect=True)
async def test_call_that_times_out_in_full_redis_runs_once(
    full: tuple[Fill, str], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    fill, _ = full
    async with asking(redis_server, tmp_path, tool_timeout=3) as on:
        query_id = await on.client.ask("go", deadline=120)
        await eventually(lambda: on.counts.hexists("effects", "go"))
        fill(True)
        # Longer than the call's timeout and than the generator's claim of the query.
        await asyncio.sleep(9.0)
        fill(False)
        assert await on.client.answer(query_id, 30) == "Done."
        assert on.counts.hgetall("effects") == {b"go": b"1"}


# what is refused, and who dies, have nothing to do with each other: each once
@pytest.mark.parametrize(("full", "victim"), [("memory", "generator"), ("disk", "probe")], indirect=["full"])
async def test_a_crash_while_redis_is_full_loses_nothing(
    full: tuple[Fill, str], victim: str, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    fill, _ = full
    async with asking(redis_server, tmp_path) as on:
        queries = [await on.client.ask(f"go {n}", deadline=120) for n in range(3)]
        await eventually(lambda: on.counts.hlen("effects") == 3)
        fill(True)
        await eventually(lambda: on.counts.hlen("ended") == 3)
        await asyncio.sleep(1.0)
        for one in list(on.people.alive(victim)):
            one.kill()
        on.people.start(victim)
        await asyncio.sleep(1.0)
        fill(False)
        assert [await on.client.answer(query_id, 60) for query_id in queries] == ["Done."] * 3
        await on.client.idle()
        assert await on.client.bus.link.call("XLEN", DEAD_LETTER.stream) == 0
        for query_id in queries:
            assert (await on.client.types(query_id)).count("completed") == 1
        if victim == "generator":
            assert set(on.counts.hvals("effects")) == {b"1"}, "a call ran twice"
