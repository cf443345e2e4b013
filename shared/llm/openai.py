"""Any OpenAI-compatible server: vLLM, llama.cpp, LM Studio, a cluster behind one URL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from shared.llm.adapter import RawCall, WireEvent, merged
from shared.llm.address import openai_url
from shared.llm.discovery import is_llama, of_openai, same_model
from shared.llm.failures import ThinkingUnsupported, error_text, failure
from shared.llm.http import Bound
from shared.llm.port import (
    ChatRequest,
    Finish,
    ModelError,
    ModelFacts,
    ModelMissing,
    ModelRejected,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
)
from shared.llm.server import OPENAI, SSE, ModelServer
from shared.llm.toolcalls import parsed, text_of
from shared.llm.vectors import unit_vectors

# Longest wait for an answer that needs no model, in seconds.
LOOK_TIMEOUT = 10.0
# A model may have to be loaded before it embeds.
EMBED_TIMEOUT = 120.0

# Ollama's names of options that have another one here.
_RENAMED = {"num_predict": "max_tokens"}


class OpenAIWire:
    """One connection pool to one server; retries are the caller's."""

    def __init__(self, base_url: str | None, api_key: str | None, ca_file: Path | None = None) -> None:
        # Silence is watched by the adapter: a model load is allowed to take longer than a pause.
        self._server = ModelServer(OPENAI, openai_url(base_url), api_key, ca_file)

    async def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        missing = _missing(self._server.url, request.model)
        asked, bound, reading = _body(request, wish), Bound(request.length), _Reading(request.model, missing)
        try:
            async with self._server.lines("chat/completions", asked, bound, SSE, missing) as arrived:
                async for lines in arrived:
                    for event in merged(event for line in lines for event in reading.events(line)):
                        yield event
        except ThinkingUnsupported as exc:
            raise exc if wish else ModelRejected(str(exc)) from exc
        for event in reading.end():
            yield event

    async def facts(self, model: str) -> ModelFacts:
        missing = _missing(self._server.url, model)
        listed = await self._server.ask("GET", "models", missing, timeout=LOOK_TIMEOUT)
        try:
            entries = {str(entry["id"]): dict(entry) for entry in listed["data"]}
        except (KeyError, TypeError, ValueError) as exc:
            raise self._server.strange() from exc
        entry = next((entry for name, entry in entries.items() if same_model(name, model)), None)
        if entry is None:
            raise ModelMissing(missing, f"it has: {', '.join(entries) or 'none'}")
        return of_openai(entry, await self._props() if is_llama(entry) else None)

    async def _props(self) -> dict[str, Any] | None:
        """What llama.cpp's server says of itself; None when it does not."""
        with contextlib.suppress(ModelError):
            return await self._server.ask("GET", f"{root_of(self._server.url)}/props", timeout=LOOK_TIMEOUT)
        return None

    async def aclose(self) -> None:
        await self._server.aclose()


class OpenAIEmbeddings:
    """`/embeddings`. Raises ModelError."""

    def __init__(self, base_url: str | None, api_key: str | None, ca_file: Path | None = None) -> None:
        self._server = ModelServer(OPENAI, openai_url(base_url), api_key, ca_file)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        if not texts:
            return []
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        missing = _missing(self._server.url, model)
        answer = await self._server.ask("POST", "embeddings", missing, body, timeout=EMBED_TIMEOUT)
        try:
            # some servers leave the number out, and keep the order
            entries = sorted(answer["data"], key=lambda entry: entry.get("index", 0))
            return unit_vectors([entry["embedding"] for entry in entries], len(texts))
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            raise ModelError(f"{self._server.url} sent no embeddings of {model} that can be used ({exc})") from exc

    async def aclose(self) -> None:
        await self._server.aclose()


def root_of(url: str) -> str:
    """Where the server's own routes are: the address without the protocol's `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def _body(request: ChatRequest, wish: bool) -> dict[str, Any]:
    body: dict[str, Any] = {_RENAMED.get(name, name): value for name, value in request.options.items()}
    if request.length is not None and "max_completion_tokens" not in body:
        body["max_tokens"] = request.length
    if wish:
        # How vLLM and llama.cpp are told; others ignore or refuse it (then we go on without).
        body["chat_template_kwargs"] = {"enable_thinking": request.think}
    body |= {
        "model": request.model,
        "messages": [_message(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if request.response_schema is not None:
        schema = {"name": "answer", "schema": request.response_schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    match message["role"]:
        case "assistant" if message.get("tool_calls"):
            calls = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": orjson.dumps(call["args"]).decode()},
                }
                for call in message["tool_calls"]
            ]
            return {"role": "assistant", "content": content or None, "tool_calls": calls}
        case "tool":
            return {
                "role": "tool",
                "tool_call_id": message.get("tool_call_id", ""),
                "name": message.get("tool_name", ""),
                "content": content,
            }
        case role:
            return {"role": role, "content": content}


class _Reading:
    """One answer's events; the Finish waits for the usage, which comes in an event of its own after the last choice."""

    def __init__(self, model: str, missing: str) -> None:
        self._model = model
        self._missing = missing
        self._calls = _Calls()
        self._reason = ""
        self._usage: Mapping[str, Any] = {}

    def events(self, line: bytes) -> list[WireEvent]:
        """What one line says; a comment or the end of an event only says that the backend is alive."""
        if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
            return [TextDelta("")]
        try:
            part = parsed(data)
            if part.get("error"):
                raise failure(None, error_text(data), self._missing)
            return self._take(part)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as exc:
            raise StreamInterrupted(f"the server sent an event that cannot be read: {data[:80]!r}") from exc

    def _take(self, part: Mapping[str, Any]) -> list[WireEvent]:
        usage = part.get("usage")
        self._usage = usage if isinstance(usage, dict) else self._usage
        self._model = part.get("model") or self._model
        choices = part.get("choices")
        choice = choices[0] if choices else {}
        delta = choice.get("delta") or {}
        self._reason = choice.get("finish_reason") or self._reason
        for fragment in delta.get("tool_calls") or ():
            self._calls.add(fragment)
        # Both names are in use, and some servers send the same text under both.
        thinking = delta.get("reasoning") or delta.get("reasoning_content")
        thoughts = [ThinkingDelta(text_of(thinking))] if isinstance(thinking, str) else []
        return [*thoughts, TextDelta(text_of(delta.get("content") or ""))]

    def end(self) -> Iterable[WireEvent]:
        """The calls and the Finish, when the answer is complete."""
        if not self._reason:
            return
        if self._reason == "content_filter":
            raise ModelRejected("the model backend withheld the answer (content filter)")
        # Fragments are complete only now; a call that the length limit cut off must not run.
        yield from self._calls.complete(cut=self._reason == "length")
        yield Finish(
            reason="length" if self._reason == "length" else "stop",
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            model=self._model,
        )


class _Calls:
    """Tool calls put together from their fragments."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._open: dict[int, dict[str, Any]] = {}

    def add(self, fragment: Mapping[str, Any]) -> None:
        function = fragment.get("function") or {}
        call_id, name, arguments = fragment.get("id"), function.get("name") or "", function.get("arguments")
        # A server that numbers every call 0 begins a new one with another id.
        index = fragment.get("index")
        if index is None:
            index = max(len(self._calls) - 1, 0)
        call = self._open.get(index)
        if call is None or (call_id and call["id"] and call_id != call["id"]):
            call = {"id": None, "name": "", "arguments": []}
            self._open[index] = call
            self._calls.append(call)
        call["id"] = call["id"] or (text_of(call_id) if call_id else None)
        if name != call["name"]:  # some repeat the name in every fragment
            call["name"] += text_of(name)
        if arguments:
            call["arguments"].append(arguments)

    def complete(self, *, cut: bool) -> Iterator[RawCall]:
        for number, call in enumerate(self._calls, start=1):
            pieces = call["arguments"]
            # Not to the letter of the protocol: some servers send the arguments as an object.
            whole = next((piece for piece in pieces if not isinstance(piece, str)), None)
            arguments = "".join(pieces) if whole is None else whole
            if cut and number == len(self._calls) and not _is_json(arguments):
                return
            yield RawCall(call["id"], call["name"], arguments)


def _is_json(value: Any) -> bool:
    try:
        return not isinstance(value, str) or orjson.loads(value) is not None
    except orjson.JSONDecodeError:
        return False


def _missing(url: str, model: str) -> str:
    return f"the server at {url} does not have the model {model}"
