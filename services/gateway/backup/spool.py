"""An uploaded file on its way: on the disk, without a name, gone with the request."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from fastapi import Request

from services.gateway.http.body import bounded
from services.gateway.http.errors import ApiError

_BUFFER = 1024 * 1024


@contextlib.asynccontextmanager
async def spooled(request: Request, folder: Path, limit: int) -> AsyncIterator[BinaryIO]:
    """The request's body as a file at its beginning. Raises ApiError 400, 413 and 507."""
    with _opened(folder) as file:
        buffer = bytearray()
        async for part in bounded(request, limit, " (LOCAL2_RESTORE_MAX_BYTES of the gateway)"):
            buffer += part
            if len(buffer) >= _BUFFER:
                await asyncio.to_thread(_write, file, bytes(buffer))
                buffer.clear()
        await asyncio.to_thread(_write, file, bytes(buffer))
        file.seek(0)
        yield file


def _opened(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # unbuffered: what does not fit is noticed by the write, not when the file is closed
        return tempfile.TemporaryFile(dir=folder, prefix="restore-", buffering=0)
    except OSError as exc:
        raise _no_room(exc) from exc


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as exc:
        raise _no_room(exc) from exc


def _no_room(exc: OSError) -> ApiError:
    return ApiError(
        507,
        "no_space",
        f"the gateway cannot keep the file while it checks it ({exc.strerror or exc}): make room in its data folder "
        "(LOCAL2_DATA_DIR)",
    )
