"""How the model server speaks: Ollama's, OpenAI's and Gemini's chat protocol, request and answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson

from shared.testing.script import Asked, Call, Respond

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    completion: int


class Speech(Protocol):
    """One answer in one protocol; every method gives the bytes to send."""

    content_type: str

    def begin(self) -> bytes: ...
    def thinking(self, text: str) -> bytes: ...
    def text(self, text: str) -> bytes: ...
    def calls(self, calls: Sequence[Call]) -> list[bytes]: ...
    def done(self, calls: Sequence[Call], usage: Usage) -> bytes:
        """The end; `calls` are those that come with it."""
        ...

    def error(self, text: str) -> bytes: ...
    def garbage(self) -> bytes: ...
    def whole(self, thinking: str, text: str, calls: Sequence[Call], usage: Usage) -> bytes:
        """The answer without streaming."""
        ...


def ollama_asked(body: Body) -> Asked:
    return Asked(
        model=body["model"],
        messages=[
            {
                "role": m["role"],
                "content": m.get("content") or "",
                # Only this name is read; `name` is ignored, as the real server does.
                "tool_name": m.get("tool_name", ""),
            }
            for m in body.get("messages") or ()
        ],
        tools=[tool["function"]["name"] for tool in body.get("tools") or ()],
        think=body.get("think"),
        stream=body.get("stream") is not False,
    )


class OllamaSpeech:
    content_type = "application/x-ndjson"

    def __init__(self, asked: Asked, respond: Respond) -> None:
        self._model = asked.model
        self._respond = respond

    def begin(self) -> bytes:
        return b""

    def thinking(self, text: str) -> bytes:
        return self._line({"role": "assistant", "content": "", "thinking": text})

    def text(self, text: str) -> bytes:
        return self._line({"role": "assistant", "content": text})

    def calls(self, calls: Sequence[Call]) -> list[bytes]:
        written = [_ollama_call(number, call) for number, call in enumerate(calls)]
        groups = [written] if self._respond.one_line else [[one] for one in written]
        return [self._line({"role": "assistant", "content": "", "tool_calls": group}) for group in groups]

    def done(self, calls: Sequence[Call], usage: Usage) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if calls:
            message["tool_calls"] = [_ollama_call(number, call) for number, call in enumerate(calls)]
        return self._last(message, usage)

    def error(self, text: str) -> bytes:
        return orjson.dumps({"error": text}) + b"\n"

    def garbage(self) -> bytes:
        return b'{"model": not json\n'

    def whole(self, thinking: str, text: str, calls: Sequence[Call], usage: Usage) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_ollama_call(number, call) for number, call in enumerate(calls)]
        return self._last(message, usage)

    def _line(self, message: dict[str, Any], **rest: Any) -> bytes:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        part = {"model": self._model, "created_at": now, "message": message, "done": False, **rest}
        return orjson.dumps(part) + b"\n"

    def _last(self, message: dict[str, Any], usage: Usage) -> bytes:
        counts = {
            "total_duration": 1_000_000 * (usage.completion + 1),
            "load_duration": 1_000_000,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": 1_000_000,
            "eval_count": usage.completion,
            "eval_duration": 1_000_000 * usage.completion,
        }
        shown = {name: value for name, value in counts.items() if value}  # zero values are left out
        return self._line(message, done=True, done_reason=self._respond.done_reason, **shown)


def _ollama_call(number: int, call: Call) -> dict[str, Any]:
    arguments = call.args if call.text_arguments is None else call.text_arguments
    written: dict[str, Any] = {"function": {"index": number, "name": call.name, "arguments": arguments}}
    name = _call_id(call)
    return {"id": name, **written} if name else written


def openai_asked(body: Body) -> Asked:
    names: dict[str, str] = {}
    messages = []
    for m in body.get("messages") or ():
        for call in m.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        content = m.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        messages.append({"role": m["role"], "content": content, "tool_name": names.get(m.get("tool_call_id", ""), "")})
    return Asked(
        model=body["model"],
        messages=messages,
        tools=[tool["function"]["name"] for tool in body.get("tools") or ()],
        think=(body.get("chat_template_kwargs") or {}).get("enable_thinking"),
        stream=bool(body.get("stream")),
    )


class OpenAISpeech:
    content_type = "text/event-stream"

    def __init__(self, asked: Asked, respond: Respond, *, with_usage: bool) -> None:
        self._model = asked.model
        self._respond = respond
        self._with_usage = with_usage
        self._id = f"chatcmpl-{uuid.uuid4().hex[:12]}"
        self._called = False

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def thinking(self, text: str) -> bytes:
        return self._chunk(self._thoughts(text))

    def _thoughts(self, text: str) -> dict[str, Any]:
        match self._respond.reasoning_field:
            case "content":
                return {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]}
            case "reasoning_details":
                detail = {"type": "reasoning.text", "text": text, "format": "scripted", "index": 0}
                return {"reasoning": text, "reasoning_details": [detail]}
            case name:
                return {name: text}

    def text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def calls(self, calls: Sequence[Call]) -> list[bytes]:
        sent: list[bytes] = []
        self._called = self._called or bool(calls)
        for number, call in enumerate(calls):
            text = _arguments_text(call)
            size = max(len(text), 1) if self._respond.whole_calls else 7
            pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
            head = {"name": call.name, "arguments": pieces[0] if self._respond.whole_calls else ""}
            first: dict[str, Any] = {
                "index": number,
                "id": _call_id(call) or None,
                "type": "function",
                "function": head,
            }
            if call.signature:
                first["extra_content"] = {"google": {"thought_signature": call.signature}}
            sent.append(self._chunk({"tool_calls": [first]}))
            if not self._respond.whole_calls:
                sent.extend(
                    self._chunk({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
                    for piece in pieces
                )
        return sent

    def done(self, calls: Sequence[Call], usage: Usage) -> bytes:
        parts = self.calls(calls)
        parts.append(self._chunk({}, finish_reason=self._reason()))
        if self._with_usage:
            parts.append(self._data({"choices": [], "usage": _openai_usage(usage)}))
        return b"".join(parts) + b"data: [DONE]\n\n"

    def error(self, text: str) -> bytes:
        code = self._respond.fault.code if self._respond.fault else 500
        return b"data: " + openai_error(code, text) + b"\n\n"

    def garbage(self) -> bytes:
        return b"data: {not json\n\n"

    def whole(self, thinking: str, text: str, calls: Sequence[Call], usage: Usage) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if thinking:
            message |= self._thoughts(thinking)
        if calls:
            self._called = True
            message["tool_calls"] = [
                {
                    "id": _call_id(call),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments_text(call)},
                }
                for call in calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": self._reason()}
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model,
                "choices": [choice],
                "usage": _openai_usage(usage),
            }
        )

    def _reason(self) -> str:
        return "tool_calls" if self._called else self._respond.done_reason

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return self._data({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    def _data(self, part: dict[str, Any]) -> bytes:
        head = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._model,
        }
        return b"data: " + orjson.dumps({**head, **part}) + b"\n\n"


def openai_error(status: int, text: str) -> bytes:
    return orjson.dumps({"error": {"message": text, "type": "server_error", "code": status}})


def google_asked(model: str, body: Body, *, stream: bool) -> Asked:
    system = "".join(part.get("text", "") for part in (body.get("systemInstruction") or {}).get("parts", ()))
    messages = [{"role": "system", "content": system, "tool_name": ""}] if system else []
    for content in body.get("contents") or ():
        for part in content["parts"]:
            told = part.get("functionResponse")
            role = "tool" if told else "assistant" if content.get("role") == "model" else "user"
            said = str(told["response"].get("result", "")) if told else part.get("text", "")
            messages.append({"role": role, "content": said, "tool_name": told["name"] if told else ""})
    thinking = (body.get("generationConfig") or {}).get("thinkingConfig") or {}
    return Asked(
        model=model,
        messages=messages,
        tools=[f["name"] for tool in body.get("tools") or () for f in tool.get("functionDeclarations", ())],
        think=thinking.get("includeThoughts", thinking.get("include_thoughts")),
        stream=stream,
    )


class GoogleSpeech:
    content_type = "text/event-stream"

    def __init__(self, asked: Asked, respond: Respond) -> None:
        self._model = asked.model
        self._respond = respond

    def begin(self) -> bytes:
        return b""

    def thinking(self, text: str) -> bytes:
        return self._data([{"text": text, "thought": True}])

    def text(self, text: str) -> bytes:
        return self._data([{"text": text}])

    def calls(self, calls: Sequence[Call]) -> list[bytes]:
        return [self._data([_google_call(call)]) for call in calls]

    def done(self, calls: Sequence[Call], usage: Usage) -> bytes:
        return self._data([_google_call(call) for call in calls], **self._end(usage))

    def error(self, text: str) -> bytes:
        return b"data: " + google_error(500, text) + b"\n\n"

    def garbage(self) -> bytes:
        return b"data: {not json\n\n"

    def whole(self, thinking: str, text: str, calls: Sequence[Call], usage: Usage) -> bytes:
        parts: list[dict[str, Any]] = [{"text": thinking, "thought": True}] if thinking else []
        parts += [{"text": text}] if text else []
        return orjson.dumps(self._part([*parts, *map(_google_call, calls)], **self._end(usage)))

    def _end(self, usage: Usage) -> dict[str, Any]:
        return {
            "reason": "MAX_TOKENS" if self._respond.done_reason == "length" else "STOP",
            "usage": {"promptTokenCount": usage.prompt, "candidatesTokenCount": usage.completion},
        }

    def _part(self, parts: list[Any], reason: str | None = None, usage: Any = None) -> dict[str, Any]:
        candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
        if reason:
            candidate["finishReason"] = reason
        part = {"candidates": [candidate], "modelVersion": self._model}
        return {**part, "usageMetadata": usage} if usage else part

    def _data(self, parts: list[Any], **end: Any) -> bytes:
        return b"data: " + orjson.dumps(self._part(parts, **end)) + b"\n\n"


def _google_call(call: Call) -> dict[str, Any]:
    function: dict[str, Any] = {"name": call.name, "args": call.args}
    name = _call_id(call)
    part: dict[str, Any] = {"functionCall": {"id": name, **function} if name else function}
    return {**part, "thoughtSignature": call.signature} if call.signature else part


def google_error(status: int, text: str) -> bytes:
    states = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
    return orjson.dumps({"error": {"code": status, "message": text, "status": states.get(status, "INTERNAL")}})


def _call_id(call: Call) -> str:
    return f"call_{uuid.uuid4().hex[:8]}" if call.id is None else call.id


def _arguments_text(call: Call) -> str:
    return json.dumps(call.args) if call.text_arguments is None else call.text_arguments


def _openai_usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
