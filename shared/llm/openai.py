"""Any OpenAI-compatible server (vLLM, llama.cpp, LM Studio, a cluster behind one URL), by the `openai` package."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, Timeout

from shared.llm.adapter import RawCall, WireEvent
from shared.llm.failures import ThinkingUnsupported, error_text, failure, what
from shared.llm.port import (
    ChatRequest,
    Finish,
    ModelError,
    ModelRejected,
    ModelUnavailable,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
)
from shared.llm.vectors import unit

DEFAULT_URL = "http://127.0.0.1:8000/v1"
# Local servers ask for no key, but the package refuses to go without one.
NO_KEY = "none"

# Ollama's names of options that have another one here.
_RENAMED = {"num_predict": "max_tokens"}
# What the protocol itself knows; anything else is an extension and goes beside it.
_STANDARD = {
    "temperature", "top_p", "seed", "stop", "max_tokens", "max_completion_tokens", "presence_penalty",
    "frequency_penalty", "logit_bias", "tool_choice", "parallel_tool_calls", "reasoning_effort", "user",
}  # fmt: skip


class OpenAIWire:
    """One connection pool to one server; retries are the caller's."""

    def __init__(self, base_url: str | None, api_key: str | None) -> None:
        self._url = base_url or DEFAULT_URL
        self._client = _client(self._url, api_key, timeout=None)

    async def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        answering = False
        try:
            stream = await self._client.chat.completions.create(**_body(request, wish))
            async with stream, aclosing(_read(stream, request.model)) as events:
                async for event in events:
                    answering = True
                    yield event
        except APIStatusError as exc:
            error = failure(exc.status_code, _text(exc), _missing(self._url, request.model))
            raise _explained(error, wish) from exc
        except APIConnectionError as exc:
            cause = exc.__cause__ or exc
            if answering:
                raise StreamInterrupted(f"the connection to {self._url} was lost: {what(cause)}") from exc
            raise ModelUnavailable(_unreachable(self._url, cause)) from exc
        except APIError as exc:  # an error event in the middle of the stream
            raise failure(None, _text(exc), _missing(self._url, request.model)) from exc
        except (orjson.JSONDecodeError, ValueError) as exc:
            raise StreamInterrupted(f"{self._url} sent an event that cannot be read: {what(exc)}") from exc

    async def reachable(self, model: str) -> str | None:
        try:
            listed = await self._client.with_options(timeout=10.0).models.list()
        except APIStatusError as exc:
            return str(failure(exc.status_code, _text(exc), _missing(self._url, model)))
        except APIError as exc:
            return _unreachable(self._url, exc.__cause__ or exc)
        names = [entry.id for entry in listed.data]
        if model in names:
            return None
        return f"{_missing(self._url, model)}; it has: {', '.join(names) or 'none'}"

    async def aclose(self) -> None:
        await self._client.close()


class OpenAIEmbeddings:
    """`/embeddings`. Raises ModelError."""

    def __init__(self, base_url: str | None, api_key: str | None) -> None:
        self._url = base_url or DEFAULT_URL
        self._client = _client(self._url, api_key, timeout=120)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        if not texts:
            return []
        try:
            # Asked for explicitly: the package's default is base64, which not every server knows.
            answer = await self._client.embeddings.create(model=model, input=list(texts), encoding_format="float")
        except APIStatusError as exc:
            raise failure(exc.status_code, _text(exc), _missing(self._url, model)) from exc
        except APIConnectionError as exc:
            raise ModelUnavailable(_unreachable(self._url, exc.__cause__ or exc)) from exc
        vectors = [unit(entry.embedding) for entry in sorted(answer.data, key=lambda entry: entry.index)]
        if len(vectors) != len(texts):
            raise ModelError(f"{model} gave {len(vectors)} vectors for {len(texts)} texts")
        return vectors

    async def aclose(self) -> None:
        await self._client.close()


def _client(url: str, api_key: str | None, timeout: float | None) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url, api_key=api_key or NO_KEY, max_retries=0, timeout=Timeout(timeout, connect=10.0))


def _body(request: ChatRequest, wish: bool) -> dict[str, Any]:
    options = {_RENAMED.get(name, name): value for name, value in request.options.items()}
    body: dict[str, Any] = {name: value for name, value in options.items() if name in _STANDARD}
    extra = {name: value for name, value in options.items() if name not in _STANDARD}
    if wish:
        # How vLLM and llama.cpp are told; others ignore or refuse it (then we go on without).
        extra["chat_template_kwargs"] = {"enable_thinking": request.think}
    body |= {
        "model": request.model,
        "messages": [_message(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": extra,
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


async def _read(stream: Any, model: str) -> AsyncGenerator[WireEvent, None]:
    """The chunks' events; the Finish waits for the usage, which comes in a chunk of its own after the last choice."""
    calls = _Calls()
    reason = ""
    usage: Any = None
    async with aclosing(aiter(stream)) as chunks:
        async for chunk in chunks:
            usage = getattr(chunk, "usage", None) or usage
            model = chunk.model or model
            choice = chunk.choices[0] if chunk.choices else None
            if choice is None or choice.delta is None:
                yield TextDelta("")
                continue
            delta = choice.delta
            # Both names are in use, and some servers send the same text under both.
            thinking = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None)
            if isinstance(thinking, str):
                yield ThinkingDelta(thinking)
            yield TextDelta(delta.content or "")
            for fragment in delta.tool_calls or ():
                calls.add(fragment)
            reason = choice.finish_reason or reason
    if not reason:
        return
    if reason == "content_filter":
        raise ModelRejected("the model backend withheld the answer (content filter)")
    # Fragments are complete only now; a call that the length limit cut off must not run.
    for call in calls.complete(cut=reason == "length"):
        yield call
    yield Finish(
        reason="length" if reason == "length" else "stop",
        prompt_tokens=getattr(usage, "prompt_tokens", None),
        completion_tokens=getattr(usage, "completion_tokens", None),
        model=model,
    )


class _Calls:
    """Tool calls put together from their fragments."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._open: dict[int, dict[str, Any]] = {}

    def add(self, fragment: Any) -> None:
        function = fragment.function
        name = (function.name if function else None) or ""
        arguments = (function.arguments if function else None) or ""
        # A server that numbers every call 0 begins a new one with another id.
        index = fragment.index if fragment.index is not None else max(len(self._calls) - 1, 0)
        call = self._open.get(index)
        if call is None or (fragment.id and call["id"] and fragment.id != call["id"]):
            call = {"id": fragment.id, "name": "", "arguments": ""}
            self._open[index] = call
            self._calls.append(call)
        call["id"] = call["id"] or fragment.id
        if name != call["name"]:  # some repeat the name in every fragment
            call["name"] += name
        # Not to the letter of the protocol: some servers send the arguments as an object.
        call["arguments"] = call["arguments"] + arguments if isinstance(arguments, str) else arguments

    def complete(self, *, cut: bool) -> Iterator[RawCall]:
        for number, call in enumerate(self._calls, start=1):
            if cut and number == len(self._calls) and not _is_json(call["arguments"]):
                return
            yield RawCall(call["id"], call["name"], call["arguments"])


def _is_json(value: Any) -> bool:
    try:
        return not isinstance(value, str) or orjson.loads(value) is not None
    except orjson.JSONDecodeError:
        return False


def _text(exc: APIError) -> str:
    if exc.body is None:
        return exc.message
    return error_text(exc.body if isinstance(exc.body, str) else orjson.dumps(exc.body))


def _explained(error: ModelError, wish: bool) -> ModelError:
    """A refusal of a wish that was not sent is an ordinary refusal."""
    return ModelRejected(str(error)) if isinstance(error, ThinkingUnsupported) and not wish else error


def _missing(url: str, model: str) -> str:
    return f"the server at {url} does not have the model {model}"


def _unreachable(url: str, exc: BaseException) -> str:
    return f"no model server answers at {url} ({what(exc)})"
