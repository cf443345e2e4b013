"""Event streams through the whole stack: resumed after every event on any gateway, byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from support.http_stack import (
    ADMIN_KEY,
    SSE,
    HttpStack,
    Rules,
    answer_in,
    blocks,
    ended,
    event_types,
    follow,
    http_stack,
    last_id,
    parsed,
    take,
)

pytestmark = pytest.mark.slow

# Forty words with everything that could upset a line protocol.
ANSWER = (
    "Here is what I found:\n\nid: 7-7\nevent: completed\ndata: {}\n\n"
    'Größe 漢字 🚀 e\u0301 a\u2028b a\x85b tab\there "quoted" back\\slash \x1b[0m\r\nline '
    + " ".join(f"word{number}" for number in range(30))
)


def research(url: str, pace: float = 0.025) -> Rules:
    """A question that needs two tools and gets a long answer."""
    calls = [
        {"name": "web_search", "args": {"query": "LoCAL2"}},
        {"name": "web_fetch", "args": {"url": f"{url}/"}},
    ]
    return [
        {
            "when": {"user": "^research", "tool_results": 0},
            "respond": {"thinking": "I do not know this, so I look it up twice.", "tool_calls": calls, "pace": pace},
        },
        {
            "when": {"user": "^research", "tool_results": 2},
            "respond": {"thinking": "Now I know\nenough to say it.", "text": ANSWER, "pace": pace},
        },
    ]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    with http_stack(tmp_path_factory.mktemp("stack")) as running:
        running.model.play(research(running.model.url))
        yield running


async def ask(http: httpx.AsyncClient, query: str, **fields: object) -> str:
    accepted = await http.post("/query?wait=false", json={"query": query, **fields})
    assert accepted.status_code == 202, accepted.text
    query_id: str = accepted.json()["query_id"]
    return query_id


async def whole(http: httpx.AsyncClient, query_id: str) -> bytes:
    """The full stream, read in one go."""
    response = await http.get(f"/queries/{query_id}/events")
    assert response.status_code == 200, response.text
    return response.content


async def read_on(chunks: AsyncIterator[bytes], got: bytearray) -> None:
    async for chunk in chunks:
        got += chunk


@pytest.fixture(scope="module")
def recorded(stack: HttpStack) -> tuple[str, bytes]:
    """A finished query with its full stream."""
    with stack.web(timeout=60) as web:
        response = web.post("/query", json={"query": "research everything"}, headers=SSE)
    assert answer_in(response.content) == ANSWER
    # without the comments that say, when it takes long, that the stream lives
    return response.headers["x-query-id"], b"".join(blocks(response.content))


async def test_a_finished_stream_resumes_after_every_event_on_the_other_gateway(
    stack: HttpStack, recorded: tuple[str, bytes]
) -> None:
    query_id, full = recorded
    parts = blocks(full)
    kinds = event_types(full)
    assert kinds.count("tool.request") == kinds.count("tool.result") == 2
    # in pieces, of which a busy machine makes fewer
    assert kinds.count("thinking") > 1
    assert kinds.count("answer") > 1
    path = f"/queries/{query_id}/events"
    at_once = asyncio.Semaphore(8)
    async with stack.http(0) as first, stack.http(1) as second:

        async def cut_after(count: int) -> None:
            async with at_once:
                here, there = (first, second) if count % 2 else (second, first)
                seen = b""
                if count:
                    async with here.stream("GET", path) as response:
                        seen = await take(response, count)
                assert seen == b"".join(parts[:count])
                rest = await there.get(path, headers={"Last-Event-ID": last_id(seen)} if seen else {})
                assert seen + rest.content == full
                assert rest.status_code == (204 if count == len(parts) else 200)

        async with asyncio.TaskGroup() as cutting:
            for count in range(len(parts) + 1):
                cutting.create_task(cut_after(count))


async def test_a_live_stream_that_is_cut_after_every_single_event_loses_and_repeats_nothing(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        query_id = await ask(first, "research live")
        seen = await follow([first, second], query_id, itertools.repeat(1))
        assert seen == await whole(second, query_id)
        assert answer_in(seen) == ANSWER
        assert event_types(seen).count("answer") > 1


async def test_many_clients_that_are_cut_at_their_own_places_see_the_same_bytes(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        query_id = await ask(second, "research together")
        plans = [itertools.cycle(plan) for plan in ((1_000,), (2, 3), (7,), (1, 20), (13, 1, 1), (5, 8), (40,), (3,))]
        clients = itertools.cycle(([first, second], [second, first]))
        reads = await asyncio.gather(*(follow(next(clients), query_id, plan) for plan in plans))
        assert set(reads) == {await whole(first, query_id)}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 25), min_size=1, max_size=12), turns=st.lists(st.booleans(), min_size=12))
async def test_any_sequence_of_cuts_gives_the_same_bytes(
    stack: HttpStack, recorded: tuple[str, bytes], cuts: list[int], turns: list[bool]
) -> None:
    query_id, full = recorded
    async with stack.http(0) as first, stack.http(1) as second:
        order = [second if turn else first for turn in turns]
        assert await follow(order, query_id, itertools.cycle(cuts)) == full


async def test_an_event_stream_has_the_headers_that_proxies_need(stack: HttpStack, recorded: tuple[str, bytes]) -> None:
    query_id, _ = recorded
    async with stack.http(1) as http:
        response = await http.get(f"/queries/{query_id}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-query-id"] == query_id
    assert response.headers["x-session-id"]


async def test_an_event_comes_when_it_happens_and_not_with_the_end(stack: HttpStack) -> None:
    loop = asyncio.get_running_loop()
    async with stack.http(0) as http:
        at: list[float] = []
        seen = b""
        async with http.stream("POST", "/query", json={"query": "research slowly"}, headers=SSE) as response:
            async for chunk in response.aiter_bytes():
                seen += chunk
                at.append(loop.time())
    # about seventy chunks of the model at 25 ms
    assert ended(seen)
    assert at[-1] - at[0] > 1.0
    assert len(at) > 40
    assert max(after - before for before, after in itertools.pairwise(at)) < 1.0


# ── gateways that die ────────────────────────────────────────────────────────────────────────────────────────────


async def test_after_kill_9_of_its_gateway_a_client_goes_on_at_the_other_one(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        async with first.stream("POST", "/query", json={"query": "research once"}, headers=SSE) as response:
            query_id = response.headers["x-query-id"]
            chunks = response.aiter_bytes()
            got = bytearray()
            while len(blocks(bytes(got))) < 15:
                got += await anext(chunks)
            stack.gateways[0].kill()
            with pytest.raises(httpx.TransportError):
                await read_on(chunks, got)
        seen = b"".join(blocks(bytes(got)))
        assert not ended(seen)
        seen = await follow([second], query_id, itertools.repeat(1_000), seen)
        assert seen == await whole(second, query_id)
        assert answer_in(seen) == ANSWER
    stack.mend()
    assert len(stack.model.requests("research once")) == 2


async def test_a_question_that_waited_at_a_killed_gateway_is_found_at_the_other_one(stack: HttpStack) -> None:
    body = {"query": "research the waiting", "session_id": "waiting"}
    key = {"Idempotency-Key": "asked-once"}
    async with stack.http(0) as first, stack.http(1) as second:
        asking = asyncio.create_task(first.post("/query", json=body, headers=key))
        while not stack.model.requests("research the waiting"):
            await asyncio.sleep(0.02)
        stack.gateways[0].kill()
        with pytest.raises(httpx.TransportError):
            await asking
        # the client does not know the id yet: it repeats its request
        repeated = await second.post("/query?event_log=false", json=body, headers=key)
        assert repeated.status_code == 200, repeated.text
        assert repeated.json()["answer"] == ANSWER
        query_id = repeated.json()["query_id"]
        shown = (await second.get(f"/queries/{query_id}")).json()
        assert shown == repeated.json()
        turns = (await second.get("/sessions/waiting")).json()["turns"]
        assert [turn["query_id"] for turn in turns] == [query_id]
    stack.mend()
    assert len(stack.model.requests("research the waiting")) == 2


async def test_a_gateway_that_stops_hands_its_clients_over(stack: HttpStack) -> None:
    seen = b""
    async with stack.http(0) as first, stack.http(1) as second:
        waiting = asyncio.create_task(first.post("/query", json={"query": "research at the stop"}))
        async with first.stream("POST", "/query", json={"query": "research stopped"}, headers=SSE) as response:
            query_id = response.headers["x-query-id"]
            async for chunk in response.aiter_bytes():
                seen += chunk
                if len(blocks(seen)) == 10:
                    stack.gateways[0].send(signal.SIGTERM)
        # the stream ends cleanly, and goes on elsewhere
        assert not ended(seen)
        told = await waiting
        assert (told.status_code, told.json()["error"]["code"]) == (503, "stopping")
        seen = await follow([second], query_id, itertools.repeat(1_000), b"".join(blocks(seen)))
        assert answer_in(seen) == ANSWER
        other = await whole(second, told.json()["error"]["query_id"])
        assert answer_in(other) == ANSWER
    assert stack.gateways[0].process.wait(10) == 0
    stack.mend()


# ── what a result says ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_result_names_its_bus_events_in_order(stack: HttpStack) -> None:
    rules: Rules = [
        {
            "when": {"user": "price", "tool_results": 0},
            "respond": {"thinking": "Search.", "tool_calls": [{"name": "web_search", "args": {"query": "price"}}]},
        },
        {"when": {"user": "price", "last_tool": "web_search"}, "respond": {"text": "It is $1."}},
    ]
    stack.model.play(rules)
    try:
        async with stack.http(0) as http:
            response = await http.post("/query", json={"query": "What is the price?", "session_id": "s3"})
            told = response.json()
            raw = await whole(http, told["query_id"])
    finally:
        stack.model.play(research(stack.model.url))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-query-id"] == told["query_id"]
    assert response.headers["x-session-id"] == "s3" == told["session_id"]
    log = told["event_log"]
    assert [event["subject"] for event in log] == told["events"]
    assert log[0]["subject"] == "query.received"
    needed = {"agent.transition", "tool.result.web_search", "response.generation", "answer.dialog"}
    assert needed <= set(told["events"])
    assert told["events"].count("agent.transition") >= 6
    ids = [tuple(map(int, event["id"].split("-"))) for event in log]
    assert ids == sorted(ids)
    # each stands where it is said to be; a finished request leaves its stream within two heartbeats
    with redis.Redis.from_url(stack.redis.url) as bus:
        for event in told["event_log"]:
            assert event["stream"] == f"local2:{event['subject']}"
            found = bus.xrange(event["stream"], event["id"], event["id"])
            assert found or event["subject"].startswith("tool.request."), event
            for _, fields in found:
                assert told["query_id"] in (event["id"], fields.get(b"correlation_id", b"").decode())
    actions = [data["action"] for _, kind, data in map(parsed, blocks(raw)) if kind == "state"]
    assert actions == ["RECEIVE", "START_GENERATION", "DISPATCH_TOOL", "AWAIT_TOOL", "TOOL_RESULT", "PUBLISH"]
    (call,) = told["tool_calls"]
    assert (call["tool"], call["args"], call["error"]) == ("web_search", {"query": "price"}, None)
    assert call["result"].startswith("Today's date: ")


def test_the_stock_openai_client_gets_the_whole_agent_streamed_and_not(stack: HttpStack) -> None:
    question: list[Any] = [{"role": "user", "content": "research for a stranger"}]
    with OpenAI(base_url=f"{stack.urls[0]}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        done = client.chat.completions.create(model="local2", messages=question)
        assert done.choices[0].message.content == ANSWER
        assert done.choices[0].finish_reason == "stop"
        assert done.choices[0].message.tool_calls is None
        assert done.usage is not None
        assert done.usage.total_tokens > 40
        text, thinking, reasons = "", "", []
        stream = client.chat.completions.create(
            model="local2",
            messages=question,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thinking += getattr(choice.delta, "reasoning_content", None) or ""
                reasons.append(choice.finish_reason)
        assert text == ANSWER
        assert thinking.startswith("I do not know this")
        assert [reason for reason in reasons if reason] == ["stop"]
        assert usage == done.usage


def test_a_conversation_of_twenty_turns_reaches_the_model_as_the_client_gave_it(stack: HttpStack) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    with OpenAI(base_url=f"{stack.urls[1]}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        for number in range(20):
            messages.append({"role": "user", "content": f"turn {number} of the talk"})
            done = client.chat.completions.create(model="local2", messages=messages)
            said = done.choices[0].message.content
            assert said == f"You asked: turn {number} of the talk"
            messages.append({"role": "assistant", "content": said})
    asked = stack.model.requests("of the talk")
    assert len(asked) == 20
    *_, last = asked
    assert [(m["role"], m["content"]) for m in last["body"]["messages"] if m["role"] != "system"] == [
        (m["role"], m["content"]) for m in messages[1:-1]
    ]
    (system,) = [m["content"] for m in last["body"]["messages"] if m["role"] == "system"]
    assert system.endswith("\n\nBe brief.")
    # nothing of it is kept
    with stack.web() as web:
        assert "turn 19" not in web.get("/sessions").text
