"""Files at the memory, for other participants: asked for over the bus, brought and fetched over HTTP.

An operation on the bus returns the address of a memory's endpoint and its token.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shared.errors import Local2Error
from shared.participant.tool_client import Caller, ToolClient
from shared.participant.writes import is_write

if TYPE_CHECKING:
    # more than a megabyte, in a gateway that may never see a file
    import httpx

OPERATION = "documents_manage"
# The prefix of a refusal that a later retry may not meet.
BUSY = "busy: "
# The header of a fetched file with its facts, as JSON in ASCII.
ABOUT_HEADER = "X-File"
# Seconds for one operation on the bus, and of silence on the way of a file.
_SECONDS = 30.0


class FilesUnavailable(Local2Error):
    """The memory does not answer; a retry may help. unknown: the memory may have made the change."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class FilesRefused(Local2Error):
    """The memory does not take it; `status` and `code` are for programs, as in HTTP."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def recorded(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a file that a turn records."""
    return {name: about[name] for name in ("id", "name", "type", "size", "pages") if about.get(name) is not None}


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file of a user: what the memory says of it, and its bytes (or its text, in UTF-8)."""

    about: dict[str, Any]
    content: bytes


class Files:
    """`http` may be shared by all requests of a process; see `open_files`."""

    def __init__(self, tools: ToolClient, http: httpx.AsyncClient) -> None:
        self._tools = tools
        self._http = http

    async def operate(self, user_id: str, **args: Any) -> dict[str, Any]:
        """One operation. Raises FilesUnavailable, FilesRefused."""
        call_id = f"files:{uuid.uuid4().hex}"
        caller = Caller(query_id=call_id, user_id=user_id)
        outcome = await self._tools.call(
            OPERATION, args, call_id=call_id, caller=caller, timeout=_SECONDS, attempt=1, internal=True
        )
        if outcome.error is None:
            found: dict[str, Any] = outcome.data
            return found
        if outcome.error.startswith(("unavailable: ", "tool timeout", "tool unavailable", "unknown tool")):
            unknown = bool(outcome.request_id) and is_write("documents", args)
            raise FilesUnavailable(f"the memory, which keeps files, is away ({outcome.error})", unknown=unknown)
        if outcome.error.startswith(BUSY):
            raise FilesRefused(429, "too_many_uploads", outcome.error.removeprefix(BUSY))
        raise FilesRefused(422, "invalid_request", outcome.error)

    async def add(
        self,
        user_id: str,
        body: AsyncIterator[bytes] | bytes,
        *,
        name: str = "file",
        content_type: str = "",
        keep_seconds: float | None = None,
        added: int | None = None,
    ) -> tuple[bool, dict[str, Any]]:
        """Whether the user's file is new, and what is known of it.

        body: the file itself, or a form with one file where `content_type` says so. keep_seconds: after which it goes
        by itself; None: never. added: when it came, in ms; None: now. Raises FilesUnavailable, FilesRefused, and what
        reading `body` raises.
        """
        url, headers = await self._endpoint(user_id, upload=True)
        headers["Content-Type"] = content_type or "application/octet-stream"
        asked = {"user_id": user_id, "name": name, "keep_seconds": keep_seconds, "added": added}
        params = {key: value for key, value in asked.items() if value is not None}
        with _on_the_way("brought"):
            response = await self._http.post(f"{url}/files", params=params, content=body, headers=headers)
        if response.is_success:
            return response.status_code == 201, response.json()
        raise _refusal(response)

    @asynccontextmanager
    async def opened(
        self, user_id: str, id: str, *, text: bool = False, wait: float = 0.0
    ) -> AsyncIterator[tuple[dict[str, Any], httpx.Response]]:
        """What is known of a file, and the answer that brings it: its bytes, or its text as a whole once it has been
        read, which is waited for so many seconds. Raises FilesUnavailable, FilesRefused (404 for what is not the
        user's)."""
        url, headers = await self._endpoint(user_id)
        path = f"{url}/files/{quote(id, safe='')}"
        params: dict[str, Any] = {"user_id": user_id, "text": text, "wait": wait}
        with _on_the_way("fetched"):
            async with self._http.stream("GET", path, params=params, headers=headers) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                yield json.loads(response.headers[ABOUT_HEADER]), response

    async def _endpoint(self, user_id: str, *, upload: bool = False) -> tuple[str, dict[str, str]]:
        """Return the address of a memory's endpoint, and the headers that it needs."""
        found = await self.operate(user_id, op="endpoint", upload=upload)
        return found["url"], {"Authorization": f"Bearer {found['token']}"}

    async def fetch(self, user_id: str, id: str, *, text: bool = False, wait: float = 0.0) -> Fetched:
        """The same as a whole."""
        async with self.opened(user_id, id, text=text, wait=wait) as (about, response):
            return Fetched(about, await response.aread())


@contextmanager
def _on_the_way(done: str) -> Iterator[None]:
    """Raises FilesUnavailable when the memory goes away while a file is `done`."""
    import httpx

    try:
        yield
    except httpx.HTTPError as exc:
        refused = isinstance(exc, httpx.ConnectError)
        why = f"the memory went away while a file was {done}: {type(exc).__name__}"
        raise FilesUnavailable(why, unknown=done == "brought" and not refused) from exc


def _refusal(response: httpx.Response) -> FilesRefused | FilesUnavailable:
    if response.status_code == 401:
        return FilesUnavailable("the memory has been started again; try again")
    try:
        error = response.json()["error"]
        return FilesRefused(response.status_code, str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return FilesRefused(502, "memory_error", f"the memory answered {response.status_code}")


@asynccontextmanager
async def open_files(tools: ToolClient) -> AsyncIterator[Files]:
    import httpx

    # Between participants: no proxy of the environment is asked, nobody sends them elsewhere,
    timeout = httpx.Timeout(_SECONDS, connect=5.0)
    # and without TLS, whose certificates need not be read then
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False, verify=False) as http:
        yield Files(tools, http)
