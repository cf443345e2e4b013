"""Everything that the stack keeps, as one file out and in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from services.gateway.backup.archive import archive, begin
from services.gateway.backup.restore import Mode, admit, alone, validate, wanted
from services.gateway.backup.restore import restore as written
from services.gateway.backup.sections import chosen, present
from services.gateway.backup.spool import spooled
from services.gateway.http.auth import AdminDep
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.schemas import LINES, spec
from services.gateway.operations.operator_shapes import RestoreLine
from services.gateway.queries.sse import EventStream
from shared.participant.backup import MEDIA_TYPE, BackupError

router = APIRouter(tags=["backup"])

_LINES = (
    '{"checked":{"product":"0.1.0","created":1700000000000,"counts":{"sessions":1}}}\n'
    '{"section":"sessions","done":1,"of":1}\n'
    '{"restored":{"sessions":{"written":1,"kept":0,"skipped":0,"reasons":[]}}}\n'
)

Without = Annotated[list[str], Query(description="A section to leave out; may be given several times")]


class _Download(EventStream):
    media_type = MEDIA_TYPE


class _Lines(EventStream):
    """`kept` is closed behind it, also when its client has gone before the first line."""

    media_type = LINES

    def __init__(self, gateway: Gateway, lines: AsyncGenerator[bytes, None], kept: AsyncExitStack) -> None:
        super().__init__(gateway, lines)
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._kept:
            await super().__call__(scope, receive, send)


@router.get(
    "/backup",
    summary="Sessions, settings, keys and what participants keep, in one file",
    responses=spec(
        "JSON lines in gzip; complete when its last line says so", bytes, "", 403, 422, 503, media=MEDIA_TYPE
    ),
)
async def make_backup(gateway: GatewayDep, _admin: AdminDep, without: Without = []) -> Response:  # noqa: B006
    sections = chosen(gateway, without)
    async with gateway.reachable():
        await present(sections)
        header = await begin(gateway, sections, without)
    return _Download(gateway, archive(gateway, sections, header))


@router.post(
    "/restore",
    summary="Put such a file back; it is checked as a whole before anything is written",
    openapi_extra={"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": {"type": "string",
                                                                                       "format": "binary"}}}}},
    responses=spec("Progress, at last what became of it, or `error`", RestoreLine, _LINES, 400, 403, 409, 413, 422, 503,
                   media=LINES),
)  # fmt: skip
async def restore_backup(
    request: Request,
    gateway: GatewayDep,
    _admin: AdminDep,
    mode: Annotated[Mode, Query(description="empty: only into an empty stack; merge: what is there stays; "
                                            "replace: what is there is removed first")] = "empty",
    without: Without = [],  # noqa: B006
) -> Response:  # fmt: skip
    sections = chosen(gateway, without)
    async with AsyncExitStack() as stack:
        settings = gateway.settings
        file = await stack.enter_async_context(spooled(request, settings.data_dir, settings.restore_max_bytes))
        try:
            summary = await asyncio.to_thread(validate, file, sections, without)
        except BackupError as exc:
            raise ApiError(422, exc.code, str(exc)) from exc
        targets = wanted(summary.header, sections, without)
        async with gateway.reachable():
            await present(targets)
            token = await stack.enter_async_context(alone(gateway))
            await admit(gateway, summary, sections, mode)
        progress = written(gateway, file, summary, targets, mode, token)
        return _Lines(gateway, (orjson.dumps(line) + b"\n" async for line in progress), stack.pop_all())
