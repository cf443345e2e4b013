"""A user's files, and the documents among them. Everything here is about the caller's own.

The bytes only pass through: the memory keeps them.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.types import Receive, Scope, Send

from services.gateway.http.auth import UserDep
from services.gateway.http.body import bounded
from services.gateway.http.errors import not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import memory_files
from services.gateway.http.schemas import spec
from services.gateway.queries.file_shapes import FileList, FileRemoved, Passages, StoredFile
from shared.contracts import MAX_FILE_BODY

router = APIRouter(tags=["files"])

_FILE = {
    "id": "file-0123456789abcdef0123456789abcdef", "name": "manual.pdf", "type": "application/pdf", "size": 120_000,
    "sha256": "…", "added": 1_700_000_000_000, "expires": None, "state": "ready", "reason": None,
    "title": "The manual", "chars": 52_000, "pages": 12,
}  # fmt: skip
_HIT = {
    "file_id": _FILE["id"], "name": "manual.pdf", "title": "The manual", "place": "page 3", "text": "…",
    "link": f"/files/{_FILE['id']}#page=3", "relevance": 0.81, "why": {"similarity": 0.7, "words": 0.9},
}  # fmt: skip
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
        },
    }
}


@router.post(
    "/files",
    summary="Add a file: as the body, or in a form; text, Markdown, HTML, PDF, PNG, JPEG, WebP, GIF",
    openapi_extra=_BODY,
    responses={**spec("It was there already", StoredFile, _FILE, 400, 408, 413, 415, 422, 429, 503),
               **spec("Added; its text is read soon", StoredFile, _FILE, status=201)},
)  # fmt: skip
async def add_file(
    request: Request,
    gateway: GatewayDep,
    user: UserDep,
    name: Annotated[str, Query(max_length=1_000, description="The file's name, where the body is the file")] = "file",
    content_type: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    body = bounded(request, MAX_FILE_BODY)
    async with memory_files(gateway) as files:
        new, file = await files.add(user.user_id, body, name=name, content_type=content_type)
    return reply(file, 201 if new else 200, {"Location": f"/files/{file['id']}"})


@router.get("/files", summary="Your files, newest first",
            responses=spec("A page", FileList, {"files": [_FILE], "total": 1, "cursor": None}, 422, 503))  # fmt: skip
async def list_files(
    gateway: GatewayDep,
    user: UserDep,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int | None, Query(ge=0, lt=2**62, description="Of the page before")] = None,
    search: Annotated[
        str, Query(max_length=200, description="Only files with this in their name, in any case; `total` counts them")
    ] = "",
) -> Response:
    named = {"query": search.strip()} if search.strip() else {}
    async with memory_files(gateway) as files:
        return reply(await files.operate(user.user_id, op="list", limit=limit, cursor=cursor, **named))


@router.get(
    "/files/{file_id}",
    summary="A file's bytes",
    responses=spec("The file as it was added", bytes, "%PDF-1.7 …", 404, 503, media="application/octet-stream"),
)
async def fetch_file(file_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    return _Fetched(gateway, user.user_id, file_id)


class _Fetched(Response):
    """A file, piece by piece as it comes from the memory."""

    def __init__(self, gateway: Gateway, user_id: str, file_id: str) -> None:
        super().__init__()
        self._gateway = gateway
        self._user_id = user_id
        self._file_id = file_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            memory_files(self._gateway) as files,
            files.opened(self._user_id, self._file_id) as (about, response),
        ):
            headers = {
                "Content-Type": about["type"],
                "Content-Length": str(about["size"]),
                "Content-Disposition": f"attachment; filename*=UTF-8''{quote(about['name'], safe='')}",
                # it is a stranger's page as far as a browser is concerned
                "Content-Security-Policy": "sandbox; default-src 'none'",
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "private, no-store",
            }
            raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@router.delete("/files/{file_id}", summary="Remove a file: its bytes, its text, and what a search finds of it",
               responses=spec("Removed", FileRemoved, {"id": _FILE["id"], "deleted": True}, 404, 503))  # fmt: skip
async def remove_file(file_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    async with memory_files(gateway) as files:
        if not (await files.operate(user.user_id, op="delete", id=file_id))["found"]:
            raise not_found("file")
    return reply({"id": file_id, "deleted": True})


@router.get("/documents", summary="Search your documents, ranked as the model gets it",
            responses=spec("The passages, best first", Passages,
                           {"query": "warranty", "hits": [_HIT], "text": "1. The manual (manual.pdf) …"},
                           422, 503))  # fmt: skip
async def search_documents(
    gateway: GatewayDep,
    user: UserDep,
    query: Annotated[str, Query(min_length=1, max_length=4_000, description="What to look for")],
    limit: Annotated[int, Query(ge=1, le=50, description="Most passages")] = 5,
) -> Response:
    async with memory_files(gateway) as files:
        found = await files.operate(user.user_id, op="search", query=query, limit=limit)
    return reply({"query": query, **found})
