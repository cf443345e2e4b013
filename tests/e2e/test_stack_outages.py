"""Redis or the model goes away under HTTP clients: it is said, nothing accepted is lost, and serving goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis
from support.http_stack import SSE, HttpStack, Rules, answer_in, blocks, ended, http_stack, last_id, parsed
from support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.slow

LONG = "".join(f"w{number} " for number in range(60))
RULES: Rules = [
    # still being answered when all three have been asked, however busy the machine is
    {"when": {"user": "^long (lost|ago|gone)$"}, "respond": {"text": ["w "] * 60, "pace": 0.2}},
    {"when": {"user": "^long"}, "respond": {"text": [f"w{number} " for number in range(60)], "pace": 0.03}},
    {"respond": {"thinking": "Hm.", "text": "You said: <<query>>"}},
]
# In seconds: two of a free machine.
BACK = 2.0 * PATIENCE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    # what Redis has acknowledged it must still have after kill -9: with `everysec`, it confirms writes that are only in
    # its memory while the disk is slow to take the last second's
    with http_stack(tmp_path_factory.mktemp("stack"), RULES) as running:
        yield running


async def read_to_the_end(clients: list[httpx.AsyncClient], body: dict[str, Any], begun: asyncio.Event) -> bytes:
    """Asks and reads; when the stream breaks or is refused, goes on at the next gateway until it has the end."""
    seen = b""
    query_id = ""
    async with asyncio.timeout(30):
        turn = 0
        while not ended(seen):
            http = clients[turn % len(clients)]
            turn += 1
            headers = {"Last-Event-ID": last_id(seen)} if blocks(seen) else {}
            request = (
                http.build_request("GET", f"/queries/{query_id}/events", headers=headers)
                if query_id
                else http.build_request("POST", "/query", json=body, headers=SSE)
            )
            with contextlib.suppress(httpx.TransportError):
                response = await http.send(request, stream=True)
                try:
                    assert response.status_code in (200, 503), await response.aread()
                    query_id = response.headers.get("x-query-id", query_id)
                    async for chunk in response.aiter_bytes():
                        if response.status_code != 200:
                            continue
                        seen += chunk
                        if len(blocks(seen)) > 10:
                            begun.set()
                finally:
                    await response.aclose()
            seen = b"".join(blocks(seen))
            await asyncio.sleep(0.02)
    return seen


async def answered(http: httpx.AsyncClient, query: str) -> bool:
    response = await http.post("/query", json={"query": query})
    return response.status_code == 200 and response.json()["answer"] == f"You said: {query}"


async def serving_again(clients: list[httpx.AsyncClient], query: str) -> float:
    """Seconds until every gateway has a question answered."""
    began = time.monotonic()
    for number, http in enumerate(clients):
        await eventually(lambda http=http, n=number: answered(http, f"{query} {n}"), 10, f"gateway {number} serves")  # type: ignore[misc]
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def traffic(clients: list[httpx.AsyncClient]) -> AsyncIterator[list[tuple[int, str]]]:
    """Questions one after the other at every gateway, until the block ends; what came of each: (status, code)."""
    outcomes: list[tuple[int, str]] = []
    stop = asyncio.Event()

    async def ask(http: httpx.AsyncClient, name: str) -> None:
        number = 0
        while not stop.is_set():
            query = f"{name} asks {number}"
            number += 1
            body = {"query": query, "deadline_seconds": 8}
            response = await http.post("/query", json=body, timeout=20)
            told = response.json()
            if response.status_code == 200:
                assert told["answer"] == f"You said: {query}"
            outcomes.append((response.status_code, told.get("error", {}).get("code", "")))
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as asking:
        for number in range(4):
            asking.create_task(ask(clients[number % len(clients)], f"client {number}"))
        yield outcomes
        stop.set()


async def test_redis_killed_in_the_middle_of_an_answer_loses_nothing(stack: HttpStack) -> None:
    before = stack.pids()
    async with stack.http(0) as first, stack.http(1) as second:
        clients = [first, second]
        accepted = await first.post("/query?wait=false", json={"query": "long accepted", "session_id": "kept"})
        begun = asyncio.Event()
        reading = asyncio.create_task(
            read_to_the_end(clients, {"query": "long attached", "session_id": "attached"}, begun)
        )
        await begun.wait()
        stack.redis.kill()

        # while it is away
        at = time.monotonic()
        health, ready, asked, known = await asyncio.gather(
            first.get("/health"),
            second.get("/ready"),
            second.post("/query", json={"query": "nobody listens"}),
            first.get(f"/queries/{accepted.json()['query_id']}"),
        )
        assert time.monotonic() - at < 5
        assert health.status_code == 200
        assert ready.status_code == 503
        assert ready.json()["parts"]["bus"]["ok"] is False
        assert ready.json()["parts"]["bus"]["reason"]
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "bus_unavailable")
        assert (known.status_code, known.json()["error"]["code"]) == (503, "bus_unavailable")

        await asyncio.to_thread(stack.redis.start)
        assert await serving_again(clients, "after the restart") < BACK
        seen = await reading
        assert answer_in(seen) == LONG
        query_id = last_query(seen)
        whole = await second.get(f"/queries/{query_id}/events")
        assert seen == whole.content
        # accepted before, answered after, once
        done = await first.get(f"/queries/{accepted.json()['query_id']}/events")
        assert answer_in(done.content) == LONG
        for session in ("kept", "attached"):
            (turn,) = (await first.get(f"/sessions/{session}")).json()["turns"]
            assert turn["answer"] == LONG
        ready = await first.get("/ready")
        assert ready.status_code == 200
    assert stack.pids() == before
    # what was refused did not happen
    assert stack.model.requests("nobody listens") == []


def last_query(seen: bytes) -> str:
    """The query's id, by its `claimed` event."""
    _, kind, data = parsed(blocks(seen)[0])
    assert kind == "claimed"
    query_id: str = data["query_id"]
    return query_id


async def test_redis_restarted_three_times_under_traffic(stack: HttpStack) -> None:
    before = stack.pids()
    async with stack.http(0) as first, stack.http(1) as second:
        clients = [first, second]
        async with traffic(clients) as outcomes:
            for number in range(3):
                count = len(outcomes)
                await eventually(lambda count=count: len(outcomes) > count + 8, 20, "traffic flows")  # type: ignore[misc]
                stack.redis.kill()
                await asyncio.to_thread(stack.redis.start)
                assert await serving_again(clients, f"restart {number}") < BACK
        assert {outcome for outcome in outcomes if outcome[0] != 200} <= {(503, "bus_unavailable")}
        # nothing is left behind
        await nothing_pending(first)
    assert stack.pids() == before


async def nothing_pending(http: httpx.AsyncClient) -> None:
    async def done() -> bool:
        streams = (await http.get("/bus/streams")).json()["streams"]
        (queries,) = (one for one in streams if one["subject"] == "query.received")
        (group,) = (one for one in queries["groups"] if one["name"] == "generator")
        return (group["lag"], group["pending"]) == (0, 0)

    await eventually(done, 10, "every query is finished and acknowledged")


async def test_a_flush_under_traffic_is_survived_by_every_process(stack: HttpStack) -> None:
    before = stack.pids()
    async with stack.http(0) as first, stack.http(1) as second:
        clients = [first, second]
        async with traffic(clients) as outcomes:
            for number in range(3):
                count = len(outcomes)
                await eventually(lambda count=count: len(outcomes) > count + 8, 20, "traffic flows")  # type: ignore[misc]
                with redis.Redis.from_url(stack.redis.url) as client:
                    client.flushall()
                assert await serving_again(clients, f"flush {number}") < BACK
        # a query that was deleted is told to be gone, or ends at its deadline; nobody waits for ever
        assert {status for status, _ in outcomes} <= {200, 404, 503, 504}, outcomes
        assert sum(status == 200 for status, _ in outcomes) > len(outcomes) / 2

        # the tools are known again, and settings can be changed
        async def tools() -> bool:
            known = [(await client.get("/tools")).json()["tools"] for client in clients]
            return all({tool["function"]["name"] for tool in found} == {"web_search", "web_fetch"} for found in known)

        await eventually(tools, BACK, "the tools have announced themselves")
        called = await second.post("/tools/web_search/call", json={"args": {"query": "x"}})
        assert (called.status_code, called.json()["error"]) == (200, None)

        async def described() -> bool:
            names = ("generator", "gateway", "web_search", "web_fetch")
            replies = [await first.get(f"/participants/{name}/settings") for name in names]
            return {reply.status_code for reply in replies} == {200}

        await eventually(described, BACK, "settings can be looked at")
    assert stack.pids() == before


async def test_a_stream_whose_query_was_flushed_away_ends(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        waiting = asyncio.create_task(second.post("/query", json={"query": "long lost"}))
        openai = {"model": "local2", "messages": [{"role": "user", "content": "long ago"}], "stream": True}
        chat = asyncio.create_task(second.post("/v1/chat/completions", json=openai))
        async with first.stream("POST", "/query", json={"query": "long gone"}, headers=SSE) as response:
            query_id = response.headers["x-query-id"]
            for query in ("long lost", "long ago", "long gone"):
                await eventually(lambda q=query: stack.model.requests(q), 10, f"the model is asked: {query}")  # type: ignore[misc]
            with redis.Redis.from_url(stack.redis.url) as client:
                client.flushall()
            seen = await response.aread()
        assert not ended(seen)
        told = await waiting
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")
        last, done = (await chat).text.split("\n\n")[-3:-1]
        assert (json.loads(last.removeprefix("data: "))["error"]["code"], done) == ("not_found", "data: [DONE]")
        gone = await second.get(f"/queries/{query_id}")
        assert gone.status_code == 404


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_its_model_the_stack_says_so_and_answers_when_it_is_back(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        running = asyncio.create_task(first.post("/query", json={"query": "long broken"}))
        await eventually(lambda: stack.model.requests("long broken"), 5, "the model is asked")
        stack.model.kill()
        try:
            accepted = await second.post("/query?wait=false", json={"query": "later", "session_id": "later"})
            assert accepted.status_code == 202

            async def noticed() -> bool:
                return (await first.get("/ready")).status_code == 503

            await eventually(noticed, 12, "readiness names the model", 0.1)
            parts = (await first.get("/ready")).json()["parts"]
            assert (parts["bus"]["ok"], parts["generator"]["ok"], parts["model"]["ok"]) == (True, True, False)
            assert stack.model.url in parts["model"]["reason"]
            assert (await first.get("/health")).status_code == 200
            shown = (await first.get(f"/queries/{accepted.json()['query_id']}")).json()
            assert shown["state"] == "running"
        finally:
            stack.model.start()
        done = await second.get(f"/queries/{accepted.json()['query_id']}/events")
        assert answer_in(done.content) == "You said: later"
        told = await running
        assert (told.status_code, told.json()["answer"]) == (200, LONG)

        async def ready() -> bool:
            return (await first.get("/ready")).status_code == 200

        await eventually(ready, 12, "ready again", 0.1)


async def test_a_model_that_stays_away_fails_the_query_at_its_deadline_with_a_reason(stack: HttpStack) -> None:
    stack.model.kill()
    try:
        async with stack.http(0) as http:
            at = time.monotonic()
            response = await http.post("/query", json={"query": "never", "deadline_seconds": 2})
            assert response.status_code in (503, 504)
            assert response.json()["error"]["code"] in ("model_unavailable", "deadline_exceeded", "deadline")
            assert response.json()["error"]["query_id"]
            assert time.monotonic() - at < 5
    finally:
        stack.model.start()
