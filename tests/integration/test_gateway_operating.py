"""Sessions, feedback, tools, participants, the bus, dead letters, metrics, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openapi_spec_validator
import pytest
import redis
from fastapi import FastAPI
from pydantic import BaseModel, Field
from support.backups import run_local2
from support.described import LINES, SSE, event_trouble
from support.http_gateway import (
    ADMIN_KEY,
    FACTS,
    FakeGenerator,
    Site,
    _serves,
    client,
    events,
    gateway_settings,
    generating,
    serving,
)
from support.services import announced, running
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.gateway.http.errors import install
from shared.bus import Bus
from shared.bus.keys import journal_key, user_sessions_key
from shared.errors import ToolError
from shared.participant.registry import Registry
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service
from shared.records.events import MODELS
from shared.records.journal import EntryType
from shared.records.sessions import Sessions, Turn


class Echo(BaseModel):
    """Says what it is given. Call it in tests."""

    text: str = Field(min_length=1, description="What to say")


@contextlib.asynccontextmanager
async def open_echo(settings: Settings) -> AsyncIterator[Run[Echo]]:
    async def run(args: Echo) -> ToolResult:
        if args.text == "fail":
            raise ToolError("echo failed: 503")
        return ToolResult(args.text, {"length": len(args.text)})

    yield run


async def test_all_turns_of_a_session_are_shown_in_pages(site: Site, bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("long", "admin", "title")
    turns = [Turn(f"{n}-0", f"q{n}", f"a{n}", n) for n in range(1, 131)]
    await bus.link.pipe([c for turn in turns for c in sessions.appending("long", "A", turn)])
    page = (await site.http.get("/sessions/long")).json()
    assert ([t["query"] for t in page["turns"]], page["total"]) == ([f"q{n}" for n in range(81, 131)], 130)
    found = page["turns"]
    while page["earlier"]:
        params = {"before": page["earlier"], "limit": 30}
        page = (await site.http.get("/sessions/long", params=params)).json()
        found = page["turns"] + found
    assert [t["query"] for t in found] == [f"q{n}" for n in range(1, 131)]
    for wrong in ({"limit": 0}, {"limit": 201}):
        assert (await site.http.get("/sessions/long", params=wrong)).status_code == 422
    for before in ("x", "1", "-", "1-2-3", "9" * 40 + "-1"):
        refused = await site.http.get("/sessions/long", params={"before": before})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_query_id"), before
    shown = await asyncio.to_thread(run_local2, site.url, ADMIN_KEY, "sessions", "show", "long")
    assert "80 earlier turns" in shown.output
    assert "q81" in shown.output
    assert "q80" not in shown.output
    everything = await asyncio.to_thread(run_local2, site.url, ADMIN_KEY, "sessions", "show", "long", "--all")
    assert [line for line in everything.output.splitlines() if line.startswith("q")] == [t.query for t in turns]
    exported = await asyncio.to_thread(run_local2, site.url, ADMIN_KEY, "export", "sessions")
    assert [t["query"] for t in json.loads(exported.output)["turns"]] == [t.query for t in turns]


async def test_sessions_are_listed_shown_and_really_deleted(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    for number in range(3):
        body = {"query": f"say {number}", "session_id": f"s-{number}"}
        assert (await site.http.post("/query", json=body)).status_code == 200
    listed = (await site.http.get("/sessions", params={"limit": 2})).json()
    assert [session["session_id"] for session in listed["sessions"]] == ["s-2", "s-1"]
    assert listed["sessions"][0]["title"] == "say 2"
    rest = (await site.http.get("/sessions", params={"limit": 2, "offset": 2})).json()
    assert [session["session_id"] for session in rest["sessions"]] == ["s-0"]
    shown = (await site.http.get("/sessions/s-0")).json()
    assert [turn["answer"] for turn in shown["turns"]] == ["You said: 0"]
    # This generator has no operation for messages.
    assert shown["messages"] is None
    assert shown["messages_missing"] == "generator is not available: no generator is running"
    open_query = asyncio.create_task(site.http.post("/query", json={"query": "slow x", "session_id": "s-0"}))
    await eventually(lambda: len(fake.started) == 4)
    deleted = (await site.http.delete("/sessions/s-0")).json()
    assert deleted == {"session_id": "s-0", "deleted": True, "cancelled": [fake.started[-1]]}
    assert (await open_query).json()["state"] == "cancelled"
    assert (await site.http.get("/sessions/s-0")).status_code == 404
    assert (await site.http.delete("/sessions/s-0")).status_code == 404
    for query_id in (shown["turns"][0]["query_id"], fake.started[-1]):
        assert (await site.http.get(f"/queries/{query_id}")).status_code == 404
    assert not raw.exists(f"local2:journal:{shown['turns'][0]['query_id']}:A")
    assert not list(raw.scan_iter("local2:session:{s-0}:turns*"))
    assert len((await site.http.get("/sessions")).json()["sessions"]) == 2


@pytest.mark.parametrize(
    ("given", "sentiment"),
    [({"stars": 5}, "positive"), ({"stars": 4}, "positive"), ({"stars": 2}, "negative"), ({"stars": 1}, "negative"),
     ({"stars": 3}, "positive"), ({"stars": 3, "sentiment": "negative"}, "negative"),
     ({"sentiment": "negative", "comment": "wrong"}, "negative")],
)  # fmt: skip
async def test_feedback_is_published(
    site: Site, fake: FakeGenerator, raw: redis.Redis, given: dict[str, Any], sentiment: str
) -> None:
    told = (await site.http.post("/query", json={"query": "say x"})).json()
    response = await site.http.post("/feedback", json={"query_id": told["query_id"], **given})
    assert (response.status_code, response.json()["sentiment"]) == (202, sentiment)
    ((_, fields),) = raw.xrange("local2:user.feedback")
    payload = json.loads(fields[b"payload"])
    assert payload == {
        "query_id": told["query_id"], "session_id": told["session_id"], "user_id": "admin", "respondent_id": "A",
        "sentiment": sentiment, "stars": given.get("stars"), "comment": given.get("comment"), "withdrawn": False,
        "parts": [part for part, name in (("thumb", "sentiment"), ("stars", "stars")) if name in given],
    }  # fmt: skip
    assert fields[b"correlation_id"].decode() == told["query_id"]


@pytest.mark.parametrize(("what", "parts"), [("", ["thumb", "stars"]), ("?what=thumb", ["thumb"])])
async def test_a_withdrawal_is_published(
    site: Site, fake: FakeGenerator, raw: redis.Redis, what: str, parts: list[str]
) -> None:
    told = (await site.http.post("/query", json={"query": "say x"})).json()
    path = f"/feedback/{told['query_id']}"
    assert (await site.http.delete(f"{path}?what=comment")).status_code == 422
    response = await site.http.delete(path + what)
    assert (response.status_code, response.json()) == (202, {"query_id": told["query_id"], "withdrawn": parts})
    ((_, fields),) = raw.xrange("local2:user.feedback")
    payload = json.loads(fields[b"payload"])
    assert (payload["withdrawn"], payload["parts"], payload["sentiment"]) == (True, parts, None)
    assert fields[b"correlation_id"].decode() == told["query_id"]


async def test_a_tool_is_called_over_the_bus_without_a_model(redis_url: str, tmp_path: Path, site: Site) -> None:
    assert (await site.http.get("/tools")).json() == {"tools": []}
    missing = await site.http.post("/tools/echo/call", json={"args": {}})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    service = tool_service("echo", Echo, Settings, open_echo)
    settings = Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5, drain=0.5, log_level="error")
    async with running(service, settings):
        await announced(redis_url, "echo")

        async def listed() -> bool:
            return bool((await site.http.get("/tools")).json()["tools"])

        await eventually(listed)
        (tool,) = (await site.http.get("/tools")).json()["tools"]
        assert tool["function"]["name"] == "echo"
        told = (await site.http.post("/tools/echo/call", json={"args": {"text": "hello"}})).json()
        assert {**told, "duration_ms": 0} == {"result": "hello", "error": None, "data": {"length": 5}, "duration_ms": 0}
        failed = await site.http.post("/tools/echo/call", json={"args": {"text": "fail"}})
        assert (failed.status_code, failed.json()["error"]) == (200, "echo failed: 503")
        wrong = (await site.http.post("/tools/echo/call", json={"args": {}})).json()
        assert wrong["error"] == "missing text argument"

    async def gone() -> bool:
        return (await site.http.get("/tools")).json() == {"tools": []}

    await eventually(gone)
    away = await site.http.post("/tools/echo/call", json={"args": {"text": "x"}})
    assert (away.status_code, away.json()["error"]["code"]) == (503, "tool_unavailable")


async def test_participants_show_replicas_and_their_work(site: Site, fake: FakeGenerator) -> None:
    running_query = asyncio.create_task(site.http.post("/query", json={"query": "slow x"}))
    await eventually(lambda: fake.started)

    async def busy() -> bool:
        found = {row["name"]: row for row in (await site.http.get("/participants")).json()["participants"]}
        (replica,) = found["generator"]["replicas"]
        assert replica["facts"] == FACTS
        assert found["gateway"]["replicas"][0]["state"] == "ready"
        work = {"subject": "query.received", "backlog": 0, "pending": 1}
        return bool(found["generator"]["work"] == [work] and replica["in_flight"] == 1)

    await eventually(busy)
    fake.gate.set()
    await running_query


async def test_run_time_settings_reach_every_replica_and_later_ones(
    redis_url: str, tmp_path: Path, site: Site, fake: FakeGenerator
) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as second:
        described = (await site.http.get("/participants/gateway/settings")).json()
        assert (described["values"]["max_backlog"], described["kept"]) == (1_000, [])
        assert "max_backlog" in described["schema"]["properties"]
        for values, words in [
            ({"max_backlog": -5}, "max_backlog: -5 is less than the minimum"),
            ({"max_backlog": "many"}, "max_backlog: 'many' is not of type"),
            ({"port": 1}, "port: not a run-time setting"),
            ({"max_backlog": "x" * 5_000}, "max_backlog: the value is not of type"),
        ]:
            refused = await site.http.patch("/participants/gateway/settings", json=values)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_setting")
            assert refused.json()["error"]["message"].startswith(words)
        changed = await site.http.patch(
            "/participants/gateway/settings", json={"deadline_seconds": 77, "max_backlog": 9}
        )
        assert changed.json()["values"]["max_backlog"] == 9
        assert changed.json()["kept"] == ["deadline_seconds", "max_backlog"]

        async def applied(where: Site) -> bool:
            await where.http.post("/query", json={"query": "say x"})
            sent = fake.queries[-1].envelope
            return sent.deadline is not None and abs(sent.deadline - sent.time - 77_000) < 1_000

        for replica in (site, second):
            await eventually(lambda replica=replica: applied(replica))
    async with serving(gateway_settings(redis_url, tmp_path)) as third:
        assert await applied(third)
        shown = (await third.http.get("/participants/gateway/settings")).json()
        assert shown["values"]["max_backlog"] == 9
        # it is seen what holds against file and environment
        assert shown["kept"] == ["deadline_seconds", "max_backlog"]
    assert (await site.http.get("/participants/nobody/settings")).status_code == 404
    assert (await site.http.patch("/participants/nobody/settings", json={})).status_code == 404


async def test_streams_are_shown_with_lag_and_age(site: Site, raw: redis.Redis) -> None:
    raw.xgroup_create("local2:query.received", "generator", "0", mkstream=True)
    await site.http.post("/query?wait=false", json={"query": "say x"})
    found = {row["subject"]: row for row in (await site.http.get("/bus/streams")).json()["streams"]}
    queue = found["query.received"]
    assert queue["length"] == 1
    assert queue["oldest_seconds"] < 30
    assert queue["groups"] == [{"name": "generator", "consumers": 0, "lag": 1, "pending": 0}]


async def test_the_bus_is_shown_live_by_subject(site: Site, raw: redis.Redis) -> None:
    """Subjects of tools that appear later are found too, and entries of any form are shown."""
    raw.xadd("local2:answer.dialog", {"payload": '{"answer":"old"}'})
    raw.xadd("local2:answer.dialog", {"payload": '{"answer":"older than now"}'})
    seen: list[tuple[str, str, str]] = []
    path = "/bus/events?subject=tool.*&subject=answer.dialog&last=1"
    async with site.http.stream("GET", path) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            seen = events(text)
            # it says so when it follows every subject
            if len(seen) == 1 and ": keep-alive" in text and not raw.exists("local2:tool.request.late"):
                raw.sadd("local2:tools", "late")
                raw.xadd("local2:tool.request.late", {"payload": b"\xff not json"})
                raw.xadd("local2:query.cancel", {"payload": "{}"})
                raw.xadd("local2:answer.dialog", {"payload": '{"answer":"new"}', "session_id": "s"})
            if len(seen) == 3:
                break
    found = {event[1]: json.loads(event[2]) for event in seen[1:]}
    assert json.loads(seen[0][2])["payload"] == {"answer": "older than now"}
    assert found["answer.dialog"]["payload"] == {"answer": "new"}
    assert found["answer.dialog"]["session_id"] == "s"
    assert found["tool.request.late"]["payload"] == "\\xff not json"


async def test_dead_letters_are_listed_replayed_and_dropped(site: Site, raw: redis.Redis) -> None:
    for number in range(5):
        letter = {
            "stream": "local2:user.feedback", "group": "reward", "entry_id": f"{number + 1}-0", "deliveries": 5,
            "reason": f"bad {number}", "fields": {"payload": f"entry {number}"},
        }  # fmt: skip
        raw.xadd("local2:dead.letter", {"payload": json.dumps(letter)})
    raw.xadd("local2:dead.letter", {"payload": b"\xff"})
    first = (await site.http.get("/dead-letters?limit=4")).json()
    assert [letter["reason"] for letter in first["dead_letters"]] == [f"bad {n}" for n in range(4)]
    assert first["total"] == 6
    second = (await site.http.get("/dead-letters", params={"limit": 4, "cursor": first["next"]})).json()
    assert second["next"] is None
    assert second["dead_letters"][0]["reason"] == "bad 4"
    assert second["dead_letters"][1]["malformed"]
    one = first["dead_letters"][0]["id"]
    assert (await site.http.post(f"/dead-letters/{one}/replay")).status_code == 200
    assert [fields for _, fields in raw.xrange("local2:user.feedback")] == [{b"payload": b"entry 0"}]
    assert (await site.http.post(f"/dead-letters/{one}/replay")).status_code == 404
    malformed = await site.http.post(f"/dead-letters/{second['dead_letters'][1]['id']}/replay")
    assert (malformed.status_code, malformed.json()["error"]["code"]) == (422, "malformed")
    two = first["dead_letters"][1]["id"]
    assert (await site.http.delete(f"/dead-letters/{two}")).json() == {"dropped": 1}
    assert (await site.http.delete(f"/dead-letters/{two}")).status_code == 404
    assert (await site.http.delete("/dead-letters")).json() == {"dropped": 4}
    assert (await site.http.get("/dead-letters")).json() == {"dead_letters": [], "total": 0, "next": None}


async def test_metrics_count_requests_and_measure_the_bus(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    told = (await site.http.post("/query", json={"query": "say x"})).json()
    await site.http.get(f"/queries/{told['query_id']}")
    await site.http.get("/nowhere")
    text = (await site.http.get("/metrics")).text
    for line in (
        'local2_http_requests_total{method="POST",route="/query",status="200"} 1.0',
        'local2_http_requests_total{method="GET",route="/queries/{query_id}",status="200"} 1.0',
        'local2_http_requests_total{method="GET",route="other",status="404"} 1.0',
        'local2_queries_accepted_total{mode="chat"} 1.0',
        'local2_replicas{participant="generator"} 1.0',
        'local2_group_lag{group="generator",stream="local2:query.received"} 0.0',
        "local2_bus_up 1.0",
        "local2_dead_letters 0.0",
        "local2_sse_streams_open 0.0",
    ):
        assert line in text
    assert told["query_id"] not in text


async def test_ready_says_which_part_is_missing(redis_url: str, tmp_path: Path, site: Site) -> None:
    bare = await site.http.get("/ready")
    assert bare.status_code == 503
    parts = bare.json()["parts"]
    assert parts["bus"]["ok"]
    assert parts["generator"]["reason"] == "no generator is running"
    assert not parts["model"]["ok"]
    async with generating(redis_url, tmp_path):
        ready = await site.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["parts"]["model"] == {
            "ok": True, "reason": None, "backend": "scripted", "model": "scripted:1b", "demo": False
        }  # fmt: skip


async def test_a_stack_that_starts_is_ready_when_its_tools_are_there(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5, drain=0.5, log_level="error")
    expecting = gateway_settings(redis_url, tmp_path, expects=["echo"])
    async with serving(expecting) as site, generating(redis_url, tmp_path):
        early = await site.http.get("/ready")
        assert early.status_code == 503
        assert early.json()["parts"]["tools"] == {
            "ok": False, "reason": "waiting for the tools of echo", "missing": ["echo"]
        }  # fmt: skip
        async with running(tool_service("echo", Echo, Settings, open_echo), settings):
            await announced(redis_url, "echo")
            there = await site.http.get("/ready")
            assert there.status_code == 200
            assert there.json()["parts"]["tools"] == {"ok": True, "reason": None, "missing": []}
        # a tool that never comes, or goes later, does not keep the others from being used
        monkeypatch.setattr("services.gateway.http.gateway.SETTLING", 0.0)
        late = await site.http.get("/ready")
        assert late.status_code == 200
        assert late.json()["parts"]["tools"] == {"ok": True, "reason": None, "missing": ["echo"]}


async def test_who_starts_hears_of_tools_as_soon_as_they_come(redis_url: str, tmp_path: Path, bus: Bus) -> None:
    # without the look of a beginning nothing would be looked up for an hour
    registry = Registry(bus, heartbeat=7200.0)
    looking = asyncio.create_task(registry.run())
    assert await registry.tools() == {}
    settings = Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5, drain=0.5, log_level="error")
    async with running(tool_service("echo", Echo, Settings, open_echo), settings):
        await eventually(registry.tools, 20, "the tool is offered")
    looking.cancel()


async def test_ready_names_the_models_state_and_the_demonstration_model(
    redis_url: str, tmp_path: Path, site: Site
) -> None:
    reason = "nothing answers at http://127.0.0.1:11434"
    async with generating(redis_url, tmp_path, backend_ok=False, backend_reason=reason):
        away = await site.http.get("/ready")
        assert (away.status_code, away.json()["parts"]["model"]["reason"]) == (503, reason)
    async with generating(redis_url, tmp_path, gpu_note="the model runs on the CPU"):
        slow = await site.http.get("/ready")
        assert (slow.status_code, slow.json()["parts"]["model"]["note"]) == (200, "the model runs on the CPU")
    facts = {"server": "Ollama", "window": 8192}
    async with generating(redis_url, tmp_path, demo=True, model_facts=facts):
        model = (await site.http.get("/ready")).json()["parts"]["model"]
        assert (model["demo"], model["facts"]) == (True, facts)
        assert "demonstration model" in model["note"]


async def test_without_redis_the_gateway_lives_answers_503_and_comes_back_by_itself(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    settings = gateway_settings(redis_server.url, tmp_path, bus_wait=0.5)
    redis_server.kill()
    async with serving(settings, ready=False) as site:

        async def away() -> None:
            assert (await site.http.get("/health")).status_code == 200
            ready = await site.http.get("/ready")
            assert ready.status_code == 503
            assert not ready.json()["parts"]["bus"]["ok"]
            for method, path in [
                ("POST", "/query"),
                ("GET", "/sessions"),
                ("GET", "/queries/1-0"),
                ("GET", "/bus/streams"),
            ]:
                response = await site.http.request(method, path, json={"query": "x"} if method == "POST" else None)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "bus_unavailable"), path
                assert "retry-after" in response.headers
            assert "local2_bus_up 0.0" in (await site.http.get("/metrics")).text
            async with client(site.url, "a key that is not cached") as stranger:
                assert (await stranger.get("/sessions")).status_code == 503

        async def back() -> bool:
            return await _serves(site.http)

        await away()
        redis_server.start()
        await eventually(back)
        redis_server.kill()
        await away()
        redis_server.start()
        await eventually(back)
        async with generating(redis_server.url, tmp_path):
            answered = await site.http.post("/query", json={"query": "say hello"})
            assert answered.json()["answer"] == "You said: hello"


async def test_a_stream_lives_through_a_restart_of_redis(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    settings = gateway_settings(redis_server.url, tmp_path)
    async with serving(settings) as site, generating(redis_server.url, tmp_path) as fake:
        text, restarted = "", False
        stream = site.http.stream("POST", "/query", json={"query": "slow x"}, headers={"Accept": "text/event-stream"})
        async with stream as response:
            async for part in response.aiter_text():
                text += part
                if "You " in text and not restarted:
                    restarted = True
                    await asyncio.to_thread(redis_server.stop)
                    await asyncio.to_thread(redis_server.start)
                    fake.gate.set()
        found = events(text)
        assert found[-1][1] == "completed"
        whole = await site.http.get(f"/queries/{response.headers['x-query-id']}/events")
        assert found == events(whole.text)


async def test_a_slow_reader_of_many_events_loses_none(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    """More than the gateway holds for a client that does not read."""
    body = {"query": "many 6000"}
    async with site.http.stream("POST", "/query", json=body, headers={"Accept": "text/event-stream"}) as response:
        journal = journal_key(response.headers["x-query-id"], "A")

        def complete() -> bool:
            newest = raw.xrevrange(journal, count=1)
            return bool(newest) and newest[0][1][b"type"] == b"completed"

        await eventually(complete, 120, every=0.1)
        text = (await response.aread()).decode()
    found = [json.loads(data)["text"] for _, kind, data in events(text) if kind == "answer"]
    assert found == [f"{number} " for number in range(6_000)]


async def test_the_description_is_complete(site: Site) -> None:
    from jsonschema import Draft202012Validator

    described = (await site.http.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    openapi_spec_validator.validate(described)
    assert set(described["paths"]) == {
        "/health", "/ready", "/queries", "/query", "/queries/{query_id}", "/queries/{query_id}/events",
        "/queries/{query_id}/cancel", "/feedback", "/feedback/{query_id}",
        "/sessions", "/sessions/import", "/sessions/{session_id}", "/sessions/{session_id}/title",
        "/sessions/{session_id}/turns/{query_id}",
        "/tools", "/tools/{name}/call", "/participants",
        "/participants/{name}/settings", "/personas",
        "/bus/streams", "/bus/events", "/dead-letters", "/dead-letters/{letter_id}",
        "/dead-letters/{letter_id}/replay", "/keys", "/keys/link", "/keys/redeem", "/keys/{key_id}",
        "/v1/models", "/v1/models/{name}", "/v1/chat/completions", "/v1/responses", "/v1/responses/{name}",
        "/v1/responses/{name}/cancel", "/v1/embeddings", "/metrics",
        "/openapi.json", "/memory", "/memory/engrams", "/memory/engrams/{engram_id}", "/memory/topics",
        "/memory/topics/{topic}", "/memory/export", "/memory/import", "/backup", "/restore",
        "/files", "/files/{file_id}", "/documents", "/retention",
        "/preferences/leaderboard", "/preferences/judge", "/preferences/verdicts",
        "/preferences/export", "/preferences/export/counts", "/preferences/consent",
        "/experiments", "/experiments/{name}", "/experiments/{name}/stop", "/experiments/{name}/promote",
        "/experiments/{name}/revert",
        "/knowledge/entities", "/knowledge/export", "/knowledge/facts", "/knowledge/facts/{fact_id}",
        "/knowledge/graph",
    }  # fmt: skip
    names = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            names.append(operation["operationId"])
            success = [r for code, r in operation["responses"].items() if code.startswith("2") and "content" in r]
            assert any("example" in kind for r in success for kind in r["content"].values()), (method, path)
            if path not in ("/health", "/ready", "/openapi.json", "/keys/redeem"):
                assert operation["security"], (method, path)
                assert "401" in operation["responses"], (method, path)
            for code, answer in operation["responses"].items():
                for media, kind in answer.get("content", {}).items():
                    assert kind["schema"], (method, path, code, media)
                    assert ("x-itemSchema" in kind) == (media in (SSE, LINES)), (method, path, code, media)
                    if int(code if code.isdigit() else 500) >= 400 and path != "/ready":
                        assert kind["schema"] == {"$ref": "#/components/schemas/Problem"}, (method, path, code)
            for parameter in operation.get("parameters", []):
                Draft202012Validator.check_schema(parameter["schema"])
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in names)
    assert {"ask", "query_events", "cancel_query", "give_feedback", "list_sessions"} < set(names)
    for name, schema in described["components"]["schemas"].items():
        assert re.fullmatch(r"[A-Z][A-Za-z]+", name), name
        Draft202012Validator.check_schema(schema)
        # a generator gives a value in the class the name of the class
        assert re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() not in schema.get("properties", {}), name
        assert not [part for part in schema.get("properties", {}).values() if "default" in part], name
    text = json.dumps(described)
    references = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert references <= set(described["components"]["schemas"])
    async with client(site.url, None) as stranger:
        assert (await stranger.get("/openapi.json")).json() == described


async def test_every_event_of_a_journal_is_described(site: Site, fake: FakeGenerator) -> None:
    for query in ("tool me", "restart here", "fail internal"):
        streamed = await site.http.post("/query", json={"query": query}, headers={"Accept": SSE})
        for entry_id, kind, data in events(streamed.text):
            assert event_trouble("JournalEvent", {"id": entry_id, "event": kind, "data": data}) is None, (kind, data)
    assert "not described" in str(event_trouble("JournalEvent", {"id": "1-0", "event": "new", "data": "{}"}))
    wrong = event_trouble("JournalEvent", {"id": "1-0", "event": "answer", "data": '{"words":"x"}'})
    assert "'text' is a required property" in str(wrong)


def test_each_type_of_a_journal_entry_has_a_shape() -> None:
    assert set(MODELS) == set(EntryType)


async def test_unexpected_fault_is_an_internal_error_without_details() -> None:
    app = FastAPI()
    install(app)

    @app.get("/")
    async def broken() -> None:
        raise RuntimeError("the secret of the house")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        response = await http.get("/")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in response.text


async def test_damaged_key_in_redis_is_an_error_of_the_bus(site: Site, raw: redis.Redis) -> None:
    raw.set(user_sessions_key("admin"), "a string")
    response = await site.http.get("/sessions")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "bus_refused")


async def test_keys_made_on_the_command_line_have_names_of_their_own(site: Site) -> None:
    async def local2(*words: str) -> tuple[int, str]:
        said = await asyncio.to_thread(run_local2, site.url, ADMIN_KEY, "keys", *words)
        return said.exit_code, said.output

    status, output = await local2("add", "laptop", "--user", "ann")
    assert status == 0
    id = output.split()[1].rstrip(",")
    status, output = await local2("add", "laptop")
    assert status == 1
    for said in (f"there is a key laptop already (id {id})", "--user ann", f"local2 keys revoke {id}"):
        assert said in output
    named = [row["name"] for row in (await site.http.get("/keys")).json()["keys"]]
    assert named.count("laptop") == 1
    assert (await local2("add", "phone", "--user", "ann"))[0] == 0
    assert (await local2("revoke", id))[0] == 0
    assert (await local2("add", "laptop", "--user", "ann"))[0] == 0
