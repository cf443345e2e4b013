"""What only Gemini's protocol has: contents and parts, signatures of thoughts, withheld answers."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.errors import SettingsError
from shared.llm.adapter import WiredChatModel
from shared.llm.factory import open_chat_model
from shared.llm.port import ChatRequest, Delta, Finish, ModelRejected, ToolCall
from shared.testing.model_server import ScriptedModelServer

TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}}}
ASK = ChatRequest(model="gemini-3-flash", messages=[{"role": "user", "content": "hi"}], tools=[TOOL])


class Server(ScriptedModelServer):
    """Answers every request with the same parts."""

    def __init__(self, *chunks: dict[str, Any]) -> None:
        super().__init__()
        body = b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for part in chunks)
        self.bodies: list[dict[str, Any]] = []

        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            return Response(body, media_type="text/event-stream")

        self.app = Starlette(routes=[Route("/{path:path}", chat, methods=["POST"])])


def chunk(*parts: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": list(parts)}, "finishReason": reason}]}


async def answer(model: WiredChatModel, request: ChatRequest = ASK) -> list[Delta]:
    return [delta async for delta in model.stream(request)]


def asked_back(call: ToolCall) -> ChatRequest:
    """The request of the next round."""
    called = {"id": call.id, "name": call.name, "args": call.args, "signature": call.signature}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    told = {"role": "tool", "tool_name": call.name, "tool_call_id": call.id, "content": "found"}
    return replace(ASK, messages=[*ASK.messages, said, told])


async def test_the_signature_of_a_call_is_sent_back_with_it() -> None:
    signature = b64encode(b"signed").decode()
    part = {"functionCall": {"name": "f", "args": {"a": 1}}, "thoughtSignature": signature}
    async with Server(chunk(part, reason="STOP")) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        call = next(delta for delta in await answer(model) if isinstance(delta, ToolCall))
        await answer(model, asked_back(call))
        await model.aclose()
        said, told = server.bodies[1]["contents"][1:]
    assert said["parts"][0]["thoughtSignature"] == signature
    assert said["parts"][0]["functionCall"]["args"] == {"a": 1}
    assert told["parts"][0]["functionResponse"]["name"] == "f"
    assert told["parts"][0]["functionResponse"]["response"] == {"result": "found"}


async def test_a_call_of_another_replica_is_sent_with_the_replacement_signature() -> None:
    async with Server(chunk({"text": "ok"}, reason="STOP")) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        await answer(model, asked_back(ToolCall("other", "f", {})))
        await model.aclose()
        said = server.bodies[0]["contents"][1]
    assert said["parts"][0]["thoughtSignature"] == b64encode(b"skip_thought_signature_validator").decode()


async def test_system_options_and_schema_go_into_the_configuration() -> None:
    request = replace(
        ASK,
        messages=[{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}],
        options={"temperature": 0.5, "num_predict": 9, "stop": "x", "top_k": 40, "mirostat": 1},
        tools=(),
        think=False,
        response_schema={"type": "object"},
    )
    async with Server(chunk({"text": "{}"}, reason="STOP")) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        await answer(model, request)
        await model.aclose()
        body = server.bodies[0]
    config = body["generationConfig"]
    assert body["systemInstruction"]["parts"][0]["text"] == "brief"
    assert [content["role"] for content in body["contents"]] == ["user"]
    assert (config["temperature"], config["maxOutputTokens"], config["stopSequences"]) == (0.5, 9, ["x"])
    assert config["topK"] == 40
    assert config["responseMimeType"] == "application/json"
    assert "mirostat" not in config


@pytest.mark.parametrize("reason", ["SAFETY", "PROHIBITED_CONTENT"])
async def test_a_withheld_answer_is_rejected_with_its_reason(reason: str) -> None:
    async with Server(chunk(reason=reason)) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        with pytest.raises(ModelRejected, match=reason):
            await answer(model)
        await model.aclose()


async def test_a_refused_prompt_is_rejected_with_its_reason() -> None:
    async with Server({"promptFeedback": {"blockReason": "SAFETY"}}) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        with pytest.raises(ModelRejected, match="refuses the prompt: SAFETY"):
            await answer(model)
        await model.aclose()


async def test_model_that_always_thinks_gets_extra_tokens() -> None:
    """A judge's short answer has a limit, which thoughts would use up."""
    said = "Budget 0 is invalid. This model only works in thinking mode."
    rules = [{"times": 1, "respond": {"status": 400, "error": said}}, {"respond": {"text": "[RESULT] 4"}}]
    short = replace(ASK, tools=(), think=False, options={"num_predict": 1024})
    async with ScriptedModelServer(rules) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        await answer(model, short)
        await model.aclose()
        first, second = (request.body["generationConfig"] for request in server.requests)
    assert first["maxOutputTokens"] == 1024
    assert second["maxOutputTokens"] == 1024 + 4096
    assert "thinkingConfig" not in second


async def test_thoughts_count_as_completion_tokens() -> None:
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 2, "thoughtsTokenCount": 7}
    async with Server({**chunk({"text": "ok"}, reason="STOP"), "usageMetadata": usage}) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        deltas = await answer(model)
        await model.aclose()
    assert deltas[-1] == Finish("stop", 5, 9, "gemini-3-flash")


def test_no_api_key_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="API key"):
        open_chat_model("google_genai")


async def test_nobodys_certificates_are_read_for_clients_that_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_args: Any, **_more: Any) -> None:
        raise AssertionError("certificates are read")

    monkeypatch.setattr("ssl.create_default_context", read)
    async with Server(chunk({"text": "Hello."}, reason="STOP")) as server:
        model = open_chat_model("google_genai", base_url=server.url, api_key="k")
        assert isinstance((await answer(model))[-1], Finish)
        await model.aclose()
