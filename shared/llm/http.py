"""HTTP to model servers: what they send is bounded, and read as fast as it comes.

`open_transport` is the one way to a server. Every token of a plain HTTP stream is a chunk of its own. httpx' parser
takes longer for one than the rest of us for the token; `PlainTransport` parses in C and hands over together what has
arrived together. TLS and proxies are httpx' own.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httptools
import httpx

from shared.errors import SettingsError
from shared.llm.address import proxy_for
from shared.llm.port import AnswerTooLong

CONNECT_TIMEOUT = 10.0
# Of one line or event: the longest that is kept until its end comes.
LINE_BYTES = 8_000_000
# Of one answer: when nothing says how many tokens it may have, and for every token that it may have.
ANSWER_BYTES = 16_000_000
_BYTES_PER_TOKEN = 1_000
_AT_LEAST = 4_000_000
_ERROR_BYTES = 100_000
# What may come without a byte of the answer itself: a head, informational answers, trailers.
_BESIDE_BYTES = 100_000
_READ = 256 * 1024
_MOST_IDLE = 256
_Place = tuple[str, int]


def open_http(
    url: str, key: str | None, *, timeout: float | None = None, ca_file: Path | None = None
) -> httpx.AsyncClient:
    """A client of one server, for who must be given one of httpx'; see `open_transport`.

    key: sent as a bearer token. timeout: longest silence in seconds; None where somebody else watches it.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers=usual_headers(url, key),
        event_hooks={"response": [refuse_compressed]},
        timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
        transport=open_transport(url, ca_file),
        trust_env=False,
    )


def open_transport(url: str, ca_file: Path | None = None) -> PlainTransport | TlsTransport:
    """The way to one server, through a proxy of the environment where one belongs before it.

    ca_file: certificates in PEM form that are believed beside the usual ones. Raises SettingsError.
    """
    proxy = proxy_for(url)
    if proxy is None and url.startswith("http://"):
        return PlainTransport()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MOST_IDLE)
    return TlsTransport(verify=_trusted(ca_file), limits=limits, proxy=proxy)


def usual_headers(url: str, key: str | None) -> dict[str, str]:
    """What every request says. key: sent as a bearer token, unless the address itself names a user."""
    said = {**UNCOMPRESSED, "connection": "keep-alive", "user-agent": f"python-httpx/{httpx.__version__}"}
    address = httpx.URL(url)
    if address.userinfo:
        named = f"{address.username}:{address.password}".encode()
        said["authorization"] = f"Basic {b64encode(named).decode()}"
    elif key:
        said["authorization"] = f"Bearer {key}"
    return said


@dataclass(slots=True)
class Answer:
    """What a server answers. piece: what has come of the body; empty at its end. aclose: before that, it closes the
    connection."""

    status: int
    headers: list[tuple[bytes, bytes]]
    piece: Callable[[], Awaitable[bytes]]
    aclose: Callable[[], Awaitable[None]]

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for said, value in self.headers if said.lower() == name), "")


# What goes with every request whose answer is bounded by its bytes.
UNCOMPRESSED = {"accept-encoding": "identity"}


def check_uncompressed(encoding: str) -> None:
    """Raises httpx.DecodingError: a few compressed bytes may stand for any number, and httpx unpacks them before
    anybody can count."""
    if encoding.strip().lower() not in ("", "identity"):
        raise httpx.DecodingError("it sent a compressed answer, which was not asked for")


async def refuse_compressed(response: httpx.Response) -> None:
    """The same, for a client's `event_hooks`."""
    check_uncompressed(response.headers.get("content-encoding", ""))


def _trusted(ca_file: Path | None) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    if ca_file is not None:
        # Python 3.13 wants of certificates what those of one's own authority often lack, and what 3.12 takes
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            context.load_verify_locations(ca_file)
        except OSError as exc:
            raise SettingsError(f"LOCAL2_CA_FILE: {ca_file} cannot be used ({exc})") from exc
    return context


class Bound:
    """How much one answer may bring. `tokens`: how many it was told to have at most."""

    def __init__(self, tokens: int | None) -> None:
        self._most = ANSWER_BYTES if tokens is None else max(_AT_LEAST, tokens * _BYTES_PER_TOKEN)
        self._total = 0
        self._line = 0

    def take(self, piece: bytes) -> None:
        """Raises AnswerTooLong."""
        self._total += len(piece)
        newline = piece.rfind(b"\n")
        self._line = self._line + len(piece) if newline < 0 else len(piece) - newline - 1
        if self._line > LINE_BYTES:
            raise AnswerTooLong(f"the model server sent {LINE_BYTES // 1_000_000} MB without the end of a line")
        if self._total > self._most:
            raise AnswerTooLong(f"the model server sent more than {self._most // 1_000_000} MB for one answer")


class Bounded(httpx.AsyncByteStream):
    """A response's stream, bounded."""

    def __init__(self, stream: httpx.AsyncByteStream, bound: Bound) -> None:
        self._stream = stream
        self._bound = bound

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._bound.take(piece)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def lines_of(answer: Answer, bound: Bound) -> AsyncGenerator[list[bytes], None]:
    """The lines of a body without their ends, together as they arrive; the last one may lack its end. Raises
    AnswerTooLong."""
    begun: list[bytes] = []
    while piece := await answer.piece():
        bound.take(piece)
        whole, end, rest = piece.rpartition(b"\n")
        if end:
            lines = b"".join([*begun, whole]).split(b"\n")
            begun = [rest]
            yield lines
        else:
            begun.append(piece)
    yield [b"".join(begun)]


async def refusal_of(answer: Answer) -> bytes:
    """The body of an error, as much as can matter of it."""
    body = b""
    while len(body) <= _ERROR_BYTES and (piece := await answer.piece()):
        body += piece
    return body[:_ERROR_BYTES]


class TlsTransport(httpx.AsyncHTTPTransport):
    """TLS and proxies. target, ask: as of PlainTransport."""

    def target(self, method: str, url: httpx.URL, headers: Mapping[str, str]) -> Any:
        return method, url, headers

    async def ask(self, target: Any, content: bytes | None, connect: float, read: float | None) -> Answer:
        method, url, headers = target
        limits = {"timeout": {"connect": connect, "read": read, "write": read, "pool": read}}
        request = httpx.Request(method, url, headers=headers, content=content, extensions=limits)
        response = await self.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        pieces = (piece async for piece in response.stream if piece)
        return Answer(response.status_code, response.headers.raw, lambda: anext(pieces, b""), response.stream.aclose)


class PlainTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 without TLS. Closing a response before its end closes its connection."""

    def __init__(self) -> None:
        self._idle: dict[_Place, list[_Connection]] = {}
        self._closed = False

    def target(self, method: str, url: httpx.URL, headers: Mapping[str, str]) -> Any:
        """Where requests of one kind go, and how they begin, for `ask`."""
        return _place(url), _head(method, url, [(name.encode(), value.encode()) for name, value in headers.items()])

    async def ask(self, target: Any, content: bytes | None, connect: float | None, read: float | None) -> Answer:
        """connect, read: seconds, the latter for the longest silence. Raises httpx.HTTPError."""
        place, head = target
        length = b"content-length: %d\r\n\r\n" % len(content) if content is not None else b"\r\n"
        return await self._asked(place, head + length + (content or b""), connect, read)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions.get("timeout", {})
        data = _head(request.method, request.url, request.headers.raw) + b"\r\n" + await request.aread()
        answer = await self._asked(_place(request.url), data, limits.get("connect"), limits.get("read"))
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer))

    async def _asked(self, place: _Place, data: bytes, connect: float | None, read: float | None) -> Answer:
        connection: _Connection | None = None
        # a server may close an idle connection in the moment in which it is used again
        while (kept := self._kept(place)) is not None:
            if await kept.ask(data, read):
                connection = kept
                break
        if connection is None:
            connection = await _connected(place, connect)
            if not await connection.ask(data, read):
                raise httpx.RemoteProtocolError("the server closed the connection without an answer")
        piece, over = partial(connection.piece, read), partial(self._over, place, connection)
        return Answer(connection.status, connection.headers, piece, over)

    async def _over(self, place: _Place, connection: _Connection) -> None:
        """Keeps a connection for the next request to the same server, where its answer has come to its end; an answer
        may end after the transport was closed."""
        if not (connection.reusable and connection.open):
            connection.close()
            return
        connection.reusable = False
        idle = self._idle.setdefault(place, [])
        if not self._closed and len(idle) < _MOST_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def _kept(self, place: _Place) -> _Connection | None:
        idle = self._idle.get(place)
        while idle:
            connection = idle.pop()
            if connection.open:
                return connection
            connection.close()
        return None

    async def aclose(self) -> None:
        self._closed = True
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


def _place(url: httpx.URL) -> _Place:
    return url.host, url.port or 80


def _head(method: str, url: httpx.URL, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request, to which more headers may be added."""
    lines = [b"%s %s HTTP/1.1" % (method.encode(), url.raw_path), *[b"%s: %s" % header for header in headers], b""]
    return b"\r\n".join(lines)


async def _connected(place: _Place, limit: float | None) -> _Connection:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit):
            _, connection = await loop.create_connection(_Connection, *place)
    except TimeoutError:
        raise httpx.ConnectTimeout(f"no connection within {limit:g}s") from None
    except (OSError, UnicodeError) as exc:
        # a name can be of a length or form that no resolver takes
        raise httpx.ConnectError(str(exc)) from exc
    return connection


class _Connection(asyncio.Protocol):
    """A connection with at most one exchange at a time. status, headers: of the answer under way."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        # why nothing more comes
        self._failure: Exception | None = None
        self.open = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        # no exchange is on its way
        self.complete = True
        self.reusable = False

    def close(self) -> None:
        self.open = False
        self._transport.abort()

    async def ask(self, data: bytes, limit: float | None) -> bool:
        """Sends a request and reads the head of the answer; False when the connection was closed before one came."""
        self._pieces: list[bytes] = []
        # called by the parser, for every token
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._begun = self._headed = self.complete = self.reusable = self._paused = False
        self._beside = self._kept = 0
        self.status, self.headers = 0, []
        try:
            self._transport.write(data)
            while not self._headed:
                await self._more(limit)
        except BaseException as exc:
            self.close()
            if isinstance(exc, httpx.NetworkError | httpx.RemoteProtocolError) and not self._begun:
                return False
            raise
        return True

    async def piece(self, limit: float | None) -> bytes:
        """What has come of the body; empty at its end."""
        while not self._pieces and not self.complete:
            await self._more(limit)
        body, self._kept = b"".join(self._pieces), 0
        self._pieces.clear()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return body

    async def _more(self, limit: float | None) -> None:
        """Waits until something has come. Raises why nothing does."""
        if self._failure is None:
            self._waiter = waiter = self._loop.create_future()
            try:
                if limit is None:
                    await waiter
                else:
                    async with asyncio.timeout(limit):
                        await waiter
            except TimeoutError:
                raise httpx.ReadTimeout(f"silent for {limit:g}s") from None
            finally:
                self._waiter = None
        if self._failure is not None and not self._pieces:
            raise self._failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if not self.complete and self._failure is None:
            self._failure = failure
        self.close()
        self._wake()

    def _framed(self) -> bool:
        """Whether the answer says itself where it ends; else the end of the connection does."""
        return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # ── called by the loop ───────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:
            # nobody has asked
            self.close()
            return
        self._begun = True
        self._kept += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail(httpx.RemoteProtocolError(f"not an HTTP answer: {exc}"))
            return
        self._beside = 0 if self._pieces or self.complete else self._beside + len(data)
        if self._beside > _BESIDE_BYTES:
            # the parser keeps a line until its end, and every header
            self._fail(httpx.RemoteProtocolError(f"more than {_BESIDE_BYTES // 1_000} kB of headers"))
            return
        if self._kept > _READ and not self._paused and not self.complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._end(httpx.RemoteProtocolError("the server closed the connection before the end of its answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.eof_received()
        else:
            self._end(httpx.ReadError(str(exc)))

    def _end(self, failure: httpx.TransportError) -> None:
        self.open = False
        if not self.complete and self._headed and not self._framed() and isinstance(failure, httpx.ProtocolError):
            self.complete = True
        self._fail(failure)

    # ── called by the parser ─────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        # an informational answer comes before the real one
        self._headed = self.status >= 200

    def on_message_complete(self) -> None:
        if self._headed:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self._answer.piece():
            yield piece

    async def aclose(self) -> None:
        await self._answer.aclose()
