"""What a connection may send before anybody knows whose it is: how large, and how slowly."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from itertools import chain
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import error_body
from services.gateway.plain_http import PlainParser
from shared.telemetry.logging import get_logger

log = get_logger()

# The longest question to memory's search, percent-encoded, fits; what takes URLs apart takes no longer one.
MAX_URL = 65_535
MAX_HEAD = 32_768
MAX_HEADERS = 200
# What may stand between the parts of a body: the frames of its chunks, and trailers, which nobody reads. Each byte of
# the body makes room for some more, since a chunk of one byte has a frame of five.
MAX_BETWEEN = 32_768
FRAME_PER_BYTE = 8
# Requests that may wait on a connection for the answer to an earlier one.
MAX_WAITING = 100
# Bytes a second that a body must come with, on the average once `patience` is over.
SLOWEST = 8_192
# A client that still writes does not read the refusal, and a connection closed on it would lose it: for so long, and so
# much, is read and thrown away.
_LINGER = 1.0
_THROWN_AWAY = 8_388_608


class Connection(HttpToolsProtocol):
    """A connection with limits. `patience`: seconds for the head of a request, the longest silence in its body, and
    those after which a body must have come with a certain speed."""

    patience = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Any = PlainParser(self)
        # uvicorn sets it when a request begins, and what comes before is counted too
        self.url = b""
        self._refused = False
        # whose answer is on its way, or was the last one: `cycle` is the newest, which may have to wait for others
        self._turn: Any = None
        # None: no request is on its way
        self._since: float | None = self.loop.time()
        self._heard = self._since
        self._in_body = False
        self._between = 0
        # when the body began, without the time in which we did not read, and how much of it has come
        self._began = self._since
        self._size = 0
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    # ── silence ──────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        now = self.loop.time()
        if self._silent(now):
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "the request did not come in time")
            return
        if self._in_body and self.flow.read_paused:
            self._began += self.patience / 4
        self._watch = self.loop.call_later(self.patience / 4, self._look)

    def _silent(self, now: float) -> bool:
        if self._in_body:
            # when it is we who do not read, the client is not to blame
            since = now - self._began
            slow = since > self.patience and self._size < since * SLOWEST
            return not self.flow.read_paused and (slow or now - self._heard > self.patience)
        answering = self.cycle is not None and not self.cycle.response_complete
        return not answering and self._since is not None and now - self._since > self.patience

    # ── size ─────────────────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._between += len(data)
            if self._between > _THROWN_AWAY:
                self.transport.abort()
            return
        self._heard = self.loop.time()
        if self._since is None:
            self._since = self._heard
        self._between += len(data)
        super().data_received(data)
        if self._refused:
            return
        if self._in_body:
            if self._between > MAX_BETWEEN:
                self._too_large("the trailers are", MAX_BETWEEN)
        elif self._between > MAX_URL + MAX_HEAD:
            self._check(complete=False)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._since = self._heard

    def on_header(self, name: bytes, value: bytes) -> None:
        # a trailer would be added to headers that were checked already
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._refused or self.parser.wishes_upgrade or not self._check(complete=True):
            return
        if len(self.pipeline) == MAX_WAITING:
            self._refuse(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too_many_requests",
                f"more than {MAX_WAITING} requests wait for their turn",
            )
            return
        self._in_body, self._between = True, 0
        self._began, self._size = self._heard, 0
        super().on_headers_complete()
        if not self.pipeline:
            self._turn = self.cycle

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._between = max(0, self._between - FRAME_PER_BYTE * len(body))
            self._size += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused and not self.parser.wishes_upgrade:
            self._in_body, self._between, self._since = False, 0, None
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._turn = self.pipeline[-1][0]
        super().on_response_complete()

    def _check(self, *, complete: bool) -> bool:
        """Whether the head is within its limits; if it is not, it is refused."""
        size = sum(map(len, chain(*self.headers or ())))
        if len(self.url) > MAX_URL:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, "url_too_long", f"the URL is longer than {MAX_URL} bytes")
        elif not complete or size > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            self._too_large(f"there are more than {MAX_HEADERS} headers, or they are", MAX_HEAD)
        else:
            return True
        return False

    # ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────

    def _too_large(self, what: str, limit: int) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self._refuse(status, "headers_too_large", f"{what} longer than {limit} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "bad_request", "this is not HTTP")

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answers, if nothing was answered yet, and closes; what still comes is thrown away."""
        self._refused = True
        log.info("http.refused", status=int(status), code=code)
        turn = self._turn
        # an answer that was given while its body still came stands
        started = turn is not None and turn.response_started and (self._in_body or not turn.response_complete)
        for each in (turn, *(waiting for waiting, _ in self.pipeline)):
            if each is not None and not each.response_complete:
                each.disconnected = True
                each.message_event.set()
        self.pipeline.clear()
        if self.transport.is_closing():
            return
        if not started:
            body = error_body(code, message)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, status.phrase.encode(), len(body), body)
            )
            if self.transport.can_write_eof():
                self.transport.write_eof()
        if self._watch is not None:
            self._watch.cancel()
        self.flow.resume_reading()
        self._watch = self.loop.call_later(0.0 if started else _LINGER, self.transport.close)
