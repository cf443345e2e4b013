"""Ollama's chat: the native `/api/chat`, read as NDJSON over httpx; `ollama_admin` has the rest, by Ollama's package.

The package's chat is not used, for these faults of ollama 0.6.3 (`tests/contract/test_ollama_client.py` shows each):
- It splits the stream at U+0085 and other line ends of Unicode, inside an answer's text, and then fails.
- It takes a stream that ends without `done` for a whole answer.
- It drops the ids of tool calls, in what it reads and in what it sends, and the `tool_call_id` of a result.
- It drops `anyOf`, `default`, bounds and nested properties from the schemas of tools.
- It cannot send `truncate` and `shift`, without which the server cuts a long prompt silently.
"""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.llm.adapter import RawCall, Said, WireEvent, merged
from shared.llm.failures import error_text, failure
from shared.llm.http import Bound
from shared.llm.ollama_admin import OllamaAdmin, keep_alive_value, missing
from shared.llm.port import (
    ChatRequest,
    Finish,
    ModelError,
    ModelFacts,
    ModelMissing,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
)
from shared.llm.server import NDJSON, OLLAMA, Kind
from shared.llm.toolcalls import parsed, text_of


class OllamaWire:
    """One connection pool to one Ollama server. `keep_alive` is how long it keeps the model loaded."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None = None,
        keep_alive: str | None = None,
        ca_file: Path | None = None,
        kind: Kind = OLLAMA,
    ) -> None:
        self._keep_alive = keep_alive_value(keep_alive)
        self._admin = OllamaAdmin(base_url, api_key, ca_file, kind)
        # Silence is watched by the adapter: a model load is allowed to take longer than a pause.
        self._server = self._admin.server

    async def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        asked, bound = self._body(request, wish), Bound(request.length)
        try:
            lines = self._server.lines("/api/chat", asked, bound, NDJSON, missing(request.model))
            async with contextlib.aclosing(lines) as arrived:
                async for some in arrived:
                    for event in merged(_events(some, request.model)):
                        yield event
        except ModelMissing as exc:
            there: str | None = None
            with contextlib.suppress(ModelError):
                there = await self._admin.chat_model()
            if there is None:
                raise
            raise ModelMissing(exc.cause, f"or use one that is there: LOCAL2_MODEL={there}") from exc

    async def facts(self, model: str) -> ModelFacts:
        return await self._admin.facts(model)

    async def aclose(self) -> None:
        await self._admin.aclose()

    def _body(self, request: ChatRequest, wish: bool) -> dict[str, Any]:
        options = {name: value for name, value in request.options.items() if name != "max_tokens"}
        if (length := request.length) is not None:
            options["num_predict"] = length
        body: dict[str, Any] = {
            "model": request.model,
            "messages": [_message(message) for message in request.messages],
            "stream": True,
            # Left out, it would mean true for every model that can think.
            "think": request.think and wish,
            "options": {**options, "num_ctx": request.num_ctx},
            # Without these two the server silently cuts a prompt that is too long; older servers ignore them.
            "truncate": False,
            "shift": False,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if request.response_schema is not None:
            body["format"] = request.response_schema
        if self._keep_alive is not None:
            body["keep_alive"] = self._keep_alive
        return body


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    match message["role"]:
        case "assistant":
            said: dict[str, Any] = {"role": "assistant", "content": content}
            if message.get("thinking"):
                said["thinking"] = message["thinking"]
            if message.get("tool_calls"):
                said["tool_calls"] = [
                    {"id": call["id"], "function": {"index": n, "name": call["name"], "arguments": call["args"]}}
                    for n, call in enumerate(message["tool_calls"])
                ]
            return said
        case "tool":
            # `tool_name` is what current servers read, `name` what older ones and proxies do.
            name = message.get("tool_name", "")
            told = {"role": "tool", "content": content, "tool_name": name, "name": name}
            if message.get("tool_call_id"):
                told["tool_call_id"] = message["tool_call_id"]
            return told
        case role:
            images = [b64encode(image["data"]).decode() for image in message.get("images") or ()]
            return {"role": role, "content": content, **({"images": images} if images else {})}


def _events(lines: Iterable[bytes], model: str) -> Iterator[Said]:
    """What lines say; the last one of a stream may carry content too."""
    for line in lines:
        if not line.strip():
            continue
        try:
            part = parsed(line)
            if "error" in part:
                raise failure(None, error_text(line), missing(model))
            message = part.get("message") or {}
            thinking, text, calls = message.get("thinking"), message.get("content"), message.get("tool_calls")
            if thinking:
                yield ThinkingDelta, thinking
            if text:
                yield TextDelta, text
            for call in calls or ():
                function = call["function"]
                call_id = text_of(call["id"]) if call.get("id") else None
                yield RawCall(call_id, text_of(function["name"]), function.get("arguments"))
            if part.get("done"):
                yield _finish(part, model)
            elif not (thinking or text or calls):
                yield TextDelta, ""
        except (ValueError, AttributeError, KeyError, TypeError) as exc:
            raise StreamInterrupted(f"Ollama sent a line that cannot be read: {line[:80]!r}") from exc


def _finish(part: Mapping[str, Any], model: str) -> Finish:
    return Finish(
        reason="length" if part.get("done_reason") == "length" else "stop",
        prompt_tokens=part.get("prompt_eval_count"),
        completion_tokens=part.get("eval_count"),
        model=part.get("model") or model,
    )
