"""The folder of an embedded store belongs to one process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.errors import SettingsError
from shared.participant.file_lock import FileLock

_LOCK_PATIENCE = 5.0


class StoreLocked(SettingsError):
    """Another process uses the folder."""


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """The folder, made when it is not there, for this process alone; waits a little for one that is just ending.

    Raises StoreLocked.
    """
    lock = FileLock(path / "local2.lock")
    try:
        if not await lock.taken(_LOCK_PATIENCE):
            raise StoreLocked(
                f"the memory in {path} is in use by another process ({lock.text or 'unknown'}); an embedded store has "
                "one replica: stop the other one, or run a Chroma server and set LOCAL2_CHROMA_URL"
            )
        lock.text = f"process {os.getpid()}"
        yield
    finally:
        lock.close()
