"""Files of this machine: written whole or not at all, and sent to the stack."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from services.cli.api import Api
from shared.contracts import MAX_FILE_BODY
from shared.errors import Local2Error


class FileTrouble(Local2Error):
    """A file cannot be read or written; the text says what to do."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that gets its name at the end of the block; an older file of that name stays until then.

    Only its owner may read it, because it holds conversations. Raises FileTrouble.
    """
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as file:
            yield file
        part.replace(path)
    except OSError as exc:
        reason = exc.strerror or exc
        raise FileTrouble(f"{path} cannot be written: {reason}; choose a place that is there and has room") from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


# A large file on a slow network.
_SECONDS = 300.0


class UnreadableFile(Local2Error):
    """A file on this machine cannot be read or sent; the text says which, and why."""


def _content(path: Path) -> bytes:
    # Checked here: a client that still sends its file can lose the gateway's answer.
    if (size := path.stat().st_size) > MAX_FILE_BODY:
        raise UnreadableFile(f"{path} has {size:,} bytes, and a file may have at most {MAX_FILE_BODY:,}")
    return path.read_bytes()


async def send(api: Api, path: Path) -> dict[str, Any]:
    """Add a file to the stack and return its record. Raises UnreadableFile, ApiError."""
    try:
        data = await asyncio.to_thread(_content, path)
    except OSError as exc:
        raise UnreadableFile(f"{path} cannot be read: {exc.strerror or exc}") from exc
    found: dict[str, Any] = await api.call(
        "POST",
        "/files",
        params={"name": path.name},
        content=data,
        headers={"content-type": "application/octet-stream"},
        timeout=_SECONDS,
    )
    return found
