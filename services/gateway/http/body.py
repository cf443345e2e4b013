"""Reading request bodies: size, content type, JSON and its depth are checked before anything is built from them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from services.gateway.http.errors import ApiError
from services.gateway.http.request_guard import declared_length
from shared.contracts import MAX_FILE_BODY

MAX_BODY = 4 * 1024**2
# JSON values of a body, at most. Parsing ten million would block the event loop for seconds. A comma inside a text
# counts as a value: no model reads a text with so many.
MOST_VALUES = 1_000_000
# Far deeper than any real arguments, and shallow enough for every JSON writer on the way.
MAX_DEPTH = 64


async def bounded(request: Request, most: int, hint: str = "") -> AsyncIterator[bytes]:
    """Yield the parts of a request's body, of at most `most` bytes.

    hint: what follows the sentence of the refusal. Raises ApiError 413, before the first part where the length is
    declared, and 400 when the client disconnects. FastAPI's own `max_body_size` refuses in plain text.
    """
    size = 0
    refusal = ApiError(413, "body_too_large", f"the body is larger than {most} bytes{hint}")
    length = declared_length(request.headers)
    if most < length < math.inf:
        raise refusal
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise refusal
            yield part
    except ClientDisconnect as exc:
        raise ApiError(400, "bad_request", "the connection closed before the body was complete") from exc


class JsonRequest(Request):
    """A request with a JSON body. `most`: bytes that the body may have."""

    most = MAX_BODY

    async def body(self) -> bytes:
        if not hasattr(self, "_checked"):
            body = b"".join([part async for part in bounded(self, self.most)])
            if body and not _is_json(self.headers.get("content-type", "")):
                message = "the body must be sent with Content-Type: application/json"
                raise ApiError(415, "unsupported_media_type", message)
            self._checked = body
        return self._checked

    async def json(self) -> Any:
        """Strict JSON: no NaN, no lone surrogates. Raises orjson.JSONDecodeError."""
        body = await self.body()
        if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
            raise ApiError(413, "body_too_large", f"the body has more than {MOST_VALUES} values")
        value = orjson.loads(body)
        if too_deep(body, value):
            raise ApiError(400, "bad_json", f"the body is nested more than {MAX_DEPTH} levels deep")
        return value


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def too_deep(text: bytes, value: Any) -> bool:
    """Whether the value that was read from a text is nested more than MAX_DEPTH levels deep."""
    # only a text with that many brackets can be that deep
    return text.count(b"[") + text.count(b"{") > MAX_DEPTH and _deeper(value, MAX_DEPTH)


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return any(isinstance(value, dict | list) for value in level)


class ImageRequest(JsonRequest):
    """A request in which images may stand."""

    most = MAX_FILE_BODY


class JsonRoute(APIRoute):
    """A route whose body is read by JsonRequest."""

    request: type[JsonRequest] = JsonRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(self.request(request.scope, request.receive))

        return handle


class ImageRoute(JsonRoute):
    """A route whose body is read by ImageRequest."""

    request = ImageRequest
