"""Google's Gemini API, by the `google-genai` package."""

from __future__ import annotations

import asyncio
import re
import ssl
import uuid
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from google import genai
from google.genai import types
from google.genai.errors import APIError

from shared.errors import SettingsError
from shared.llm.adapter import BEHIND, RawCall, WireEvent, following
from shared.llm.address import google_url, shown
from shared.llm.failures import ThinkingUnsupported, error_text, failure, what
from shared.llm.http import BOUND, Bound, open_http
from shared.llm.port import (
    ChatRequest,
    Finish,
    ModelError,
    ModelFacts,
    ModelRejected,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
)
from shared.llm.server import GOOGLE, away, other, refused
from shared.llm.toolcalls import text_of
from shared.llm.vectors import unit_vectors

# The type of a `reasoning_details` entry with the signature of a text.
_SIGNED_TEXT = "thought_signature"
# Google's replacement for an unknown signature (a client's history, an earlier turn).
_NO_SIGNATURE = b"skip_thought_signature_validator"
_NEEDS_SIGNATURE = re.compile(r"gemini-[3-9]")
_WITHHELD = {"SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE"}
_RENAMED = {"stop": "stop_sequences"}


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The HTTP responses of one request, which the package itself never closes, and how much they may bring."""

    bound: Bound
    responses: list[httpx.Response] = field(default_factory=list)


_opened: ContextVar[_Exchange | None] = ContextVar("opened", default=None)


async def _tracked(stream: AsyncIterator[Any], exchange: _Exchange) -> AsyncGenerator[Any, None]:
    """The chunks of a stream; the responses that are opened on the way are noted in `exchange`."""
    chunks = aiter(stream)
    while True:
        # The package sends the request with the first chunk or before, by its version.
        token = _opened.set(exchange)
        try:
            chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        finally:
            _opened.reset(token)
        yield chunk


async def _bound_answer(request: httpx.Request) -> None:
    if (exchange := _opened.get()) is not None:
        request.extensions[BOUND] = exchange.bound


async def _note_response(response: httpx.Response) -> None:
    if (exchange := _opened.get()) is not None:
        exchange.responses.append(response)


class GoogleWire:
    def __init__(self, base_url: str | None, api_key: str | None, ca_file: Path | None = None) -> None:
        self._server = _Google(base_url, api_key, None, ca_file)
        self._client = self._server.client

    async def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        answering = False
        exchange = _Exchange(Bound(request.length))
        try:
            token = _opened.set(exchange)
            try:
                stream = await self._client.aio.models.generate_content_stream(
                    model=request.model, contents=_contents(request), config=_config(request, wish)
                )
            finally:
                _opened.reset(token)
            chunks = _tracked(stream, exchange)
            async with aclosing(chunks), aclosing(self._read(chunks, request.model)) as events:
                async for event in events:
                    answering = True
                    yield event
        except _FOREIGN as exc:
            if answering and isinstance(exc, httpx.HTTPError):
                raise StreamInterrupted(f"the connection to Google was lost: {what(exc)}") from exc
            if not isinstance(exc, APIError | httpx.HTTPError):
                raise StreamInterrupted(*self._server.other("an event that cannot be read")) from exc
            error = self._server.error(exc, request.model, answering=answering)
            if isinstance(error, ThinkingUnsupported) and not wish:
                raise ModelRejected(str(error)) from exc
            raise error from exc
        finally:
            for response in exchange.responses:
                await response.aclose()

    async def facts(self, model: str) -> ModelFacts:
        try:
            found = await self._client.aio.models.get(model=model)
        except _FOREIGN as exc:
            raise self._server.error(exc, model) from exc
        if not found.name:
            raise self._server.error(ValueError(), model)
        return ModelFacts("Gemini API", window=found.input_token_limit)

    async def aclose(self) -> None:
        await self._server.aclose()

    async def _read(self, chunks: AsyncIterator[Any], model: str) -> AsyncGenerator[WireEvent, None]:
        reason = ""
        usage: Any = None
        signed: list[dict[str, str]] = []
        until: float | None = None
        while (chunk := await following(chunks, until, *_FOREIGN)) is not None:
            usage = chunk.usage_metadata or usage
            model = chunk.model_version or model
            blocked = chunk.prompt_feedback.block_reason if chunk.prompt_feedback else None
            if blocked:
                raise ModelRejected(f"Google refuses the prompt: {_name(blocked)}")
            candidate = chunk.candidates[0] if chunk.candidates else None
            content = candidate.content if candidate else None
            yield TextDelta("")
            for part in (content.parts if content else None) or ():
                if part.function_call:
                    call = part.function_call
                    name = text_of(call.id) if call.id else f"call_{uuid.uuid4().hex[:12]}"
                    yield RawCall(name, text_of(call.name or ""), call.args, _written(part.thought_signature))
                    continue
                if signature := _written(part.thought_signature):
                    signed = [{"type": _SIGNED_TEXT, "data": signature}]
                if part.text:
                    yield (ThinkingDelta if part.thought else TextDelta)(text_of(part.text))
            if candidate and candidate.finish_reason:
                reason = _name(candidate.finish_reason)
                until = until or asyncio.get_running_loop().time() + BEHIND
        if not reason:
            return
        if reason in _WITHHELD:
            raise ModelRejected(f"Google withheld the answer: {reason}")
        spoken = usage and (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        yield Finish(
            reason="length" if reason == "MAX_TOKENS" else "stop",
            prompt_tokens=usage.prompt_token_count if usage else None,
            completion_tokens=spoken if usage else None,
            model=model,
            reasoning_details=tuple(signed),
        )


def _contents(request: ChatRequest) -> list[types.Content]:
    contents: list[types.Content] = []
    for message in request.messages:
        match message["role"]:
            case "system":
                continue
            case "assistant":
                role, parts = "model", _said(message, request.model)
            case "tool":
                role, parts = "user", [_told(message)]
            case _:
                images = message.get("images") or ()
                role, parts = "user", [types.Part(text=message.get("content") or "")]
                parts += [types.Part.from_bytes(data=one["data"], mime_type=one["type"]) for one in images]
        # The results of one message's calls belong together in one content.
        if contents and contents[-1].role == role and contents[-1].parts:
            contents[-1].parts.extend(parts)
        elif parts:
            contents.append(types.Content(role=role, parts=parts))
    return contents


def _said(message: Mapping[str, Any], model: str) -> list[types.Part]:
    details = message.get("reasoning_details") or ()
    signed = next((_read(one.get("data")) for one in details if one.get("type") == _SIGNED_TEXT), None)
    text = message.get("content") or ""
    parts = [types.Part(text=text, thought_signature=signed)] if text or signed else []
    for number, call in enumerate(message.get("tool_calls") or ()):
        signature = _read(call.get("signature"))
        # Only the first of several parallel calls carries one.
        if signature is None and number == 0 and _NEEDS_SIGNATURE.search(model):
            signature = _NO_SIGNATURE
        function = types.FunctionCall(id=call["id"], name=call["name"], args=call["args"])
        parts.append(types.Part(function_call=function, thought_signature=signature))
    return parts


def _written(signature: bytes | None) -> str | None:
    return b64encode(signature).decode() if signature else None


def _read(signature: Any) -> bytes | None:
    """Return the bytes of a signature in base64; None for any other value."""
    try:
        return b64decode(signature, validate=True) or None
    except (TypeError, ValueError):
        return None


class GoogleEmbeddings:
    """`embedContent`. Raises ModelError."""

    def __init__(self, base_url: str | None, api_key: str | None, ca_file: Path | None = None) -> None:
        self._server = _Google(base_url, api_key, 120.0, ca_file)
        self._client = self._server.client

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        if not texts:
            return []
        try:
            answer = await self._client.aio.models.embed_content(model=model, contents=list(texts))
        except _FOREIGN as exc:
            raise self._server.error(exc, model) from exc
        try:
            return unit_vectors([entry.values for entry in answer.embeddings or ()], len(texts))
        except ValueError as exc:
            raise ModelError(f"Google's API sent no embeddings of {model} that can be used ({exc})") from exc

    async def aclose(self) -> None:
        await self._server.aclose()


# What the package and its connection raise; for answers that are not the API's, whatever its parsing stumbles over.
_FOREIGN = (APIError, httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class _Google:
    """The package's client over a connection of ours, and our errors for its own."""

    def __init__(
        self, base_url: str | None, api_key: str | None, read_timeout: float | None, ca_file: Path | None
    ) -> None:
        if not api_key:
            raise SettingsError(
                "the google_genai backend needs an API key: set GEMINI_API_KEY or LOCAL2_BACKEND_API_KEY"
            )
        url = google_url(base_url)
        self._url = shown(url)
        # the package sends the key itself, in a header of Google's own
        self._http = open_http(url, None, timeout=read_timeout, ca_file=ca_file)
        self._http.event_hooks = {"request": [_bound_answer], "response": [_note_response]}
        # the package makes clients of other kinds, too; nothing is sent by them, so they need believe nobody
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        options = types.HttpOptions(
            base_url=url,
            httpx_async_client=self._http,
            client_args={"verify": nobody},
            async_client_args={"verify": nobody, "ssl": nobody},
        )
        self.client = genai.Client(api_key=api_key, vertexai=False, http_options=options)

    def error(self, exc: Exception, model: str, *, answering: bool = False) -> ModelError:
        """Our error. answering: the answer had begun, so that its status says nothing."""
        match exc:
            case APIError() if answering:
                return failure(None, _text(exc), _missing(model))
            case APIError():
                return refused(GOOGLE, self._url, exc.code, _text(exc).encode(), _missing(model))
            case httpx.HTTPError():
                return away(GOOGLE, self._url, exc)
            case _:
                return ModelError(*self.other("something else"))

    def other(self, answered: str) -> tuple[str, str]:
        return other(GOOGLE, self._url, answered)

    async def aclose(self) -> None:
        await self._http.aclose()
        self.client.close()


def _config(request: ChatRequest, wish: bool) -> types.GenerateContentConfig:
    system = "\n\n".join(m["content"] for m in request.messages if m["role"] == "system" and m.get("content"))
    known = set(types.GenerateContentConfig.model_fields)
    options = {_RENAMED.get(name, name): value for name, value in request.options.items()}
    settings: dict[str, Any] = {name: value for name, value in options.items() if name in known}
    if request.length is not None:
        settings["max_output_tokens"] = request.length
    if isinstance(settings.get("stop_sequences"), str):
        settings["stop_sequences"] = [settings["stop_sequences"]]
    if system:
        settings["system_instruction"] = system
    if wish:
        settings["thinking_config"] = (
            types.ThinkingConfig(include_thoughts=True)
            if request.think
            else types.ThinkingConfig(include_thoughts=False, thinking_budget=0)
        )
    if request.tools:
        settings["tools"] = [types.Tool(function_declarations=[_declared(tool) for tool in request.tools])]
    if request.response_schema is not None:
        settings["response_mime_type"] = "application/json"
        settings["response_json_schema"] = request.response_schema
    # Calls are run by the agent loop, never by the package.
    settings["automatic_function_calling"] = types.AutomaticFunctionCallingConfig(disable=True)
    # A stream that broke off is started again by the caller, who knows what was shown of it.
    if "automatic_continuation" in known:
        settings["automatic_continuation"] = False
    return types.GenerateContentConfig(**settings)


def _declared(tool: Mapping[str, Any]) -> types.FunctionDeclaration:
    function = tool["function"]
    return types.FunctionDeclaration(
        name=function["name"],
        description=function.get("description", ""),
        parameters_json_schema=function.get("parameters"),
    )


def _told(message: Mapping[str, Any]) -> types.Part:
    return types.Part(
        function_response=types.FunctionResponse(
            id=message.get("tool_call_id"),
            name=message.get("tool_name"),
            response={"result": message.get("content") or ""},
        )
    )


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))


def _text(exc: APIError) -> str:
    # what the package found under that name may be anything
    return text_of(exc.message if isinstance(exc.message, str) and exc.message else error_text(str(exc.details)))


def _missing(model: str) -> str:
    return f"Google's API does not have the model {model}"
