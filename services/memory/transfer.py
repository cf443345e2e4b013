"""Files between the memory and other participants: over HTTP, because the bus carries ids only.

The endpoint needs a bearer token. Each replica has one of its own, new at each start; an operation on the bus returns
it, with the address, to participants alone. The participant names the user, as in every operation on the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from services.memory.blobs import BlobsAway
from services.memory.formats import FileRefused, clean_name
from services.memory.incoming import Incoming, created
from services.memory.library import LibraryDamaged
from shared.bus.server import Server
from shared.errors import Local2Error, SettingsError
from shared.participant.background import supervised_tasks
from shared.participant.files import ABOUT_HEADER
from shared.telemetry.logging import get_logger

if TYPE_CHECKING:
    from services.memory.documents import Documents

log = get_logger()

# Seconds of silence after which an upload is given up.
_SILENCE = 60.0
_PIECE = 1_048_576
# Of a form: the names and headers round its file.
_MOST_HEADERS = 16_384
# Connections of all participants at once.
_MOST_CONNECTIONS = 256
_STATUS = {"too_large": 413, "quota_exceeded": 413, "unsupported_type": 415, "wrong_type": 415}

_User = Annotated[str, Field(min_length=1, max_length=1_000)]


class TooManyUploads(Local2Error):
    """A user has too many uploads in progress; another one can begin when one has ended."""


class _Upload(BaseModel):
    user_id: _User
    name: str = Field(default="file", max_length=1_000)
    keep_seconds: float | None = Field(default=None, gt=0)
    added: int | None = Field(default=None, ge=0, lt=2**53)


class _Wanted(BaseModel):
    user_id: _User
    text: bool = False
    wait: float = Field(default=0.0, ge=0, le=60)


class FileEndpoint:
    """`POST /files` takes a file of a user, `GET /files/{id}` gives its bytes or its text.

    url: where other participants find it. token: what they send with each request.
    """

    def __init__(self, documents: Documents) -> None:
        self.url = ""
        self.token = secrets.token_urlsafe(32)
        self._documents = documents
        self._coming: Counter[str] = Counter()
        # By user: until when (loop time) each upload that was announced may begin.
        self._announced: defaultdict[str, deque[float]] = defaultdict(deque)
        routes = [Route("/files", self._add, methods=["POST"]), Route("/files/{id}", self._fetch, methods=["GET"])]
        self.app = Starlette(routes=routes)

    def announce(self, user_id: str) -> None:
        """Count an upload as in progress before it begins, for a minute. Raises TooManyUploads.

        A sender that streams a body reads no refusal before the body's end.
        """
        self._check_uploads(user_id)
        self._announced[user_id].append(asyncio.get_running_loop().time() + _SILENCE)

    def _check_uploads(self, user_id: str) -> None:
        waiting, now = self._announced[user_id], asyncio.get_running_loop().time()
        while waiting and waiting[0] <= now:
            waiting.popleft()
        count = self._coming[user_id] + len(waiting)
        if not waiting:
            del self._announced[user_id]
        if count >= (most := self._documents.settings.max_uploads):
            raise TooManyUploads(f"{most} files of yours are on their way already: try again when one has come")

    async def _add(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            wanted = _Upload.model_validate(dict(request.query_params))
        except ValidationError as exc:
            return _error(422, "invalid_request", str(exc.errors()[0]["msg"]))
        if announced := self._announced.get(wanted.user_id):
            announced.popleft()
        try:
            self._check_uploads(wanted.user_id)
        except TooManyUploads as exc:
            return _error(429, "too_many_uploads", str(exc))
        self._coming[wanted.user_id] += 1
        try:
            return await self._taken(request, wanted)
        finally:
            self._coming[wanted.user_id] -= 1
            self._coming += Counter()

    async def _taken(self, request: Request, wanted: _Upload) -> Response:
        path, most = self._documents.library.fresh(), self._documents.settings.max_file_bytes
        try:
            # Keep the lock until the file is taken: a process that starts meanwhile must not remove it as abandoned.
            with await asyncio.to_thread(created, path) as file:
                incoming = await _received(request, path, file, most)
                found, new = await self._documents.take(
                    wanted.user_id, incoming, clean_name(incoming.name or wanted.name), incoming.type,
                    wanted.keep_seconds, wanted.added,
                )  # fmt: skip
                return JSONResponse(found.shown(), 201 if new else 200)
        except FileRefused as exc:
            # The server discards what is still on its way, so that the sender reads the answer.
            return _error(_STATUS.get(exc.code, 422), exc.code, str(exc))
        except (BlobsAway, LibraryDamaged) as exc:
            return _error(503, "memory_unavailable", str(exc))
        except (ClientDisconnect, TimeoutError):
            return _error(400, "bad_request", "the connection closed before the file was complete")
        except OSError as exc:
            return _folder_away(exc)
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _fetch(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            wanted = _Wanted.model_validate(dict(request.query_params))
        except ValidationError as exc:
            return _error(422, "invalid_request", str(exc.errors()[0]["msg"]))
        id = request.path_params["id"]
        try:
            found = await self._documents.content(wanted.user_id, id, text=wanted.text, wait=wanted.wait)
            if found is None:
                return _error(404, "not_found", f"there is no such file: {id[:100]}")
            file, content = found
            about = {ABOUT_HEADER: json.dumps(file.shown())}
            if isinstance(content, bytes):
                return Response(content, headers=about)
            return FileResponse(content, headers=about, stat_result=await asyncio.to_thread(content.stat))
        except (BlobsAway, LibraryDamaged) as exc:
            return _error(503, "memory_unavailable", str(exc))
        except FileNotFoundError:
            return _error(404, "not_found", "the file is not there any more")
        except OSError as exc:
            return _folder_away(exc)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without this replica's token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        return _error(401, "unauthorized", "the token is not this replica's: ask memory for its address again")


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


def _folder_away(exc: OSError) -> Response:
    return _error(503, "memory_unavailable", f"the folder of documents cannot be used: {exc.strerror or exc}")


async def _received(request: Request, path: Path, file: BinaryIO, most: int) -> Incoming:
    """Write the file in a request to the disk. Raises FileRefused, ClientDisconnect, TimeoutError after a silence."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    form = _Form(options.get(b"boundary", b"")) if kind == b"multipart/form-data" else None
    too_large = FileRefused("too_large", f"the file has more than {most} bytes, the most that one may have")
    if form is None and int(request.headers.get("content-length", 0)) > most:
        raise too_large
    digest, size, waiting = hashlib.sha256(), 0, bytearray()
    pieces = request.stream()
    while True:
        async with asyncio.timeout(_SILENCE):
            piece = await anext(pieces, None)
        if piece is None:
            break
        data = form.feed(piece) if form else piece
        size += len(data)
        if size > most:
            raise too_large
        digest.update(data)
        waiting += data
        if len(waiting) > _PIECE:
            await asyncio.to_thread(file.write, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(file.write, bytes(waiting))
    await asyncio.to_thread(file.flush)
    if form is None:
        return Incoming(path, "", kind.decode("latin-1"), digest.hexdigest())
    form.end()
    return Incoming(path, form.name, form.type, digest.hexdigest())


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
async def open_endpoint(
    documents: Documents, host: str, port: int, redis_url: str, address: str | None = None
) -> AsyncIterator[FileEndpoint]:
    """Listen until the block ends.

    address: what others find it by; None: where it listens, or this host's address on the way to Redis when it listens
    everywhere. Raises SettingsError.
    """
    endpoint = FileEndpoint(documents)
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
    endpoint.url = f"http://{address or f'{place}:{taken}'}"
    config = uvicorn.Config(
        endpoint.app, http="h11", lifespan="off", ws="none", access_log=False, log_config=None, log_level="error",
        server_header=False, date_header=False, limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
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
            yield endpoint


def towards(redis_url: str) -> str:
    """This host's address as the bus sees it."""
    host, port = Server(redis_url).addresses[0]
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()
