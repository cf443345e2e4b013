"""Files of this machine, on their way to the stack."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from services.cli.api import Api
from shared.errors import Local2Error

# A large file on a slow network.
_SECONDS = 300.0


class UnreadableFile(Local2Error):
    """A file on this machine cannot be read; the text says which, and why."""


async def send(api: Api, path: Path) -> dict[str, Any]:
    """Adds a file; what is known of it then. Raises UnreadableFile, ApiError."""
    try:
        data = await asyncio.to_thread(path.read_bytes)
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
