"""Reading request bodies: whose they are, size, content type, JSON and its depth are checked before anything is built
from them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from services.gateway.auth import authenticated, known, unauthorized
from services.gateway.errors import ApiError

MAX_BODY = 4 * 1024**2
# Of whoever has no key: what opens a one-time link, and what is refused, is short.
STRANGERS_BODY = 65_536
# Of a file, and of a request with images in it.
MAX_FILE_BODY = 32 * 1024**2
# A client that still writes does not read the refusal, and a connection closed on it would lose it: so many times as
# much is read and thrown away.
_PATIENCE = 2
# Each takes time and up to a hundred bytes when it is read, and a body of ten millions would hold up everybody for
# seconds. A comma in a text counts for one: no model reads a text with so many.
MOST_VALUES = 1_000_000
# Far deeper than any real arguments, and shallow enough for every JSON writer on the way.
MAX_DEPTH = 64


class JsonRequest(Request):
    most = MAX_BODY

    async def body(self) -> bytes:
        if not hasattr(self, "_checked"):
            self._checked = await self._read()
        return self._checked

    async def _read(self) -> bytes:
        # of a short one it does not matter here whose it is
        kept = STRANGERS_BODY
        refusal: ApiError | None = None
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "bad_request", "the connection closed before the body was complete")
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > STRANGERS_BODY and refusal is None:
                # the rest of the body is not read, so the connection cannot be used again
                if await known(self) is None:
                    refusal = unauthorized(Connection="close")
                else:
                    kept, refusal = self.most, _too_large(self.most)
            if refusal is not None and size > _PATIENCE * self.most:
                raise refusal
            if size > kept:
                parts.clear()
            else:
                parts.append(part)
        if refusal is not None and size > kept:
            raise refusal
        body = b"".join(parts)
        if body and not _is_json(self.headers.get("content-type", "")):
            raise ApiError(415, "unsupported_media_type", "the body must be sent with Content-Type: application/json")
        return body

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


def _too_large(most: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {most} bytes", headers={"Connection": "close"})


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


class AskRoute(JsonRoute):
    """A route that asks a question: `endpoint(request, body, user)` is given these three, and reads the rest by hand.

    To look for what a function declares takes FastAPI, for each request, longer than all of accepting a question; here
    it makes the description of it.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._body: type[BaseModel] = get_type_hints(endpoint)["body"]
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self.request(scope, receive)
        empty = not await request.body()
        try:
            said = None if empty else await request.json()
        except orjson.JSONDecodeError as exc:
            wrong = {"type": "json_invalid", "loc": ("body", exc.pos), "msg": exc.msg, "ctx": {"error": exc.msg}}
            raise RequestValidationError([wrong]) from exc
        user = await authenticated(request)
        if empty:
            raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required"}])
        try:
            # as FastAPI does it, so that it says the same of what is wrong
            body = self._body.model_validate(said, from_attributes=True)
        except ValidationError as exc:
            raise invalid("body", exc) from exc
        answer: Response = await self.endpoint(request, body, user)
        await answer(scope, receive, send)


class ImageAskRoute(AskRoute):
    request = ImageRequest


def invalid(place: str, exc: ValidationError) -> RequestValidationError:
    """What is wrong with something that a request says at a place of it: its body, a parameter."""
    found = exc.errors(include_url=False)
    return RequestValidationError([{**error, "loc": (*place.split("."), *error["loc"])} for error in found])
