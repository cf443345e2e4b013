"""Model servers with rules of their own for a round of tool calls: one row of the table for each server.

Each server answers the question with a tool call. It refuses (HTTP 400) the results unless the message with the call
comes back in the form of its rule. The rules and the refusals are those of public reports and documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson
import pytest

from shared.llm.adapter import WiredChatModel
from shared.llm.factory import open_chat_model
from shared.llm.port import (
    ChatRequest,
    Delta,
    Finish,
    ModelError,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import Script

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
THOUGHT = "I look it up."
QUESTION = {"role": "user", "content": "hi"}
# A finished turn in a client's own history.
EARLIER = [
    {"role": "user", "content": "before"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call_of_before", "name": "f", "args": {}}]},
    {"role": "tool", "tool_name": "f", "tool_call_id": "call_of_before", "content": "old"},
    {"role": "assistant", "content": "done"},
]
MISSING = "thinking is enabled but <<field>> is missing in assistant tool call message at index <<index>>"
DEEPSEEK = "The `<<field>>` in the thinking mode must be passed back to the API."
UNSIGNED = "Function call is missing a thought_signature in functionCall parts. This is required for tools to work."
GOOGLES = {"needs": "extra_content", "scope": "turn", "error": UNSIGNED}
DETAIL = {"type": "reasoning.text", "text": THOUGHT, "format": "scripted", "index": 0}


def needs(name: str, error: str = MISSING, **more: Any) -> dict[str, Any]:
    return {"needs": name, "error": error, **more}


def refuses(name: str, error: str = "property '<<field>>' is unsupported") -> dict[str, Any]:
    return {"refuses": [name], "error": error}


def call(**more: Any) -> dict[str, Any]:
    return {"name": "f", "args": {"a": 1}, "id": "call_1", **more}


@dataclass(frozen=True)
class Odd:
    """A server. insists: its rule. says: the difference of its answer from a thought and a call. back: required fields
    of the returned message. absent: forbidden fields. refusals: the number of refused requests. history: whether a turn
    with a tool call comes before."""

    name: str
    insists: dict[str, Any] | None
    back: dict[str, Any]
    says: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    refusals: int = 0
    history: bool = False
    backend: Literal["openai", "ollama", "google_genai"] = "openai"


THOUGHT_PART = {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}
ODD = [
    Odd("deepseek", needs("reasoning_content", DEEPSEEK, empty=True), {"reasoning_content": THOUGHT}, {},
        ("reasoning",)),
    Odd("deepseek: a call without a thought", needs("reasoning_content", DEEPSEEK, empty=True),
        {"reasoning_content": " "}, {"thinking": ""}, refusals=1),
    Odd("deepseek: a call in an earlier turn", needs("reasoning_content", DEEPSEEK, empty=True),
        {"reasoning_content": THOUGHT}, refusals=1, history=True),
    Odd("kimi", needs("reasoning_content"), {"reasoning_content": THOUGHT}),
    Odd("kimi: a call without a thought", needs("reasoning_content"), {"reasoning_content": " "}, {"thinking": ""},
        refusals=1),
    Odd("litellm before deepseek", needs("reasoning_content",
        "messages[<<index>>]: assistant message with tool_calls must include <<field>>"), {"reasoning_content": " "},
        {"thinking": ""}, refusals=1),
    Odd("kimi behind openrouter", needs("reasoning_content", orjson.dumps({"error": {
        "message": "Provider returned error", "code": 400, "metadata": {"raw": orjson.dumps(
            {"error": {"message": MISSING, "type": "invalid_request_error"}}).decode()}}}).decode()),
        {"reasoning_content": " "}, {"thinking": ""}, refusals=1),
    Odd("vllm", needs("reasoning"), {"reasoning": THOUGHT, "reasoning_content": THOUGHT},
        {"reasoning_field": "reasoning"}),
    Odd("cerebras", refuses("reasoning_content",
        "messages.<<index>>.assistant.<<field>>: property 'messages.<<index>>.assistant.<<field>>' is unsupported"),
        {"reasoning": THOUGHT}, {"reasoning_field": "reasoning"}, ("reasoning_content",), refusals=1),
    Odd("groq", refuses("reasoning_content", "'messages.<<index>>' : for 'role:assistant' the following must be "
        "satisfied[('messages.<<index>>' : property '<<field>>' is unsupported)]"), {}, {}, ("reasoning_content",), 1),
    Odd("a server that does not support the field", refuses("reasoning_content",
        "this model does not support <<field>>"), {}, {}, ("reasoning_content",), 1),
    Odd("openrouter", needs("reasoning_details"), {"reasoning_details": [DETAIL], "reasoning": THOUGHT},
        {"reasoning_field": "reasoning_details"}),
    Odd("mistral", refuses("reasoning_content", "Extra inputs are not permitted: messages.<<index>>.<<field>>"),
        {"content": [THOUGHT_PART]}, {"reasoning_field": "content"}, ("reasoning_content",)),
    Odd("mistral: text beside the call", None,
        {"content": [THOUGHT_PART, {"type": "text", "text": "Wait."}]},
        {"reasoning_field": "content", "text": "Wait."}),
    Odd("mistral: ids", {"ids": "[A-Za-z0-9]{9}", "error": "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a "
        "length of 9."}, {"reasoning_content": THOUGHT}, refusals=1),
    Odd("gemini behind openai's protocol", GOOGLES, {"reasoning_content": THOUGHT},
        {"tool_calls": [call(signature="c2lnbmVk")]}),
    Odd("gemini", {**GOOGLES, "needs": "thoughtSignature"}, {"thoughtSignature": "c2lnbmVk"},
        {"tool_calls": [call(signature="c2lnbmVk"), call(id="call_2")]}, backend="google_genai"),
    Odd("gemini: a signature that is lost", {**GOOGLES, "needs": "thoughtSignature"},
        {"thoughtSignature": "c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I="}, backend="google_genai"),
    Odd("ollama", needs("thinking"), {"thinking": THOUGHT, "content": ""}, backend="ollama"),
    Odd("no text beside the call", None, {"content": None}),
    Odd("lm studio: no text beside the call", needs("content", "Invalid 'content': 'content' field must be a string or "
        "an array of objects.", empty=True), {"content": ""}, refusals=1),
    Odd("a proxy: no text beside the call", needs("content",
        "Invalid value for 'content': expected a string, got null.", empty=True), {"content": ""}, refusals=1),
    Odd("blank lines beside the call", None, {"content": None}, {"text": ["\n", "\n"]}),
]  # fmt: skip


def message(deltas: list[Delta]) -> dict[str, Any]:
    """Return an answer in the form of a returned message."""
    called = [delta for delta in deltas if isinstance(delta, ToolCall)]
    finish = deltas[-1]
    assert isinstance(finish, Finish)
    return {
        "role": "assistant",
        "content": "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
        "thinking": "".join(delta.text for delta in deltas if isinstance(delta, ThinkingDelta)),
        "reasoning_details": list(finish.reasoning_details),
        "tool_calls": [{"id": c.id, "name": c.name, "args": c.args, "signature": c.signature} for c in called],
    }


def results(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_name": "f", "tool_call_id": called["id"], "content": "found"}
        for called in said["tool_calls"]
    ]


def model_of(server: ScriptedModelServer, backend: Literal["openai", "ollama", "google_genai"]) -> WiredChatModel:
    url = f"{server.url}/plain/v1" if backend == "openai" else server.url
    return open_chat_model(backend, base_url=url, api_key="k")


def came_back(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request that have tool calls."""
    parts = [part for content in body.get("contents") or () for part in content["parts"] if "functionCall" in part]
    return parts or [said for said in body["messages"] if said.get("tool_calls")]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
async def test_tool_round_comes_back_as_the_server_wants_it(odd: Odd) -> None:
    respond = {"thinking": THOUGHT, "tool_calls": [call()], **odd.says}
    rules = [{"when": {"tool_results": 0}, "respond": respond}, {"respond": {"text": "ok"}}]
    history = EARLIER if odd.history else []
    ask = ChatRequest(model="gemini-3-flash", messages=[*history, QUESTION], tools=[TOOL])
    async with ScriptedModelServer() as server:
        model = model_of(server, odd.backend)
        # The adapter learns the rule for the history with the question.
        server.set_rules(Script.model_validate({"rules": rules, "insists": odd.insists}))
        said = message([delta async for delta in model.stream(ask)])
        following = replace(ask, messages=[*ask.messages, said, *results(said)])
        for _ in range(2):
            assert TextDelta("ok") in [delta async for delta in model.stream(following)]
        await model.aclose()
        assert [received.outcome for received in server.requests].count("refused") == odd.refusals
        sent = came_back(server.requests[-1].body)
    back = sent[1] if odd.history else sent[0]
    assert odd.back.items() <= back.items()
    assert not back.keys() & set(odd.absent)
    if odd.backend == "openai":
        told = [one["tool_call_id"] for one in server.requests[-1].body["messages"] if one["role"] == "tool"]
        assert told == [called["id"] for one in sent for called in one["tool_calls"]]


async def test_field_that_a_server_demands_and_refuses_fails_once() -> None:
    """The request fails when a server demands a field and refuses it too."""
    insists = {"needs": "reasoning_content", "refuses": ["reasoning_content"], "error": MISSING}
    called = {"role": "assistant", "content": "", "thinking": "", "tool_calls": [{"id": "1", "name": "f", "args": {}}]}
    async with ScriptedModelServer() as server:
        server.set_rules(Script.model_validate({"insists": insists}))
        model = model_of(server, "openai")
        with pytest.raises(ModelRejected, match="reasoning_content is missing"):
            _ = [d async for d in model.stream(ChatRequest(model="m", messages=[QUESTION, called, *results(called)]))]
        await model.aclose()
        assert len(server.requests) == 2


async def test_refusal_inside_a_stream_is_learned_from() -> None:
    """OpenRouter begins its answer before its provider refuses the request."""
    fault = {"kind": "error_line", "code": 400, "text": MISSING.replace("<<field>>", "reasoning_content")}
    async with ScriptedModelServer([{"times": 1, "respond": {"fault": fault}}, {"respond": {"text": "ok"}}]) as server:
        model = model_of(server, "openai")
        deltas = [delta async for delta in model.stream(ChatRequest(model="m", messages=[*EARLIER, QUESTION]))]
        await model.aclose()
        assert TextDelta("ok") in deltas
        assert came_back(server.requests[-1].body)[0]["reasoning_content"] == " "


@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        (429, "", ModelOverloaded),
        (502, "", ModelUnavailable),
        (400, "", ModelRejected),
        (400, "half", StreamInterrupted),
        (503, "half", ModelOverloaded),
    ],
)
async def test_error_inside_a_stream_counts_by_its_status(code: int, text: str, error: type[ModelError]) -> None:
    fault = {"kind": "error_line", "after": 1, "code": code, "text": "Provider returned error"}
    async with ScriptedModelServer([{"respond": {"text": text, "fault": fault}}]) as server:
        model = model_of(server, "openai")
        with pytest.raises(error) as raised:
            _ = [delta async for delta in model.stream(ChatRequest(model="m", messages=[QUESTION]))]
        await model.aclose()
    assert type(raised.value) is error


BEGINNINGS = [
    ("behind a thought in the text", ["<think>hm</think>", "\n\n", "Yes."], "Yes."),
    ("split over chunks", ["<think>hm</thi", "nk>\n", " \n", "\r\n", "Ye", "s."], "Yes."),
    ("a server with a field for thoughts", ["\n\nYes."], "Yes."),
    ("a server that leaves the end of the thought", ["</think>", "\n\nYes."], "Yes."),
    ("a first line of code keeps its indentation", ["\n\n", "  ", "  x = 1\n    y = 2"], "    x = 1\n    y = 2"),
    ("blank lines of the answer itself stay", ["\n", "One.\n\n", "\n", "Two.\n"], "One.\n\n\nTwo.\n"),
    ("a thought behind the beginning", ["One.<think>hm</think>\n\nTwo."], "One.\n\nTwo."),
]


@pytest.mark.parametrize("backend", ["openai", "ollama", "google_genai"])
@pytest.mark.parametrize(("chunks", "text"), [row[1:] for row in BEGINNINGS], ids=[row[0] for row in BEGINNINGS])
async def test_answer_begins_without_blank_lines(
    backend: Literal["openai", "ollama", "google_genai"], chunks: list[str], text: str
) -> None:
    async with ScriptedModelServer([{"respond": {"thinking": "so", "text": chunks}}]) as server:
        model = model_of(server, backend)
        deltas = [delta async for delta in model.stream(ChatRequest(model="m", messages=[QUESTION]))]
        await model.aclose()
    said = [delta.text for delta in deltas if isinstance(delta, TextDelta)]
    assert "".join(said) == text
    # The first delta, which a client shows at once.
    assert said[0].strip()


async def test_blank_lines_of_a_continued_answer_stay() -> None:
    """The client gave the beginning of the answer; a blank line separates it from the rest."""
    begun = [QUESTION, {"role": "assistant", "content": "Dear Ann,"}]
    async with ScriptedModelServer([{"respond": {"text": ["\n\n", "thank you."]}}]) as server:
        model = model_of(server, "openai")
        deltas = [delta async for delta in model.stream(ChatRequest(model="m", messages=begun))]
        await model.aclose()
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "\n\nthank you."
