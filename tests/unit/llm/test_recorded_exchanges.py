"""Exchanges with a genuine Ollama 0.32.14, every one of them, played to the adapters: what comes out of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.recorded import RECORDINGS, Recorded

from shared.llm.factory import Backend, open_chat_model, open_embedding_model
from shared.llm.failures import ThinkingUnsupported, ToolsUnsupported
from shared.llm.ollama_admin import OllamaAdmin
from shared.llm.port import (
    AccessRefused,
    ChatRequest,
    ContextOverflow,
    EmptyAnswer,
    Finish,
    ModelError,
    ModelMissing,
    ModelRejected,
    NotOffered,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)

# of a chat: (text, whether there were thoughts, calls, how it ended)
Said = tuple[str, bool, list[dict[str, Any]], str]
OSLO = [{"query": "weather in Oslo"}]

CHATS: dict[str, Said] = {
    "chat-json-schema": ('{\n  "capital": "Paris"\n}', False, [], "stop"),
    "chat-length": ("Sure, here's a simple Python script", False, [], "length"),
    "chat-no-stream": ("The capital of France is Paris.", False, [], "stop"),
    "chat-output-fills-context": ("Sure, here are the8\n99", False, [], "stop"),
    "chat-plain": ("The capital of France is Paris.", False, [], "stop"),
    "options-unknown-name": ("Hello.", False, [], "length"),
    "thinking": ("The capital of Norway is Oslo.", True, [], "stop"),
    # the parser of thoughts waits for their end, and there are none
    "thinking-off": ("5 is larger than 3.", True, [], "stop"),
    "thinking-then-tool-call": ("", True, OSLO, "stop"),
    "tool-call-go-template": ("", False, OSLO, "stop"),
    # printed as JSON in a code fence, which this model's own template has no word for
    "tool-call-native": ("", False, OSLO, "stop"),
    "tool-result-round-trip": ("", False, [{"query": "weather Oslo"}], "stop"),
    "v1-chat": ("The capital of France is Paris.", False, [], "stop"),
    "v1-thinking": (
        "To answer this question simply, compare the two numbers 3 and 5. They are both numbers. "
        "Thus, 5 is larger than 3",
        True, [], "length",
    ),
    # the model takes the parameter's schema for its value
    "v1-tool-call": ("", False, [{"query": {"type": "string", "description": "What to search for"}}], "stop"),
}  # fmt: skip

VALUES: dict[str, Any] = {
    "embed-empty-text": [384],
    "embed-no-input": [],
    "embed-ok": [384],
    "embed-too-long": [384],
    "v1-embeddings": [384],
    "ps": ["qwen:latest", "smol:latest"],
    "show": (32_768, {"chat", "tools"}),
    "tags": [
        "qwen:latest", "minilm:latest", "smol:latest", "qwenth:latest", "qwent:latest", "nomic-embed-text:latest",
        "gemma4:e4b",
    ],
    "v1-models": None,
    "version": "0.32.14",
}  # fmt: skip

ERRORS: dict[str, tuple[type[ModelError], str]] = {
    "embed-too-long-truncate-false": (ContextOverflow, "exceeds the context length"),
    "embed-wrong-model-no-embedding": (NotOffered, "does not support embeddings"),
    "error-400-body-not-json": (ModelRejected, "cannot unmarshal string"),
    "error-400-chat-with-embedding-model": (ModelRejected, "does not support chat"),
    "error-400-options-type": (ModelError, "must be of type integer"),
    "error-400-think": (ThinkingUnsupported, "does not support thinking"),
    "error-400-tools": (ToolsUnsupported, "does not support tools"),
    "error-403-host": (AccessRefused, "refuses the name by which it is called"),
    "error-404-embed": (ModelMissing, "ollama pull absent:1b"),
    "error-404-model": (ModelMissing, "ollama pull absent:1b"),
    "error-404-show": (ModelMissing, "ollama pull absent:1b"),
    "error-midstream-runner-killed": (StreamInterrupted, "crashed at its server"),
    # what its log quotes of somebody else's prompt is not repeated
    "error-midstream-runner-killed-stale-text": (StreamInterrupted, "while running the model$"),
    "load-empty-messages": (EmptyAnswer, "empty answer"),
    "overflow-truncate-default": (ContextOverflow, "3031 tokens"),
    "overflow-truncate-false": (ContextOverflow, "3031 tokens"),
    "overflow-truncate-false-template-mode": (ContextOverflow, "3010 tokens"),
    "pull-fails": (ModelError, "no such host"),
    "unload": (EmptyAnswer, "empty answer"),
    "v1-error-400-tools": (ToolsUnsupported, "does not support tools"),
    "v1-error-404": (ModelMissing, "does not have the model absent:1b"),
}


def message(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded message in the port's form."""
    calls = [
        {"id": call.get("id") or "c1", "name": call["function"]["name"], "args": call["function"]["arguments"]}
        for call in recorded.get("tool_calls") or ()
    ]
    return {**recorded, "tool_calls": calls} if calls else dict(recorded)


async def chat(server: Recorded, backend: Backend, url: str) -> Said:
    body = server.request["body"] if isinstance(server.request["body"], dict) else {}
    request = ChatRequest(
        model=body.get("model", "m"),
        messages=[message(one) for one in body.get("messages") or ()],
        tools=body.get("tools") or (),
        think=bool(body.get("think")),
        response_schema=body.get("format"),
    )
    model = open_chat_model(backend, base_url=url)
    try:
        deltas = [delta async for delta in model.stream(request)]
    finally:
        await model.aclose()
    finish = deltas[-1]
    assert isinstance(finish, Finish)
    assert finish.completion_tokens or backend == "openai"
    return (
        "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
        any(isinstance(delta, ThinkingDelta) for delta in deltas),
        [delta.args for delta in deltas if isinstance(delta, ToolCall) and delta.name == "web_search"],
        finish.reason,
    )


async def embedded(server: Recorded, backend: Backend, url: str) -> list[int]:
    model = open_embedding_model(backend, base_url=url)
    try:
        body = server.request["body"]
        return [len(vector) for vector in await model.embed(body["model"], body["input"])]
    finally:
        await model.aclose()


async def played(name: str) -> Any:
    """What the adapters make of one recording."""
    async with Recorded(name) as server:
        admin = OllamaAdmin(server.url)
        body = server.request["body"]
        try:
            match server.request["path"]:
                case "/api/chat":
                    return await chat(server, "ollama", server.url)
                case "/v1/chat/completions":
                    return await chat(server, "openai", f"{server.url}/v1")
                case "/api/embed":
                    return await embedded(server, "ollama", server.url)
                case "/v1/embeddings":
                    return await embedded(server, "openai", f"{server.url}/v1")
                case "/v1/models":
                    model = open_chat_model("openai", base_url=f"{server.url}/v1")
                    try:
                        return await model.reachable("qwen")
                    finally:
                        await model.aclose()
                case "/api/show":
                    facts = await admin.facts(body["model"])
                    return facts.window, set(facts.abilities or ())
                case "/api/tags":
                    return await admin.models()
                case "/api/ps":
                    return await admin.loaded()
                case "/api/pull":
                    return [progress async for progress in admin.pull(body["model"])]
                case "/api/version":
                    return await admin.version()
                case path:
                    raise AssertionError(f"nothing plays {path}")
        finally:
            await admin.aclose()


def test_every_recording_has_its_outcome_here() -> None:
    assert sorted([*CHATS, *VALUES, *ERRORS]) == sorted(RECORDINGS)
    assert len(RECORDINGS) == 46


@pytest.mark.parametrize("name", [*CHATS, *VALUES])
async def test_a_recorded_answer_is_read(name: str) -> None:
    assert await played(name) == {**CHATS, **VALUES}[name]


@pytest.mark.parametrize("name", ERRORS)
async def test_a_recorded_failure_is_ours(name: str) -> None:
    kind, says = ERRORS[name]
    with pytest.raises(kind, match=says) as caught:
        await played(name)
    assert type(caught.value) is kind
