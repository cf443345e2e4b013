"""One model server over HTTP: every answer that is not what was asked becomes a ModelError that says what to do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from shared.llm.address import is_loopback, shown
from shared.llm.failures import error_text, failure, what
from shared.llm.http import BOUND, CONNECT_TIMEOUT, Bound, beginning_of, client_options, lines_of, open_transport
from shared.llm.port import ModelError, ModelMissing, ModelUnavailable, StreamInterrupted


@dataclass(frozen=True, slots=True)
class Kind:
    """A backend in sentences. name: where it has one. address, key: the variables that set them."""

    name: str
    who: str
    absent: str
    protocol: str
    address: str
    key: str
    start: str
    listens: str


OLLAMA = Kind(
    name="Ollama",
    who="Ollama",
    absent="Ollama does not answer",
    protocol="Ollama's protocol",
    address="OLLAMA_HOST",
    key="OLLAMA_API_KEY",
    start="start it with: ollama serve",
    listens="start it there with OLLAMA_HOST=0.0.0.0, so that it listens for other machines",
)
OPENAI = Kind(
    name="",
    who="a model server",
    absent="no model server answers",
    protocol="OpenAI's protocol",
    address="LOCAL2_BASE_URL",
    key="LOCAL2_BACKEND_API_KEY",
    start="start that server, or correct LOCAL2_BASE_URL",
    listens="start it there, so that it listens for other machines",
)
GOOGLE = Kind(
    name="Google",
    who="Google's API",
    absent="Google's API does not answer",
    protocol="the Gemini API's protocol",
    address="LOCAL2_BASE_URL",
    key="GEMINI_API_KEY",
    start="start that server, or correct LOCAL2_BASE_URL",
    listens="start that server",
)

# One that was found behind the address of an OpenAI-compatible server.
OLLAMA_BY_URL = replace(OLLAMA, address="LOCAL2_BASE_URL", key="LOCAL2_BACKEND_API_KEY")
KINDS = {"ollama": OLLAMA, "openai": OPENAI, "google_genai": GOOGLE}

# What the first line of a stream begins with.
NDJSON = (b"{",)
SSE = (b"data:", b":", b"event:", b"id:", b"retry:")


class ModelServer:
    """A client of one server; failures become ModelErrors.

    url: its base, without a path's last slash.
    """

    def __init__(self, kind: Kind, url: str, key: str | None, ca_file: Path | None = None) -> None:
        self.kind = kind
        self.url = shown(url)
        self._open = partial(open_transport, url, ca_file)
        self._transport = self._open()
        self._options = partial(client_options, url, key)
        # Silence is watched by the callers: a model load is allowed to take longer than a pause.
        self._http = httpx.AsyncClient(**self._options(self._transport), base_url=url)

    def options(self, timeout: float, *, limit: int | None = None) -> dict[str, Any]:
        """Return the arguments of an httpx client that a package creates; it uses the same connections.

        timeout: longest silence in seconds. limit: bytes of an answer; with it, the client has connections of its own.
        """
        transport = self._transport if limit is None else self._open(limit)
        return self._options(transport, timeout)

    async def ask(
        self, method: str, path: str, missing: str = "", body: Any = None, *, timeout: float
    ) -> dict[str, Any]:
        """Return the JSON object of an answer.

        missing: the sentence for a model that the server does not have. timeout: seconds for the whole answer.
        Raises ModelError.
        """
        try:
            async with asyncio.timeout(timeout), self._answer(method, path, body) as response:
                return await self.object_of(response, missing)
        except TimeoutError:
            raise away(self.kind, self.url, httpx.ReadTimeout(f"silent for {timeout:g}s")) from None
        except httpx.HTTPError as exc:
            raise away(self.kind, self.url, exc) from exc

    async def lines(
        self,
        path: str,
        body: Any,
        bound: Bound,
        begins: tuple[bytes, ...],
        missing: str = "",
        *,
        silence: float | None = None,
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the lines of a streamed answer, see `lines_of`; closing the generator closes the connection.

        begins: what the first line may begin with. silence: the longest in seconds; None: the caller watches it.
        Raises ModelError: StreamInterrupted once the answer has begun.
        """
        accept = "*/*" if begins is NDJSON else "text/event-stream"
        answering = begun = False
        try:
            async with self._answer("POST", path, body, accept=accept, silence=silence, bound=bound) as response:
                await self.check_status(response, missing)
                answering = True
                async with aclosing(lines_of(response)) as arrived:
                    async for lines in arrived:
                        first = b"" if begun else next((line for line in lines if line.strip()), b"")
                        if first and not first.startswith(begins):
                            rest = [line async for more in arrived for line in more]
                            self._object(b"\n".join([*lines, *rest]), missing)
                            raise ModelError(*self._other("something else than a stream"))
                        begun = begun or bool(first)
                        yield lines
        except httpx.HTTPError as exc:
            if answering:
                raise StreamInterrupted(
                    f"the connection to {self.kind.name or self.url} was lost: {what(exc)}"
                ) from exc
            raise away(self.kind, self.url, exc) from exc
        if not begun:
            # a server that is just being stopped does that too: another try may bring an answer
            raise StreamInterrupted(*self._other("nothing"))

    def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        accept: str = "*/*",
        silence: float | None = None,
        bound: Bound | None = None,
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Open the answer, whose body is still to be read. Raises httpx.HTTPError."""
        content = None if body is None else orjson.dumps(body)
        headers = {"accept": accept} | ({} if body is None else {"content-type": "application/json"})
        return self._http.stream(
            method,
            path,
            content=content,
            headers=headers,
            timeout=httpx.Timeout(silence, connect=CONNECT_TIMEOUT),
            extensions={BOUND: bound},
        )

    async def object_of(self, response: httpx.Response, missing: str) -> dict[str, Any]:
        """Read the JSON object of an answer. Raises ModelError: the reason of a refusal, or that it is no object."""
        await self.check_status(response, missing)
        return self._object(await response.aread(), missing)

    async def check_status(self, response: httpx.Response, missing: str) -> None:
        """Raise the ModelError of a refusal."""
        if not response.is_success:
            raise await self._refusal(response, missing)

    def _object(self, content: bytes, missing: str) -> dict[str, Any]:
        """Raises ModelError: what the server says went wrong, or that it is none."""
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            value = None
        if isinstance(value, dict):
            if value.get("error"):
                raise failure(None, error_text(content), missing)
            return value
        if not content.strip():
            raise ModelError(*self._other("nothing"))
        raise ModelError(*self._other("a web page" if is_page(content) else "something else"))

    async def _refusal(self, response: httpx.Response, missing: str) -> ModelError:
        content, status = await beginning_of(response), response.status_code
        redirect = response.headers.get("location") if 300 <= status < 400 else None
        return refused(self.kind, self.url, status, content, missing, redirect)

    def _other(self, answered: str) -> tuple[str, str]:
        return other(self.kind, self.url, answered)

    def strange(self, content: str = "") -> ModelError:
        """Return the error for an answer that is not the protocol's. content: its beginning, where it is known."""
        return ModelError(*self._other("a web page" if is_page(content.encode()) else "something else"))

    async def aclose(self) -> None:
        await self._http.aclose()


def refused(kind: Kind, url: str, status: int, content: bytes, missing: str, redirect: str | None = None) -> ModelError:
    """Our error for an answer that says no, by its status and what it says. redirect: where the server sends us."""
    if redirect is not None or 300 <= status < 400:
        to = shown(redirect or "").partition("?")[0]
        return ModelError(
            f"the server at {url} answers with a redirect" + (f" to {to[:200]}" if to else ""),
            f"set {kind.address} to where {kind.who} itself answers",
        )
    if status < 300:
        return ModelError(*other(kind, url, "nothing"))
    if is_page(content):
        # a proxy has pages of its own; a sign-in page comes with any status
        page = f"a web page (HTTP {status})"
        return failure(status, page, missing) if status >= 429 else ModelError(*other(kind, url, page))
    error = failure(status, error_text(content), missing)
    if status in (401, 403) and content.strip():
        return type(error)(str(error), f"set {kind.key} to a key of the server at {url}")
    if status in (404, 405) and not isinstance(error, ModelMissing):
        return type(error)(str(error), f"check {kind.address}, which makes it {url}")
    return error


def other(kind: Kind, url: str, answered: str) -> tuple[str, str]:
    """What to say of a server that is not of this kind."""
    return (
        f"the server at {url} does not speak {kind.protocol}: it answered with {answered}",
        f"set {kind.address} to the address of {kind.who}",
    )


def is_page(content: bytes) -> bool:
    """Whether an answer is for browsers."""
    return re.match(rb"\s*<(!doctype|html|head|body|\?xml)", content, re.IGNORECASE) is not None


_REFUSED = re.compile(r"refused|connect call failed|all connection attempts failed", re.IGNORECASE)
_NO_NAME = re.compile(
    r"name or service not known|nodename nor servname|name resolution|no address associated|getaddrinfo|idna|label",
    re.IGNORECASE,
)
_CERTIFICATE = re.compile(r"certificate[ _]verify[ _]failed", re.IGNORECASE)
_OTHER_NAME = re.compile(r"(hostname|ip address) mismatch|not valid for", re.IGNORECASE)
_EXPIRED = re.compile(r"has expired|not yet valid", re.IGNORECASE)
_NO_TLS = re.compile(r"\bssl\b|wrong version number|record layer", re.IGNORECASE)


# Time-outs that have no text of their own.
_TIMEOUTS: dict[type[BaseException], str] = {
    httpx.ConnectTimeout: f"no connection within {CONNECT_TIMEOUT:g}s",
    httpx.ReadTimeout: "it was silent for too long",
    httpx.WriteTimeout: "it did not read the request",
    httpx.PoolTimeout: "too many connections are in use",
}


def _reason(exc: BaseException) -> str:
    """Return the text of the system's own error: for "No route to host" the client says "All connection attempts
    failed"."""
    said = str(exc) or _TIMEOUTS.get(type(exc), type(exc).__name__)
    inner: BaseException | None = exc if isinstance(exc, httpx.ConnectError) else None
    while inner is not None:
        said = str(inner) if isinstance(inner, OSError) and str(inner) else said
        inner = inner.__cause__ or inner.__context__
    return said


def away(kind: Kind, url: str, exc: Exception) -> ModelUnavailable:
    """Why a server cannot be asked, and what to do, by what its connection ended with."""
    said, address = _reason(exc), kind.address
    there = f"{kind.absent} at {url} ({said})"
    if isinstance(exc, httpx.ProxyError):
        remedy = "check the proxy (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY), or add the host to NO_PROXY"
    elif _CERTIFICATE.search(said):
        if _OTHER_NAME.search(said):
            remedy = f"its certificate is for another name: use that one in {address}"
        elif _EXPIRED.search(said):
            remedy = "its certificate is not valid now: renew it there, and check the clocks"
        else:
            remedy = "give the certificate of its authority (a PEM file) in LOCAL2_CA_FILE"
    elif _NO_NAME.search(said):
        remedy = f"check the spelling of the host in {address}"
    elif _NO_TLS.search(said):
        remedy = f"it speaks no TLS there: begin {address} with http://"
    elif isinstance(exc, httpx.RemoteProtocolError):
        remedy = f"another program may listen there, or one that wants https://: check {address}"
    elif _REFUSED.search(said):
        remedy = kind.start if is_loopback(url) else f"{kind.listens}, or correct {address}"
    elif isinstance(exc, httpx.DecodingError):
        remedy = "have the server, or the proxy before it, send what it is asked for: Accept-Encoding: identity"
    elif isinstance(exc, httpx.ReadTimeout):
        remedy = "it took the question and said nothing: see its log"
    else:
        remedy = f"see that the machine is on and no firewall stands between, or correct {address}"
    return ModelUnavailable(there, remedy)
