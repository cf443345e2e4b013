"""The folder of an embedded store belongs to one process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from shared.errors import SettingsError

_LOCK_PATIENCE = 5.0


class StoreLocked(SettingsError):
    """Another process uses the folder."""


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """The folder, made when it is not there, for this process alone; waits a little for one that is just ending.

    Raises StoreLocked.
    """
    with _lock_file(path) as file:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as exc:
                if time.monotonic() > deadline:
                    file.seek(0)
                    other = file.read().strip()
                    raise StoreLocked(
                        f"the memory in {path} is in use by another process{f' ({other})' if other else ''}; an "
                        "embedded store has one replica: stop the other one, or run a Chroma server and set "
                        "LOCAL2_CHROMA_URL"
                    ) from exc
                await asyncio.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _lock_file(path: Path) -> IO[str]:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return (path / "local2.lock").open("a+", encoding="utf-8")
