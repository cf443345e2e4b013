"""What only OpenAI-compatible servers have: the request's form, fragments of calls, two names for reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shared.llm.factory import open_chat_model
from shared.llm.port import (
    ChatRequest,
    Delta,
    Finish,
    ModelError,
    ModelMissing,
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
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
ASK = ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=[TOOL])


class Server(ScriptedModelServer):
    """Answers every chat with the same chunks, or with a body as a whole."""

    def __init__(
        self,
        *chunks: Any,
        end: bytes = b"data: [DONE]\n\n",
        body: bytes | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__()
        whole = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + end if body is None else body
        self.bodies: list[dict[str, Any]] = []

        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            return Response(whole, media_type=media_type)

        self.app = Starlette(routes=[Route("/plain/v1/chat/completions", chat, methods=["POST"])])


class Listing(Server):
    """Answers every chat with the same chunks, or says that the model is not there, and lists what it is told to."""

    def __init__(self, *chunks: Any, status: int = 200, listed: bytes = b'{"object": "list", "data": []}') -> None:
        super().__init__(*chunks)
        self.status, self.listed, self.gone = status, listed, False
        (route,) = cast(Starlette, self.app).routes
        answering = cast(Route, route).endpoint

        async def chat(request: Request) -> Response:
            if self.gone:
                return Response(b'{"error": {"message": "The model `m` does not exist."}}', status_code=404)
            answered: Response = await answering(request)
            return answered

        async def models(_request: Request) -> Response:
            return Response(self.listed, status_code=self.status)

        routes = [Route("/plain/v1/chat/completions", chat, methods=["POST"]), Route("/plain/v1/models", models)]
        self.app = Starlette(routes=routes)


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}


def fragment(index: int, call_id: str | None = None, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    return chunk(tool_calls=[{"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}])


async def answer(server: ScriptedModelServer, request: ChatRequest = ASK) -> list[Delta]:
    model = open_chat_model("openai", base_url=f"{server.url}/plain/v1", api_key="secret")
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


async def test_a_stream_that_ends_with_neither_a_finish_reason_nor_done_is_interrupted() -> None:
    async with Server(chunk(content="half an ans"), end=b"") as server:
        with pytest.raises(StreamInterrupted):
            await answer(server)


async def test_either_of_finish_reason_and_done_ends_the_answer() -> None:
    async with Server(chunk(content="yes")) as server:
        assert await answer(server) == [TextDelta("yes"), Finish("stop", None, None, "m")]
    async with Server(chunk("stop", content="yes"), end=b"") as server:
        assert await answer(server) == [TextDelta("yes"), Finish("stop", None, None, "m")]


async def test_of_several_answers_the_first_is_told() -> None:
    others = [{"index": n, "delta": {"content": "no"}, "finish_reason": "stop"} for n in (1, 2)]
    first = chunk(content="yes")
    async with Server({**first, "choices": [*others, *first["choices"]]}, {**first, "choices": others}) as server:
        assert await answer(server) == [TextDelta("yes"), Finish("stop", None, None, "m")]


async def test_an_event_without_data_says_nothing() -> None:
    body = b"data:\n\n" + sse(chunk(content="yes")) + b"data: \n\n" + sse(chunk("stop"))
    async with Server(body=body) as server:
        assert await answer(server) == [TextDelta("yes"), Finish("stop", None, None, "m")]


@pytest.mark.parametrize("index", [0, None])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_parallel_calls_without_ids_and_numbers_are_told_apart(index: int | None, pieces: int) -> None:
    sent = []
    for n in range(3):
        arguments = f'{{"n": {n}}}'
        size = -(-len(arguments) // pieces)
        for at in range(0, len(arguments), size):
            function: dict[str, Any] = {"arguments": arguments[at : at + size]}
            if at == 0:
                function["name"] = "f"
            one = {"function": function} if index is None else {"index": index, "function": function}
            sent.append(chunk(tool_calls=[one]))
    async with Server(*sent, chunk("tool_calls")) as server:
        found = calls(await answer(server))
    assert [(call.name, call.args) for call in found] == [("f", {"n": n}) for n in range(3)]
    assert len({call.id for call in found}) == 3


async def test_two_names_on_offer_are_two_calls_and_two_halves_are_one() -> None:
    both = replace(ASK, tools=[TOOL, {"type": "function", "function": {"name": "g"}}])
    async with Server(fragment(0, None, "f"), fragment(0, None, "g"), chunk("tool_calls")) as server:
        assert [call.name for call in calls(await answer(server, both))] == ["f", "g"]
    async with Server(fragment(0, "a", "web_"), fragment(0, None, "search", "{}"), chunk("tool_calls")) as server:
        assert [call.name for call in calls(await answer(server))] == ["web_search"]


async def test_fragments_may_come_in_any_order() -> None:
    async with Server(
        fragment(1, None, None, '{"r": 2}'),
        fragment(0, None, None, '{"q"'),
        fragment(1, "b", "g"),
        fragment(0, "a", "f", ": 1}"),
        chunk("tool_calls"),
    ) as server:
        assert calls(await answer(server)) == [ToolCall("a", "f", {"q": 1}), ToolCall("b", "g", {"r": 2})]


@pytest.mark.parametrize("arguments", [{"q": 1}, '{"q": 1}', "{'q': 1,}", '"{\\"q\\": 1}"'])
async def test_arguments_are_an_object_in_whatever_form_they_come(arguments: Any) -> None:
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": arguments}}
    async with Server(chunk(tool_calls=[call]), chunk("tool_calls")) as server:
        assert calls(await answer(server)) == [ToolCall("a", "f", {"q": 1})]


async def test_a_call_under_its_old_name_is_a_call() -> None:
    async with Server(
        chunk(function_call={"name": "f", "arguments": '{"q"'}),
        chunk(function_call={"arguments": ": 1}"}),
        chunk("function_call"),
    ) as server:
        (call,) = calls(await answer(server))
    assert (call.name, call.args) == ("f", {"q": 1})


async def test_a_name_with_what_models_put_around_it_is_the_tools() -> None:
    async with Server(fragment(0, "a", "functions.f:0", "{}"), chunk("tool_calls")) as server:
        assert calls(await answer(server)) == [ToolCall("a", "f", {})]


async def test_content_may_be_a_list_of_parts() -> None:
    thoughts = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}, {"type": "text", "text": "."}]}
    async with Server(
        chunk(content=[thoughts]),
        chunk(content=["It ", {"type": "text", "text": "is "}, {"type": "reference", "reference_ids": [1]}]),
        chunk("stop", content={"type": "text", "text": "so."}),
    ) as server:
        deltas = await answer(server)
    assert "".join(d.text for d in deltas if isinstance(d, ThinkingDelta)) == "hm."
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "It is so."


async def test_a_refusal_is_the_answer() -> None:
    async with Server(chunk(refusal="I cannot "), chunk("stop", refusal="do that.")) as server:
        deltas = await answer(server)
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "I cannot do that."


async def test_an_answer_that_comes_as_a_whole_is_read_all_the_same() -> None:
    message = {"role": "assistant", "content": "yes", "tool_calls": None}
    body = {"model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}
    async with Server(body=orjson.dumps(body, option=orjson.OPT_INDENT_2), media_type="application/json") as server:
        assert await answer(server) == [TextDelta("yes"), Finish("stop", 7, 3, "m")]


async def test_an_error_line_of_llama_cpp_is_an_error() -> None:
    end = b'error: {"code": 500, "message": "the slot is gone", "type": "server_error"}\n\n'
    async with Server(chunk(content="half"), end=end) as server:
        with pytest.raises(ModelError, match="the slot is gone"):
            await answer(server)


@pytest.mark.parametrize(
    ("said", "options", "left_out", "sent"),
    [
        ("Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
         {}, "max_tokens", {"max_completion_tokens": 50}),
        ("Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) is supported.",
         {"temperature": 0}, "temperature", {"max_tokens": 50}),
        ('[{"type": "extra_forbidden", "loc": ["body", "top_k"], "msg": "Extra inputs are not permitted"}]',
         {"top_k": 4, "top_p": 0.5}, "top_k", {"top_p": 0.5}),
        ("Unrecognized request argument supplied: stream_options", {}, "stream_options", {"max_tokens": 50}),
    ],
)  # fmt: skip
async def test_an_option_that_a_model_refuses_is_not_sent_to_it_again(
    said: str, options: dict[str, Any], left_out: str, sent: dict[str, Any]
) -> None:
    rules = [{"times": 1, "respond": {"status": 400, "error": said}}, {"respond": {"text": "ok"}}]
    request = replace(ASK, options=options, max_tokens=50)
    async with ScriptedModelServer(rules) as server:
        model = open_chat_model("openai", base_url=f"{server.url}/plain/v1")
        for _ in range(2):
            assert TextDelta("ok") in [delta async for delta in model.stream(request)]
        await model.aclose()
        assert [received.outcome for received in server.requests] == ["refused", "done", "done"]
        for received in server.requests[1:]:
            assert left_out not in received.body
            assert sent.items() <= received.body.items()


async def test_a_model_may_refuse_several_options_one_after_the_other() -> None:
    refusals = [f"Unsupported parameter: '{name}'" for name in ("max_tokens", "max_completion_tokens", "temperature")]
    rules = [{"times": 1, "respond": {"status": 400, "error": said}} for said in refusals]
    async with ScriptedModelServer([*rules, {"respond": {"text": "ok"}}]) as server:
        deltas = await answer(server, replace(ASK, options={"temperature": 0.5}, max_tokens=50))
        left = server.requests[-1].body.keys() & {"max_tokens", "max_completion_tokens", "temperature"}
    assert (TextDelta("ok") in deltas, left) == (True, set())


@pytest.mark.parametrize(
    "said", ["messages: unknown role", "This option is not supported", "the value of temperature is out of range"]
)
async def test_any_other_refusal_is_a_refusal(said: str) -> None:
    async with ScriptedModelServer([{"respond": {"status": 400, "error": said}}]) as server:
        with pytest.raises(ModelRejected):
            await answer(server, replace(ASK, options={"temperature": 9}))
        assert len(server.requests) == 1


class Slow(ScriptedModelServer):
    """Sends these pieces of a stream with a pause before each."""

    def __init__(self, pause: float, *pieces: bytes) -> None:
        super().__init__()

        async def chat(_request: Request) -> Response:
            async def body() -> AsyncIterator[bytes]:
                for piece in pieces:
                    await asyncio.sleep(pause)
                    yield piece

            return StreamingResponse(body(), media_type="text/event-stream")

        self.app = Starlette(routes=[Route("/plain/v1/chat/completions", chat, methods=["POST"])])


def sse(part: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(part) + b"\n\n"


ROLE = sse(chunk(role="assistant", content=""))
WORD, LAST = sse(chunk(content="word ")), sse(chunk("stop"))


async def test_comments_while_the_prompt_is_read_are_signs_of_life_and_no_tokens() -> None:
    async with Slow(0.1, *[b": still reading\n\n"] * 30, ROLE, WORD, LAST) as server:
        request = replace(ASK, first_token_timeout=2, idle_timeout=2)
        assert TextDelta("word ") in await answer(server, request)


async def test_the_wait_between_tokens_counts_from_the_first_token_on() -> None:
    # the role comes long before the prompt has been read
    seen: list[Delta] = []
    async with Slow(0.4, ROLE, WORD, LAST) as server:
        model = open_chat_model("openai", base_url=f"{server.url}/plain/v1")

        async def listen() -> None:
            async for delta in model.stream(replace(ASK, idle_timeout=0.1)):
                seen.append(delta)  # noqa: PERF401, the deltas before the error count

        with pytest.raises(StreamInterrupted, match=r"silent for 0\.1s"):
            await listen()
        await model.aclose()
    assert seen == [TextDelta("word ")]


async def test_comments_between_tokens_do_not_stand_for_a_token() -> None:
    async with Slow(0.1, WORD, *[b": ping\n\n"] * 40, LAST) as server:
        with pytest.raises(StreamInterrupted, match=r"silent for 0\.5s"):
            await answer(server, replace(ASK, idle_timeout=0.5))


async def test_fragments_of_a_call_are_tokens() -> None:
    pieces = [fragment(0, "a", "f", '{"q": "')] + [fragment(0, None, None, "x")] * 30 + [fragment(0, None, None, '"}')]
    async with Slow(0.1, WORD, *map(sse, pieces), LAST) as server:
        (call,) = calls(await answer(server, replace(ASK, idle_timeout=2)))
    assert call.args == {"q": "x" * 30}


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


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_a_model_that_has_answered_is_there_whatever_the_server_lists(status: int) -> None:
    """A folder that is served, a name that a proxy understands, a server without a list."""
    async with Listing(chunk(content="yes"), chunk("stop"), status=status) as server:
        model = open_chat_model("openai", base_url=f"{server.url}/plain/v1")
        try:
            assert await model.reachable("m") is not None
            assert TextDelta("yes") in [delta async for delta in model.stream(ASK)]
            assert await model.reachable("m") is None
            assert await model.reachable("another") is not None
            server.gone = True
            with pytest.raises(ModelMissing):
                _ = [delta async for delta in model.stream(ASK)]
            assert await model.reachable("m") is not None
        finally:
            await model.aclose()


async def test_a_server_that_is_away_is_away_whoever_has_answered() -> None:
    server = Server(chunk(content="yes"), chunk("stop"))
    async with server:
        model = open_chat_model("openai", base_url=f"{server.url}/plain/v1")
        assert TextDelta("yes") in [delta async for delta in model.stream(ASK)]
        assert await model.reachable("m") is None
    try:
        assert "no model server answers" in str(await model.reachable("m"))
    finally:
        await model.aclose()


@pytest.mark.parametrize(("status", "complaint"), [(500, None), (503, "busy")])
async def test_what_a_server_said_of_a_model_that_answers_outlasts_a_broken_list(
    status: int, complaint: str | None
) -> None:
    listed = b'{"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}'
    async with Listing(chunk(content="yes"), chunk("stop"), listed=listed) as server:
        model = open_chat_model("openai", base_url=f"{server.url}/plain/v1")
        try:
            assert await model.reachable("m") is None
            assert TextDelta("yes") in [delta async for delta in model.stream(ASK)]
            server.status, server.listed = status, b"{}"
            said = await model.reachable("m")
            assert said is None if complaint is None else complaint in str(said)
            assert (await model.facts("m")).window == 4096
        finally:
            await model.aclose()


async def test_an_option_that_is_refused_with_a_403_is_left_out() -> None:
    said = "parameter stream_options is not allowed"
    rules = [{"times": 1, "respond": {"status": 403, "error": said}}, {"respond": {"text": "ok"}}]
    async with ScriptedModelServer(rules) as server:
        assert TextDelta("ok") in await answer(server)
        assert "stream_options" not in server.requests[1].body
