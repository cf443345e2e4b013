"""The protocol of an Ollama server, as far as its clients here use it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.demo_model.catalog import CARDS, CHAT, EMBEDDING, VERSION, NotFound, find
from services.demo_model.conversation import Conversation, Event, ToolCalled
from services.demo_model.llama import Busy, Done, Refused, Text
from shared.errors import ModelError
from shared.llm.minilm import MAX_TOKENS, Embedder

MAX_BODY = 8 * 1024 * 1024
MAX_TEXTS = 4096


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Named(Body):
    model: str = ""
    name: str = ""  # the older form of the same field


class Options(Body):
    """The options that mean something to this model; others are ignored, as by Ollama."""

    num_ctx: int | None = Field(None, ge=1)
    num_predict: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-1, lt=2**32)
    stop: list[str] | str | None = None
    repeat_penalty: float | None = Field(None, ge=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class ChatBody(Body):
    model: str = Field(min_length=1)
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    stream: bool = True
    think: bool | str | None = None
    format: dict[str, Any] | str | None = None
    options: Options | None = None


class EmbedBody(Body):
    model: str = Field(min_length=1)
    input: str | list[str] = []
    truncate: bool = True


class BadRequest(ModelError):
    """The request is malformed, or asks for what the model cannot do."""


B = TypeVar("B", bound=Body)


class Api:
    """The routes. Errors are `{"error": sentence}` with the status that Ollama gives."""

    def __init__(self, conversation: Conversation, embedder: Embedder) -> None:
        self._conversation = conversation
        self._embedder = embedder

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/version", self.version),
                Route("/api/tags", self.tags),
                Route("/api/ps", self.ps),
                Route("/api/show", self.show, methods=["POST"]),
                Route("/api/chat", self.chat, methods=["POST"]),
                Route("/api/embed", self.embed, methods=["POST"]),
            ],
            middleware=[Middleware(OwnPagesOnly)],
            exception_handlers={ModelError: _failed},
        )

    async def version(self, _request: Request) -> Response:
        return _json({"version": VERSION})

    async def tags(self, _request: Request) -> Response:
        return _json({"models": [card.tag() for card in CARDS]})

    async def ps(self, _request: Request) -> Response:
        return _json({"models": [card.loaded() for card in CARDS]})

    async def show(self, request: Request) -> Response:
        body = await _read(request, Named)
        return _json(find(body.model or body.name).shown())

    async def embed(self, request: Request) -> Response:
        started = time.perf_counter_ns()
        body = await _read(request, EmbedBody)
        if find(body.model) is not EMBEDDING:
            raise BadRequest(f'"{body.model}" does not support embeddings')
        texts = [body.input] if isinstance(body.input, str) else body.input
        if len(texts) > MAX_TEXTS:
            raise BadRequest(f"at most {MAX_TEXTS} texts in one request")
        if not body.truncate and any(count > MAX_TOKENS for count in self._embedder.count(texts)):
            raise BadRequest("the input length exceeds the context length")
        vectors, tokens = await asyncio.to_thread(self._embedder.embed, texts)
        took = time.perf_counter_ns() - started
        return _json(
            {"model": body.model, "embeddings": vectors.tolist(), "total_duration": took, "prompt_eval_count": tokens}
        )

    async def chat(self, request: Request) -> Response:
        started = time.perf_counter_ns()
        body = await _read(request, ChatBody)
        if find(body.model) is not CHAT:
            raise BadRequest(f'"{body.model}" does not support chat')
        if body.think:
            raise BadRequest(f'"{body.model}" does not support thinking')
        lines = self._lines(body, started)
        return _Reply(lines, body.stream)

    async def _lines(self, body: ChatBody, started: int) -> AsyncGenerator[dict[str, Any], None]:
        if not body.messages:
            yield {**_line(body.model, {"content": ""}), "done": True, "done_reason": "load"}
            return
        events = self._conversation.reply(
            body.messages,
            body.tools or [],
            (body.options or Options()).model_dump(exclude_none=True),
            _response_format(body.format),
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield _event(body.model, event, started)


class OwnPagesOnly:
    """Refuses requests that a browser sends for a page from elsewhere, as Ollama does: there is no other protection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            # The Host is checked too: a name that was made to point at loopback is not ours.
            if not _local(headers.get(b"host", "")) or not _local(headers.get(b"origin", "http://localhost")):
                await Response(status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _local(origin: str) -> bool:
    host = origin.rpartition("//")[2]
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name in ("127.0.0.1", "localhost", "[::1]")


class _Reply(Response):
    """An answer that is made while it is sent; a client that disconnects stops the model.

    stream: NDJSON, one line per event; else one object. An error before the first line has a status; a later one is a
    line.
    """

    def __init__(self, lines: AsyncGenerator[dict[str, Any], None], stream: bool) -> None:
        super().__init__()
        self._lines = lines
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = sending.done()
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._lines.aclose()
        if finished:
            sending.result()

    async def _send(self, send: Send) -> None:
        begun = False

        async def write(item: Mapping[str, Any], status: int = 200) -> None:
            nonlocal begun
            if not begun:
                kind = b"application/x-ndjson" if self._stream and status == 200 else b"application/json"
                await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
                begun = True
            await send({"type": "http.response.body", "body": orjson.dumps(item) + b"\n", "more_body": True})

        items = []
        try:
            async for item in self._lines:
                if self._stream:
                    await write(item)
                else:
                    items.append(item)
            if items:
                await write(_joined(items))
        except ModelError as exc:
            await write({"error": str(exc)}, _status(exc))
        await send({"type": "http.response.body", "body": b""})


def _joined(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the lines of a stream as one object."""
    content = "".join(line["message"]["content"] for line in lines)
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    last = lines[-1]
    return {**last, "message": {**last["message"], "content": content, **({"tool_calls": calls} if calls else {})}}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(model: str, event: Event, started: int) -> dict[str, Any]:
    match event:
        case Text(text):
            return _line(model, {"content": text})
        case ToolCalled(call):
            return _line(model, {"content": "", "tool_calls": [call]})
        case Done() as done:
            measured = {
                "total_duration": time.perf_counter_ns() - started,
                "prompt_eval_count": done.prompt_tokens,
                "prompt_eval_duration": done.prompt_ns,
                "eval_count": done.completion_tokens,
                "eval_duration": done.eval_ns,
            }
            # Like Ollama, without zeros: a tool call or a short result costs no tokens.
            counts = {name: value for name, value in measured.items() if value}
            return {**_line(model, {"content": ""}), "done": True, "done_reason": done.reason, **counts}


def _line(model: str, message: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now, "message": {"role": "assistant", **message}, "done": False}


def _response_format(wanted: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not wanted:
        return None
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    if wanted == "json":
        return {"type": "json_object"}
    raise BadRequest(f'invalid format: {wanted!r}; expected "json" or a JSON schema')


async def _read(request: Request, kind: type[B]) -> B:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise BadRequest(f"the request body is larger than {MAX_BODY} bytes")
    try:
        return kind.model_validate(orjson.loads(raw))
    except orjson.JSONDecodeError as exc:
        raise BadRequest(f"invalid JSON: {exc}") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise BadRequest(f"{where}: {first['msg']}") from exc


def _status(exc: ModelError) -> int:
    match exc:
        case NotFound():
            return 404
        case BadRequest() | Refused():
            return 400
        case Busy():
            return 503
        case _:
            return 500


async def _failed(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ModelError)
    return _json({"error": str(exc)}, _status(exc))


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
