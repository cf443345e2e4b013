"""One trace per query over all processes: gateway, generator, tool worker, whoever comes after the answer."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.collector import Collector, Seen
from support.http_stack import HttpStack, ModelProcess, Rules, until
from support.stack import Participants
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis

SECRET = "a question about xylophones"
RULES: Rules = [
    {
        "when": {"tool_results": 0, "user": "xylophones|slow tool"},
        "respond": {
            "thinking": "Let me look.",
            "tool_calls": [{"name": "probe", "args": {"text": "xylophone-argument"}}],
        },
    },
    {
        "when": {"user": "slow tool"},
        "respond": {"thinking": "Slowly.", "text": "one two three four five six seven eight nine ten", "pace": 0.3},
    },
    {"respond": {"text": "An answer about xylophones."}},
]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[HttpStack]:
    folder = tmp_path_factory.mktemp("traced")
    with ExitStack() as opened:
        model = ModelProcess(folder / "model.log")
        opened.callback(model.close)
        model.start()
        model.play(RULES)
        redis = opened.enter_context(EmbeddedRedis(folder / "redis"))
        people = opened.enter_context(
            Participants(redis.url, model.url, folder / "people", otlp_endpoint=collector.url, effects_url=redis.url)
        )
        running = HttpStack(redis, model, people, 1)
        people.start("probe")
        people.start("judge")
        running.start(2)
        until(lambda: _tools(running) >= {"probe"}, 20, "the probe is offered")
        yield running


def _tools(stack: HttpStack) -> set[str]:
    with stack.web() as web:
        return {tool["function"]["name"] for tool in web.get("/tools").json()["tools"]}


def ask(stack: HttpStack, query: str, **headers: str) -> str:
    with stack.web() as web:
        told = web.post("/query", json={"query": query}, headers=headers)
        assert told.status_code == 200, told.text
        return str(told.json()["query_id"])


def trace_of(collector: Collector, query_id: str, *complete: str) -> list[Seen]:
    """The spans of one query, as soon as those named have all arrived."""

    def arrived() -> list[Seen]:
        roots = [one for one in collector.spans if one.attributes.get("local2.query.id") == query_id]
        found = collector.trace(roots[0].trace_id) if roots else []
        return found if set(complete) <= {one.name for one in found} else []

    found: list[Seen] = until(arrived, 15, f"{complete} of {query_id}")
    return found


ALL = (
    "POST /query", "process query.received", "invoke_agent GeneratorAgent", "execute_tool probe",
    "process tool.request.probe", "process response.generation",
)  # fmt: skip


def only(spans: list[Seen], name: str, service: str | None = None) -> Seen:
    (found,) = [one for one in spans if one.name == name and service in (None, one.service)]
    return found


def test_a_query_with_a_tool_is_one_trace_over_four_processes(stack: HttpStack, collector: Collector) -> None:
    query_id = ask(stack, SECRET)
    spans = trace_of(collector, query_id, *ALL)
    assert len({one.instance for one in spans}) == 4
    server = only(spans, "POST /query", "gateway")
    reading = only(spans, "process query.received", "generator")
    agent = only(spans, "invoke_agent GeneratorAgent", "generator")
    calling = only(spans, "execute_tool probe", "generator")
    taking = only(spans, "process tool.request.probe", "probe")
    running = only(spans, "execute_tool probe", "probe")
    judging = only(spans, "process response.generation", "judge")
    chats = sorted((one for one in spans if one.name.startswith("chat ")), key=lambda one: one.begin)
    assert server.parent == ""
    assert [one.parent for one in (reading, agent, calling, taking, running, judging)] == [
        server.span_id, reading.span_id, agent.span_id, calling.span_id, taking.span_id, agent.span_id,
    ]  # fmt: skip
    assert [one.parent for one in chats] == [agent.span_id] * 2
    kinds = [one.kind for one in (server, reading, agent, calling, taking, running, chats[0])]
    assert kinds == ["server", "consumer", "internal", "client", "consumer", "internal", "client"]
    # one after the other, one in the other
    assert chats[0].end <= calling.begin <= running.begin <= running.end <= calling.end <= chats[1].begin
    assert agent.begin <= chats[0].begin
    assert chats[1].end <= agent.end
    assert all(one.status != 2 for one in spans)


def test_spans_have_the_attributes_of_the_conventions(stack: HttpStack, collector: Collector) -> None:
    query_id = ask(stack, SECRET)
    spans = trace_of(collector, query_id, *ALL)
    agent = only(spans, "invoke_agent GeneratorAgent").attributes
    chat = next(one for one in spans if one.name.startswith("chat ")).attributes
    tool = only(spans, "execute_tool probe", "probe").attributes
    reading = only(spans, "process tool.request.probe").attributes
    server = only(spans, "POST /query").attributes
    assert agent["gen_ai.operation.name"] == "invoke_agent"
    assert agent["gen_ai.provider.name"] == chat["gen_ai.provider.name"] == "ollama"
    assert agent["gen_ai.agent.name"] == "GeneratorAgent"
    assert agent["gen_ai.request.model"] == chat["gen_ai.request.model"]
    assert agent["gen_ai.conversation.id"] == tool["gen_ai.conversation.id"] == server["gen_ai.conversation.id"]
    total = sum(one.attributes["gen_ai.usage.input_tokens"] for one in spans if one.name.startswith("chat "))
    assert agent["gen_ai.usage.input_tokens"] == total > 0
    assert agent["gen_ai.usage.output_tokens"] > 0
    assert agent["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["gen_ai.operation.name"] == "chat"
    assert 0 < chat["gen_ai.response.time_to_first_chunk"] < 10
    assert chat["gen_ai.response.model"]
    assert chat["gen_ai.usage.output_tokens"] > 0
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"]) == ("execute_tool", "probe")
    assert tool["gen_ai.tool.call.id"] == f"{query_id}:A:0:0"
    assert reading["messaging.system"] == "redis"
    assert reading["messaging.destination.name"] == "local2:tool.request.probe"
    assert reading["messaging.consumer.group.name"] == "probe"
    assert reading["messaging.operation.type"] == "process"
    assert (server["http.route"], server["http.response.status_code"]) == ("/query", 200)


def test_nothing_that_was_said_is_in_a_trace(stack: HttpStack, collector: Collector) -> None:
    trace_of(collector, ask(stack, SECRET), *ALL)
    with stack.web() as web:
        failed = web.post("/tools/probe/call", json={"args": {"text": "x", "fail": "xylophone broke"}}).json()
    assert failed["error"] == "xylophone broke"
    until(lambda: [one for one in collector.named("execute_tool probe", "probe") if one.status == 2], 10, "the failure")
    bodies = b"".join(collector.bodies)
    assert b"xylophone" not in bodies
    assert b"admin-key" not in bodies
    assert not any(one.events or one.message for one in collector.spans)


def test_a_clients_trace_is_continued(stack: HttpStack, collector: Collector) -> None:
    trace_id, parent = "1234567890abcdef1234567890abcdef", "00f067aa0ba902b7"
    ask(stack, SECRET, traceparent=f"00-{trace_id}-{parent}-01")
    until(lambda: len({one.service for one in collector.trace(trace_id)}) >= 4, 15, "all four services")
    assert only(collector.trace(trace_id), "POST /query").parent == parent


def test_a_trace_that_its_client_does_not_sample_is_not_sent(stack: HttpStack, collector: Collector) -> None:
    trace_id = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    ask(stack, SECRET, traceparent=f"00-{trace_id}-00f067aa0ba902b7-00")
    # asked later and arrived: so would the other have
    trace_of(collector, ask(stack, SECRET), *ALL)
    assert collector.trace(trace_id) == []


def test_looking_is_not_traced_unless_the_client_traces_it(stack: HttpStack, collector: Collector) -> None:
    with stack.web() as web:
        web.get("/health")
        web.get("/sessions")
        web.get("/tools", headers={"traceparent": f"00-{'b' * 32}-{'c' * 16}-01"})
    until(lambda: collector.trace("b" * 32), 10, "the traced look")
    assert only(collector.trace("b" * 32), "GET /tools").kind == "server"
    assert not [one for one in collector.spans if one.name in ("GET /health", "GET /sessions")]


async def test_a_takeover_after_a_crash_goes_on_in_the_same_trace(stack: HttpStack, collector: Collector) -> None:
    async with stack.http(0) as http:
        told = (await http.post("/query?wait=false", json={"query": "a slow tool"})).json()
        query_id = told["query_id"]

        seen = b""
        async with http.stream("GET", f"/queries/{query_id}/events") as events:
            async for chunk in events.aiter_bytes():
                seen += chunk
                if b"event: tool.result" in seen and b'"one' in seen:
                    break
        # the first part of the trace is sent while the answer is being written
        await eventually(lambda: collector.named("process tool.request.probe"), 10)
        found = re.search(rb'"replica":"([^"]+)"', seen)
        assert found is not None
        pid = int(found[1].decode().rsplit("-", 2)[1])
        victim = next(one for one in stack.running("generator") if one.pid == pid)
        victim.kill()
        until(lambda: "answer" in _result(stack, query_id), 30, "another generator has answered")
    spans = trace_of(collector, query_id, "invoke_agent GeneratorAgent")
    again = only(spans, "process query.received")
    # the one that died could not send its own span; its tool call had been
    assert again.attributes["local2.message.deliveries"] == 2
    assert again.trace_id == only(spans, "POST /query").trace_id
    assert only(spans, "execute_tool probe", "probe").trace_id == again.trace_id
    stack.mend()


def _result(stack: HttpStack, query_id: str) -> dict[str, object]:
    with stack.web() as web:
        told = web.get(f"/queries/{query_id}").json()
    return told if told.get("state") == "completed" else {}


def test_the_last_spans_are_sent_before_a_participant_ends(stack: HttpStack, collector: Collector) -> None:
    stack.people.start("generator")
    until(lambda: len(stack.running("generator")) == 3, 5, "a third generator")
    query_id = ask(stack, "quick")
    for one in stack.running("generator"):
        one.send(signal.SIGTERM)
    # at once, were the machine free: nothing was left to drain, and the collector answers
    until(lambda: not stack.running("generator"), 10, "all generators have ended")
    names = {one.name for one in collector.spans if one.attributes.get("local2.query.id") == query_id}
    assert "invoke_agent GeneratorAgent" in names
    stack.mend()


async def test_without_an_endpoint_nothing_is_sent_and_without_a_port_nothing_listens(
    tmp_path: Path, collector: Collector
) -> None:
    before = len(collector.bodies)
    with ExitStack() as opened:
        model = ModelProcess(tmp_path / "model.log")
        opened.callback(model.close)
        model.start()
        model.play(RULES)
        redis = opened.enter_context(EmbeddedRedis(tmp_path / "redis"))
        people = opened.enter_context(Participants(redis.url, model.url, tmp_path / "people"))
        quiet = HttpStack(redis, model, people, 1)
        quiet.start(1)
        ask(quiet, "hello")
        with quiet.web() as web:
            facts = [
                one["facts"] for part in web.get("/participants").json()["participants"] for one in part["replicas"]
            ]
            # the gateway tells all the same
            text = web.get("/metrics").text
        for one in people.started:
            one.send(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: not any(one.alive for one in people.started), 10, "all have ended")
        names = [f"-{one.pid}-".encode() for one in people.started]
    assert facts
    assert not any("metrics" in known for known in facts)
    assert "process_resident_memory_bytes" in text
    assert "local2_bus_up 1.0" in text
    # another stack of these tests may still be sending
    assert not [body for body in collector.bodies[before:] if any(name in body for name in names)]
