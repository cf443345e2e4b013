"""Files between the memory and other participants: over HTTP, because the bus carries ids only.

Whoever may ask the memory over the bus is given an address that works once, within a minute, for one file; there is
nothing else to be had here, and no other key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import uvicorn
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.memory.blobs import BlobsAway
from services.memory.formats import FileRefused
from services.memory.incoming import created
from shared.bus.endpoint import Endpoint
from shared.errors import SettingsError
from shared.participant.background import supervised_tasks
from shared.telemetry.logging import get_logger

log = get_logger()

SECONDS = 60.0
_MOST_GRANTS = 1_000
_PIECE = 1_048_576
# Of a form: the names and headers round its file.
_MOST_HEADERS = 16_384


@dataclass(frozen=True, slots=True)
class Incoming:
    """A file as it has come, at `path`. `name` and `type`: as its sender calls it; '' where it does not say."""

    path: Path
    name: str
    type: str
    digest: str


@dataclass(frozen=True, slots=True)
class Put:
    """The address takes a file of the user's, of at most `most` bytes, to `path`; `take` says what became of it, as
    JSON."""

    user_id: str
    path: Path
    most: int
    take: Callable[[Incoming], Awaitable[tuple[int, dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class Get:
    """The address gives these bytes, or those of a file."""

    content: Path | bytes


class Transfer:
    """`url`: where other participants find it."""

    def __init__(self) -> None:
        self.url = ""
        self._grants: dict[str, tuple[Put | Get, float]] = {}
        self._coming: Counter[str] = Counter()

    def uploads(self, user_id: str) -> int:
        """How many files of the user are on their way, or about to be sent."""
        now = asyncio.get_running_loop().time()
        granted = [what for what, until in self._grants.values() if until > now]
        return self._coming[user_id] + sum(isinstance(what, Put) and what.user_id == user_id for what in granted)

    def grant(self, what: Put | Get) -> str:
        """An address for it."""
        now = asyncio.get_running_loop().time()
        self._grants = {token: one for token, one in self._grants.items() if one[1] > now}
        if len(self._grants) >= _MOST_GRANTS:
            del self._grants[next(iter(self._grants))]
        token = secrets.token_urlsafe(32)
        self._grants[token] = (what, now + SECONDS)
        return f"{self.url}/{token}"

    def _taken(self, token: str) -> Put | Get | None:
        what, until = self._grants.pop(token, (None, 0.0))
        return what if until > asyncio.get_running_loop().time() else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application."""
        what = self._taken(scope["path"].removeprefix("/")) if scope["type"] == "http" else None
        match what, scope.get("method"):
            case Put(), "POST":
                assert isinstance(what, Put)
                self._coming[what.user_id] += 1
                try:
                    answer = await _put(what, scope, receive)
                finally:
                    self._coming[what.user_id] -= 1
                    self._coming += Counter()
                await _answer(send, *answer)
            case Get(), "GET":
                assert isinstance(what, Get)
                await _get(what, send)
            case _:
                await _answer(send, 404, _error("not_found", "this address is no longer good: ask for another one"))


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


async def _answer(send: Any, status: int, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": orjson.dumps(body)})


async def _get(what: Get, send: Any) -> None:
    try:
        content = what.content if isinstance(what.content, bytes) else await asyncio.to_thread(what.content.open, "rb")
    except OSError:
        await _answer(send, 404, _error("not_found", "the file is not there any more"))
        return
    with contextlib.ExitStack() as stack:
        if isinstance(content, bytes):
            size, read = len(content), None
        else:
            stack.enter_context(content)
            size, read = content.seek(0, 2), content.read
            content.seek(0)
        length = (b"content-length", str(size).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        while read is not None and (piece := await asyncio.to_thread(read, _PIECE)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if read is not None else content})


async def _put(what: Put, scope: Any, receive: Any) -> tuple[int, dict[str, Any]]:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    body = _Body(receive)
    try:
        # Keep the lock until `take` returns: a process that starts meanwhile must not remove the file as abandoned.
        with await asyncio.to_thread(created, what.path) as file:
            incoming = await _received(what, file, headers.get("content-type", ""), body)
            return await what.take(incoming)
    except FileRefused as exc:
        # what is still on its way is read: a sender that is not heard to the end hears no answer
        with contextlib.suppress(ConnectionError):
            async for _ in body.pieces():
                pass
        status = {"too_large": 413, "quota_exceeded": 413, "unsupported_type": 415, "wrong_type": 415}
        return status.get(exc.code, 422), _error(exc.code, str(exc))
    except BlobsAway as exc:
        return 503, _error("memory_unavailable", str(exc))
    except ConnectionError:
        return 400, _error("bad_request", "the connection closed before the file was complete")
    except OSError as exc:
        return 503, _error("memory_unavailable", f"the folder of documents cannot be used: {exc.strerror or exc}")
    finally:
        await asyncio.to_thread(what.path.unlink, missing_ok=True)


async def _received(what: Put, file: BinaryIO, content_type: str, body: _Body) -> Incoming:
    """Raises FileRefused, ConnectionError."""
    kind, options = parse_options_header(content_type)
    form = _Form(options.get(b"boundary", b"")) if kind == b"multipart/form-data" else None
    digest, size, waiting = hashlib.sha256(), 0, bytearray()
    async for piece in body.pieces():
        data = form.feed(piece) if form else piece
        size += len(data)
        if size > what.most:
            raise FileRefused("too_large", f"the file has more than {what.most} bytes, the most that one may have")
        digest.update(data)
        waiting += data
        if len(waiting) > _PIECE:
            await asyncio.to_thread(file.write, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(file.write, bytes(waiting))
    await asyncio.to_thread(file.flush)
    if form is None:
        return Incoming(what.path, "", kind.decode("latin-1"), digest.hexdigest())
    form.end()
    return Incoming(what.path, form.name, form.type, digest.hexdigest())


class _Body:
    """A request's body, piece by piece. Raises ConnectionError when it ends early or a minute passes in silence."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._more = True

    async def pieces(self) -> AsyncIterator[bytes]:
        """What has not been given yet."""
        while self._more:
            try:
                async with asyncio.timeout(SECONDS):
                    message = await self._receive()
            except TimeoutError as exc:
                raise ConnectionError from exc
            if message["type"] == "http.disconnect":
                raise ConnectionError
            self._more = bool(message.get("more_body"))
            yield message.get("body", b"")


class _Form:
    """The one file in a form; its other fields are passed over."""

    def __init__(self, boundary: bytes) -> None:
        if not boundary:
            raise FileRefused("bad_form", "the form's Content-Type names no boundary")
        self.name = ""
        self.type = ""
        self._data = bytearray()
        self._field = bytearray()
        self._value = bytearray()
        self._headers: dict[str, str] = {}
        self._inside = False
        self._complete = False
        self._files = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._head(self._field, data[start:end]),
                "on_header_value": lambda data, start, end: self._head(self._value, data[start:end]),
                "on_header_end": self._header,
                "on_headers_finished": self._headed,
                "on_part_data": self._part,
                "on_end": self._ended,
            },
        )

    def feed(self, piece: bytes) -> bytes:
        """What of it is the file's. Raises FileRefused."""
        self._data.clear()
        try:
            self._parser.write(piece)
        except FormParserError as exc:
            raise FileRefused("bad_form", f"the form cannot be read: {exc}") from exc
        return bytes(self._data)

    def end(self) -> None:
        """Raises FileRefused when there was no file in it."""
        if not self._complete:
            raise FileRefused("bad_form", "the form is not complete: its last line is missing")
        if not self._files:
            raise FileRefused("bad_form", "the form has no file: send it as a part with a filename")

    def _ended(self) -> None:
        self._complete = True

    def _begin(self) -> None:
        self._headers.clear()
        self._inside = False

    def _head(self, kept: bytearray, data: bytes) -> None:
        kept += data
        if len(kept) > _MOST_HEADERS:
            raise FileRefused("bad_form", "a header of the form is too long")

    def _header(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = self._value.decode("latin-1")
        self._field.clear()
        self._value.clear()

    def _headed(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", ""))
        if b"filename" not in options:
            return
        self._files += 1
        if self._files > 1:
            raise FileRefused("bad_form", "the form has several files: send them one by one")
        self._inside = True
        # clients write names in UTF-8 there, whatever the header's own charset is
        self.name = options[b"filename"].decode("utf-8", errors="replace")
        self.type = self._headers.get("content-type", "")

    def _part(self, data: bytes, start: int, end: int) -> None:
        if self._inside:
            self._data += data[start:end]


# ── the listener ─────────────────────────────────────────────────────────────────────────────────────────────


class _Server(uvicorn.Server):
    """Signals are the run loop's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@asynccontextmanager
async def open_transfer(host: str, port: int, redis_url: str, address: str | None = None) -> AsyncIterator[Transfer]:
    """Listens until the block ends. `address`: what others find it by; None: where it listens, or this host's address
    on the way to Redis when it listens everywhere. Raises SettingsError."""
    transfer = Transfer()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise SettingsError(
            f"memory cannot listen on {host}:{port} for files ({exc.strerror or exc}): set LOCAL2_MEMORY_FILES_HOST "
            "and LOCAL2_MEMORY_FILES_PORT; port 0 takes a free one"
        ) from exc
    taken = listener.getsockname()[1]
    everywhere = host.strip("[]") in ("0.0.0.0", "::")
    own = (await asyncio.to_thread(towards, redis_url)) if everywhere else host.strip("[]")
    place = f"[{own}]" if ":" in own else own
    transfer.url = f"http://{address or f'{place}:{taken}'}"
    config = uvicorn.Config(
        transfer, lifespan="off", ws="none", access_log=False, log_config=None, server_header=False, date_header=False,
        timeout_keep_alive=5, timeout_graceful_shutdown=1,
    )  # fmt: skip

    async def serve() -> None:
        server, own_listener = _Server(config), listener.dup()
        try:
            await server.serve(sockets=[own_listener])
        except asyncio.CancelledError:
            if server.started:
                await server.shutdown(sockets=[own_listener])
            raise

    with listener:
        async with supervised_tasks(files=serve):
            yield transfer


def towards(redis_url: str) -> str:
    """This host's address as the bus sees it."""
    endpoint = Endpoint.parse(redis_url)
    place = next(iter(endpoint.several), endpoint.server)
    try:
        family, _, _, _, target = socket.getaddrinfo(place.host, place.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()
