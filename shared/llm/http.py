"""HTTP to model servers: one pool of connections for each server, and answers of bounded size."""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from shared.errors import SettingsError
from shared.llm.address import proxy_for
from shared.llm.port import AnswerTooLong

CONNECT_TIMEOUT = 10.0
# Longest line or event of an answer.
LINE_BYTES = 8_000_000
# Largest answer without a limit of tokens; with one, the bytes for each token, and the smallest limit.
ANSWER_BYTES = 16_000_000
_BYTES_PER_TOKEN = 1_000
_SMALLEST_LIMIT = 4_000_000
# How much of an error's body is read.
_ERROR_BYTES = 100_000
# A connection that was idle for a minute may be gone without a sign (firewalls).
_LIMITS = httpx.Limits(max_connections=1_000, max_keepalive_connections=256, keepalive_expiry=60.0)
# The extension of a request with the `Bound` of its answer.
BOUND = "local2_bound"
# Sent with each request whose answer is bounded: httpx unpacks an answer before its bytes can be counted.
UNCOMPRESSED = {"accept-encoding": "identity"}


def open_http(
    url: str, key: str | None, *, timeout: float | None = None, ca_file: Path | None = None
) -> httpx.AsyncClient:
    """Return a client of one server with a pool of its own; it follows no redirect and stores no cookie.

    key: sent as a bearer token. timeout: longest silence in seconds; None: the caller watches it.
    ca_file: certificates in PEM form that are trusted beside the usual ones.
    Raises SettingsError for a proxy or certificates that cannot be used.
    """
    return httpx.AsyncClient(**client_options(url, key, open_transport(url, ca_file), timeout), base_url=url)


def client_options(
    url: str, key: str | None, transport: httpx.AsyncBaseTransport, timeout: float | None = None
) -> dict[str, Any]:
    """Return the arguments of an `httpx.AsyncClient`, also for a package that creates the client itself."""
    return {
        "auth": _authorization(url, key),
        "headers": UNCOMPRESSED,
        "timeout": httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
        "transport": transport,
        "follow_redirects": False,
        "trust_env": False,
    }


def open_transport(url: str, ca_file: Path | None, limit: int = ANSWER_BYTES) -> BoundedTransport:
    """Return the connections to one server, through a proxy of the environment where `proxy_for` names one.

    limit: bytes of an answer whose request has no bound of its own. Raises SettingsError.
    """
    proxy = proxy_for(url)
    # perf: to load the usual certificates takes 35 ms for each client; a server without TLS needs none
    plain = url.startswith("http://") and not (proxy or "").startswith("https://")
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else _trusted(ca_file)
    return BoundedTransport(limit, verify=trusted, limits=_LIMITS, proxy=proxy, trust_env=False)


def _authorization(url: str, key: str | None) -> Callable[[httpx.Request], httpx.Request]:
    """Return what sets the Authorization header: the user in the address, else the key, else no header at all."""
    address = httpx.URL(url)
    value = f"Bearer {key}" if key else None
    if address.userinfo:
        value = f"Basic {b64encode(f'{address.username}:{address.password}'.encode()).decode()}"

    def authorize(request: httpx.Request) -> httpx.Request:
        # a package may have set the key of another server, from its environment
        request.headers.pop("authorization", None)
        if value is not None:
            request.headers["authorization"] = value
        return request

    return authorize


def _trusted(ca_file: Path | None) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    if ca_file is not None:
        # Python 3.13 demands fields that the certificates of private authorities often lack
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            context.load_verify_locations(ca_file)
        except OSError as exc:
            raise SettingsError(f"LOCAL2_CA_FILE: {ca_file} cannot be used ({exc})") from exc
    return context


class Bound:
    """The largest size of one answer. tokens: the most that the server was asked for; None: no limit was set."""

    def __init__(self, tokens: int | None, limit: int = ANSWER_BYTES) -> None:
        self._limit = limit if tokens is None else max(_SMALLEST_LIMIT, tokens * _BYTES_PER_TOKEN)
        self._total = 0
        self._line = 0

    def take(self, piece: bytes) -> None:
        """Count a piece of the answer. Raises AnswerTooLong."""
        self._total += len(piece)
        newline = piece.rfind(b"\n")
        self._line = self._line + len(piece) if newline < 0 else len(piece) - newline - 1
        if self._line > LINE_BYTES:
            raise AnswerTooLong(f"the model server sent {LINE_BYTES // 1_000_000} MB without the end of a line")
        if self._total > self._limit:
            raise AnswerTooLong(f"the model server sent more than {self._limit // 1_000_000} MB for one answer")


class BoundedTransport(httpx.AsyncHTTPTransport):
    """Connections to one server, with bounded and uncompressed answers. Other arguments: as of httpx's transport."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(**options)
        self._limit = limit

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.HTTPError; reading the answer also raises AnswerTooLong."""
        response = await self._sent(request)
        try:
            await refuse_compressed(response)
        except httpx.DecodingError:
            await response.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        bound = request.extensions.get(BOUND) or Bound(None, self._limit)
        return httpx.Response(
            response.status_code,
            # cookies are for browsers: the next request must not depend on an earlier answer
            headers=[header for header in response.headers.raw if header[0].lower() != b"set-cookie"],
            stream=_BoundedStream(response.stream, bound),
            extensions=response.extensions,
        )

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        connected = False

        async def note(event: str, _info: dict[str, Any]) -> None:
            nonlocal connected
            connected = connected or event.endswith("connect_tcp.started")

        request.extensions = {**request.extensions, "trace": note}
        try:
            return await super().handle_async_request(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if connected:
                raise
        # A server may close an idle connection at the moment of its next use: once more, on another connection.
        return await super().handle_async_request(request)


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, bound: Bound) -> None:
        self._stream = stream
        self._bound = bound

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._bound.take(piece)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def refuse_compressed(response: httpx.Response) -> None:
    """Raise httpx.DecodingError for a compressed answer: a few of its bytes may stand for any number of bytes."""
    if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise httpx.DecodingError("it sent a compressed answer, which was not asked for")


async def lines_of(response: httpx.Response) -> AsyncGenerator[list[bytes], None]:
    """Yield the lines of a body without their ends, those of one read together; the last line may lack its end."""
    begun: list[bytes] = []
    async for piece in response.aiter_raw():
        whole, end, rest = piece.rpartition(b"\n")
        if end:
            lines = b"".join([*begun, whole]).split(b"\n")
            begun = [rest]
            yield lines
        else:
            begun.append(piece)
    yield [b"".join(begun)]


async def beginning_of(response: httpx.Response) -> bytes:
    """Return the beginning of an error's body."""
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > _ERROR_BYTES:
            break
    return body[:_ERROR_BYTES]
