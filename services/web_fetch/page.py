"""One page over HTTP: redirects followed by hand, text and PDF only, everything limited."""

from __future__ import annotations

import asyncio
import codecs
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

import certifi
import httpcore

from services.web_fetch.body import ACCEPT_ENCODING, Body
from services.web_fetch.errors import FetchError
from services.web_fetch.guard import GuardedBackend
from services.web_fetch.meter import Meter
from services.web_fetch.url import Target, parse
from shared.errors import ToolError
from shared.reading.charset import utf_16
from shared.reading.pdf import is_pdf

REDIRECTS = frozenset({301, 302, 303, 307, 308})
ACCEPT = "text/html, application/xhtml+xml, text/markdown;q=0.9, text/plain;q=0.9, application/json;q=0.8, */*;q=0.5"
TEXT_TYPES = frozenset({
    "application/atom+xml", "application/javascript", "application/json", "application/rss+xml", "application/toml",
    "application/x-ndjson", "application/x-yaml", "application/xhtml+xml", "application/xml", "application/yaml",
})  # fmt: skip
PDF_TYPES = frozenset({"application/pdf", "application/x-pdf"})
# Generic types, which servers send for any file: its first bytes show the type.
UNKNOWN_TYPES = frozenset({
    "application/octet-stream", "binary/octet-stream", "application/download", "application/force-download",
    "application/x-download",
})  # fmt: skip
# What may come before the body: headers, certificates, and answers that only announce another one (1xx).
MAX_HEAD = 200_000
# A page without a content type is text when its beginning has no NUL byte, or is UTF-16.
SNIFFED = 1_024
# Each piece of a chunked body costs as much time as some hundred bytes. A page that is written line by line has pieces
# of 50 bytes; one of single bytes is left.
FREE_PIECES, BYTES_PER_PIECE = 10_000, 50
# Then others have their turn.
PIECES_AT_ONCE = 100

BROKEN_OFF = "the page's compressed data breaks off before its end"


@dataclass(frozen=True, slots=True)
class Page:
    """`data` is the body without its compression; `cut`: it is not the whole body.

    content_type: the bare type, "text/html" for HTML that was sent as a PDF. declared: the whole header, which may name
    a charset. pdf: the body is a PDF. seen: all URLs of the redirects, with this one. note: why the body is cut, if the
    reason is not the size limit.
    """

    url: Target
    status: int
    content_type: str
    declared: str
    data: bytes
    cut: bool
    seen: tuple[Target, ...]
    pdf: bool = False
    note: str = ""

    @property
    def redirects(self) -> int:
        return len(self.seen) - 1


class Browser:
    """Fetches pages through a guarded backend. Holds no state between two fetches: no cookies, no open connections."""

    def __init__(
        self, backend: GuardedBackend, user_agent: str, max_bytes: int, max_pdf_bytes: int, max_redirects: int
    ) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._max_pdf_bytes = max_pdf_bytes
        self._max_redirects = max_redirects
        self._headers = [
            ("User-Agent", user_agent),
            ("Accept", ACCEPT),
            ("Accept-Encoding", ACCEPT_ENCODING),
            ("Accept-Language", "en, *;q=0.5"),
            ("Connection", "close"),
        ]

    async def get(self, url: str) -> Page:
        """The page at `url`, after its redirects. Raises Blocked, FetchError or `fetch failed: STATUS`.

        Every hop is parsed, resolved and checked like the first one. Nothing is tried twice.
        """
        return await self._follow([parse(url)])

    async def refreshed(self, page: Page, target: Target) -> Page:
        """Return the target page of `page`'s refresh, which is checked and counted like a redirect. Raises as `get`."""
        return await self._follow([*page.seen, target])

    async def _follow(self, seen: list[Target]) -> Page:
        while True:
            target = seen[-1]
            if target in seen[:-1]:
                raise FetchError("the page redirects in a circle")
            if len(seen) - 1 > self._max_redirects:
                raise FetchError(f"more than {self._max_redirects} redirects")
            async with self._response(target) as response:
                if response.status not in REDIRECTS or not (location := _header(response, b"location")):
                    return await self._page(target, response, tuple(seen))
                seen.append(target.join(location))

    @asynccontextmanager
    async def _response(self, target: Target) -> AsyncIterator[httpcore.Response]:
        # A pool of its own for each request: a connection that is used again was checked for an earlier answer of
        # the resolver. No proxy is configured, and httpcore reads none from the environment.
        url = httpcore.URL(
            scheme=target.scheme.encode(),
            host=target.host.encode(),
            port=target.port,
            target=target.path.encode(),
        )
        headers = [("Host", target.authority), *self._headers]
        meter = Meter(self._backend, MAX_HEAD)
        try:
            async with (
                httpcore.AsyncConnectionPool(
                    ssl_context=_tls() if target.scheme == "https" else None,
                    network_backend=meter,
                    max_connections=1,
                ) as pool,
                pool.stream("GET", url, headers=headers) as response,
            ):
                # compressed or in chunks, a page is hardly ever longer than it is; the frames of chunks come on top
                meter.left = 2 * self._limit(_kind(response)) + MAX_HEAD
                yield response
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
            raise FetchError(_no_connection(target, exc)) from exc
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as exc:
            raise FetchError(f"the connection to {target.host} broke off") from exc

    async def _page(self, target: Target, response: httpcore.Response, seen: tuple[Target, ...]) -> Page:
        if not 200 <= response.status < 300:
            raise ToolError(f"fetch failed: {response.status}")
        kind = _kind(response)
        if kind and not is_text(kind) and kind not in PDF_TYPES | UNKNOWN_TYPES:
            raise _not_text(kind)
        body = Body(_all(response, b"content-encoding"), self._limit(kind))
        pieces = 0
        async for chunk in response.aiter_stream():
            body.feed(chunk)
            pieces += 1
            if body.cut or (kind in UNKNOWN_TYPES and len(body) >= SNIFFED and not is_pdf(body.begin(SNIFFED))):
                break
            if pieces > FREE_PIECES + len(body) // BYTES_PER_PIECE:
                raise FetchError("the page comes in too many tiny pieces")
            if pieces % PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)
        data, cut = body.data, body.cut
        if kind in PDF_TYPES and _is_markup(data):
            # Some servers send a sign-in page or an error page with the type of the file.
            kind, data, cut = "text/html", data[: self._max_bytes], cut or len(data) > self._max_bytes
        note = BROKEN_OFF if body.broken_off and not cut else ""
        # The magic number inside a text does not make the text a PDF.
        pdf = kind in PDF_TYPES or (is_pdf(data) and (kind in UNKNOWN_TYPES or data.lstrip().startswith(b"%PDF-")))
        if pdf and cut:
            raise FetchError(f"the PDF is larger than the limit of {self._limit(kind)} bytes")
        if pdf and note:
            raise FetchError(note)
        if kind in UNKNOWN_TYPES and not pdf:
            raise _not_text(kind)
        if not kind and not pdf and b"\0" in data[:SNIFFED] and not utf_16(data):
            raise FetchError("the content is not text")
        declared = _header(response, b"content-type")
        return Page(target, response.status, kind, declared, data, cut or bool(note), seen, pdf, note)

    def _limit(self, kind: str) -> int:
        """Return the most bytes to read of a body of this type."""
        return self._max_pdf_bytes if kind in PDF_TYPES | UNKNOWN_TYPES else self._max_bytes


@cache
def _tls() -> ssl.SSLContext:
    # Made once and at first use: reading the authorities takes 40 ms.
    context = ssl.create_default_context(cafile=certifi.where())
    # The authorities that an operator added to this machine.
    context.load_default_certs()
    return context


def is_text(content_type: str) -> bool:
    """Whether a body of this type can be read as text."""
    return (
        content_type.startswith("text/")
        or content_type in TEXT_TYPES
        or (content_type.startswith("application/") and content_type.endswith(("+json", "+xml")))
    )


def _kind(response: httpcore.Response) -> str:
    """Return the content type without its parameters, or ""."""
    return _header(response, b"content-type").partition(";")[0].strip().lower()


def _is_markup(data: bytes) -> bool:
    """Return whether the bytes begin like HTML or XML, and have no PDF behind them."""
    return data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"<") and not is_pdf(data)


def _not_text(kind: str) -> FetchError:
    return FetchError(f"the content type {kind[:80]!r} is not text")


def _header(response: httpcore.Response, name: bytes) -> str:
    for key, value in response.headers:
        if key.lower() == name:
            # Names outside ASCII come as UTF-8 in practice.
            return value.decode("utf-8", errors="replace").strip()
    return ""


def _all(response: httpcore.Response, name: bytes) -> str:
    """A header that may be repeated, as the one list that its lines are."""
    return ", ".join(value.decode("latin-1") for key, value in response.headers if key.lower() == name)


def _no_connection(target: Target, exc: BaseException) -> str:
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of {target.host} is not valid ({cause.verify_message})"
        cause = cause.__cause__ or cause.__context__
    # Not the system's own text: it may name an address.
    return f"no connection to {target.authority}"
