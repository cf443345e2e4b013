"""Files during an upload. The writer locks each file; the operating system releases the lock when the writer dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class Incoming:
    """An uploaded file at `path`. name, type: from its sender; '' if missing."""

    path: Path
    name: str
    type: str
    digest: str


def created(path: Path) -> BinaryIO:
    """Return a new file, open for writing and locked until it is closed. Blocks briefly; raises OSError."""
    while True:
        file = path.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # `remove_abandoned` may have removed the file before it was locked
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def remove_abandoned(path: Path) -> None:
    """Remove a file unless a process is still writing it. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
