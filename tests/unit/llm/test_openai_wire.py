"""What only OpenAI-compatible servers have: the request's form, fragments of calls, two names for reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.llm.factory import open_chat_model
from shared.llm.port import (
    ChatRequest,
    Delta,
    Finish,
    ModelRejected,
    Notice,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import Script

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
ASK = ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=[TOOL])


class Server(ScriptedModelServer):
    """Answers every chat with the same chunks."""

    def __init__(self, *chunks: Any, end: bytes = b"data: [DONE]\n\n") -> None:
        super().__init__()
        body = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + end
        self.bodies: list[dict[str, Any]] = []

        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            return Response(body, media_type="text/event-stream")

        self.app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}


def fragment(index: int, call_id: str | None = None, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    return chunk(tool_calls=[{"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}])


async def answer(server: ScriptedModelServer, request: ChatRequest = ASK) -> list[Delta]:
    path = "/v1" if isinstance(server, Server) else "/plain/v1"
    model = open_chat_model("openai", base_url=server.url + path, api_key="secret")
    try:
        return [delta async for delta in model.stream(request)]
    finally:
        await model.aclose()


def calls(deltas: list[Delta]) -> list[ToolCall]:
    return [delta for delta in deltas if isinstance(delta, ToolCall)]


async def test_the_request_has_the_protocols_form() -> None:
    request = replace(
        ASK,
        think=False,
        messages=[
            {"role": "system", "content": "brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "name": "f", "args": {"a": "é"}}]},
            {"role": "tool", "tool_name": "f", "tool_call_id": "c1", "content": "found"},
        ],
        options={"temperature": 0.5, "num_predict": 9, "top_k": 40},
        response_schema={"type": "object"},
    )
    async with ScriptedModelServer() as server:
        await answer(server, request)
        received = server.requests[0]
    assert received.headers["authorization"] == "Bearer secret"
    body = dict(received.body)
    messages = body.pop("messages")
    assert messages[2]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":"é"}'}}
    ]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "found"}
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
        "temperature": 0.5,
        "max_tokens": 9,
        "top_k": 40,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_is_read_under_both_names(name: str) -> None:
    rule = {"respond": {"thinking": "let me see", "text": "yes", "reasoning_field": name}}
    async with ScriptedModelServer([rule]) as server:
        deltas = await answer(server)
    assert "".join(d.text for d in deltas if isinstance(d, ThinkingDelta)) == "let me see"


async def test_reasoning_sent_under_both_names_is_not_doubled() -> None:
    async with Server(chunk(reasoning="hm", reasoning_content="hm"), chunk("stop", content="yes")) as server:
        deltas = await answer(server)
    assert [d for d in deltas if isinstance(d, ThinkingDelta)] == [ThinkingDelta("hm")]


async def test_interleaved_fragments_are_put_together() -> None:
    async with Server(
        fragment(0, "a", "f", '{"q'),
        fragment(1, "b", "g"),
        fragment(0, None, None, '": 1}'),
        fragment(1, None, None, '{"r": 2}'),
        chunk("tool_calls"),
    ) as server:
        deltas = await answer(server)
    assert calls(deltas) == [ToolCall("a", "f", {"q": 1}), ToolCall("b", "g", {"r": 2})]


async def test_calls_that_share_an_index_are_told_apart_by_their_ids() -> None:
    async with Server(fragment(0, "a", "f", "{}"), fragment(0, "b", "f", '{"n": 2}'), chunk("tool_calls")) as server:
        deltas = await answer(server)
    assert calls(deltas) == [ToolCall("a", "f", {}), ToolCall("b", "f", {"n": 2})]


async def test_a_name_repeated_in_every_fragment_stays_one_name() -> None:
    async with Server(fragment(0, "a", "f", "{"), fragment(0, "a", "f", "}"), chunk("tool_calls")) as server:
        assert calls(await answer(server)) == [ToolCall("a", "f", {})]


async def test_a_call_that_the_length_limit_cut_off_is_not_run() -> None:
    async with Server(
        chunk(content="I search"), fragment(0, "a", "f", "{}"), fragment(1, "b", "f", '{"q": "ha'), chunk("length")
    ) as server:
        deltas = await answer(server)
    assert [call.id for call in calls(deltas)] == ["a"]


async def test_a_stream_that_ends_without_a_finish_reason_is_interrupted() -> None:
    async with Server(chunk(content="half an ans")) as server:
        with pytest.raises(StreamInterrupted):
            await answer(server)


async def test_usage_may_be_missing() -> None:
    async with Server(chunk("stop", content="yes"), end=b"") as server:
        deltas = await answer(server)
    assert deltas == [TextDelta("yes"), Finish("stop", None, None, "m")]


async def test_a_withheld_answer_is_rejected() -> None:
    async with Server(chunk("content_filter")) as server:
        with pytest.raises(ModelRejected, match="withheld"):
            await answer(server)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
        (500, "tools param requires --jinja flag"),
    ],
)
async def test_servers_started_without_tool_support_are_recognised(status: int, said: str) -> None:
    rules = [{"when": {"any_tools": True}, "respond": {"status": status, "error": said}}, {"respond": {"text": "ok"}}]
    async with ScriptedModelServer(rules) as server:
        deltas = await answer(server)
    assert deltas[0] == Notice("tools_unsupported")
    assert TextDelta("ok") in deltas


async def test_a_server_that_refuses_the_thinking_switch_is_asked_without_it() -> None:
    said = "Unrecognized request argument supplied: chat_template_kwargs"
    rules = [{"times": 1, "respond": {"status": 400, "error": said}}, {"respond": {"text": "ok"}}]
    async with ScriptedModelServer(rules) as server:
        deltas = await answer(server)
        assert "chat_template_kwargs" not in server.requests[1].body
    assert TextDelta("ok") in deltas


async def test_a_name_without_its_tag_is_the_same_model() -> None:
    async with ScriptedModelServer() as server:
        server.set_rules(Script.model_validate({"models": {"small:latest": []}}))
        model = open_chat_model("openai", base_url=f"{server.url}/plain/v1")
        try:
            assert await model.reachable("small") is None
            complaint = await model.reachable("large")
            assert complaint is not None
            assert complaint.endswith("does not have the model large; it has: small:latest")
        finally:
            await model.aclose()
