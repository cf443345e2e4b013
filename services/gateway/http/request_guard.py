"""What a client may send before its key is known, and how slowly a body may come.

The size of a request's head is bounded by the server (`max_header_bytes`); silent connections are closed by a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.auth import known, unauthorized
from services.gateway.http.errors import ApiError, away, render
from services.gateway.http.gateway import Gateway
from shared.contracts import MAX_FILE_BODY
from shared.errors import BusUnavailable, TransientError

# Bytes of a body that are read without a valid key: all requests that need none are short.
STRANGERS_BODY = 65_536
# Bytes a second that a body must have on average, once the client has been waited for longer than `client_seconds`.
SLOWEST = 8_192
# A client that is still sending when its connection is closed loses the refusal. So many bytes are read and discarded,
# until the client is silent for so many seconds: enough for each file that a request may hold.
_LINGER_SECONDS, _LINGER_BYTES = 1.0, MAX_FILE_BODY
# RFC 9110, section 5.5: these bytes are invalid in a header's value. h11 refuses only some of them.
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class RequestGuard:
    """ASGI middleware. Refuses with 400 a head that is invalid or ambiguous, with 401 a large body without a valid key,
    with 408 a body that is silent or slow."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._gateway.settings.client_seconds, scope, receive, send)
        if fault := _head_fault(scope):
            refusal = render(Request(scope), 400, "invalid_request", fault, {"Connection": "close"})
            await refusal(scope, body.receive, body.send)
            return
        await self._app(scope, body.receive, body.send)


def _head_fault(scope: Scope) -> str | None:
    """Return why a request's head is refused, as a sentence; None for a valid head."""
    if any(_CONTROL.search(value) for _, value in scope["headers"]):
        return "a header contains a control character; send the request again without it"
    if {b"transfer-encoding", b"content-length"} <= {name for name, _ in scope["headers"]}:
        # RFC 9112, section 6.3: two programs on the way may disagree where such a request ends.
        return "the request has both Transfer-Encoding and Content-Length; send it again with one of them"
    return None


def declared_length(headers: Headers) -> float:
    """Return the length of a request's body in bytes; infinity where it is not declared."""
    if "transfer-encoding" in headers:
        return math.inf
    return int(headers.get("content-length", 0))


class _Body:
    """The body of one request. patience: seconds of silence, and of waiting until its speed counts."""

    def __init__(self, patience: float, scope: Scope, receive: Receive, send: Send) -> None:
        self._patience = patience
        self._scope = scope
        self._receive = receive
        self._send = send
        self._declared = declared_length(Headers(scope=scope))
        self._more = self._declared > 0
        self._size = 0
        self._waited = 0.0
        self._known = False
        self._lingers = False

    async def receive(self) -> Message:
        """Return the next message. Raises ApiError 401, 408 and 503."""
        if not self._more:
            return await self._receive()
        if math.isfinite(self._declared):
            await self._check_key(self._declared)
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._patience):
                message = await self._receive()
        except TimeoutError as exc:
            raise _too_slow() from exc
        self._waited += asyncio.get_running_loop().time() - started
        self._size += len(message.get("body", b""))
        self._more = message.get("more_body", False)
        if self._waited > self._patience and self._size < SLOWEST * self._waited:
            raise _too_slow()
        await self._check_key(self._size)
        return message

    async def _check_key(self, size: float) -> None:
        if size <= STRANGERS_BODY or self._known:
            return
        try:
            self._known = await known(Request(self._scope)) is not None
        except (BusUnavailable, TransientError) as exc:
            raise away(exc) from exc
        if not self._known:
            raise unauthorized()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            # The server discards the rest of a short body and keeps the connection, but not of a body that is too slow.
            self._lingers = self._more and (self._declared > STRANGERS_BODY or message["status"] == 408)
            if self._lingers:
                MutableHeaders(scope=message)["Connection"] = "close"
        if not self._lingers or message["type"] != "http.response.body" or message.get("more_body"):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._discard()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self) -> None:
        """Read and discard the rest of the body behind a refusal, within the limits for time and size."""
        discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while self._more and discarded < _LINGER_BYTES:
                    async with asyncio.timeout(_LINGER_SECONDS):
                        message = await self._receive()
                    discarded += len(message.get("body", b""))
                    self._more = message.get("more_body", False)


def _too_slow() -> ApiError:
    return ApiError(408, "request_timeout", "the body did not come in time; send it again, and faster")
