"""A file that belongs to one process: the system holds its lock, and lets go when the process ends, however it ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from pathlib import Path

_LOOK = 0.02


class FileLock:
    """A file, made (with its folder) when it is not there. Its text says who holds it: for people, never believed."""

    def __init__(self, path: Path) -> None:
        """Takes nothing yet. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def take(self, patience: float = 0.2) -> bool:
        """Whether it is ours alone now; one that is just being let go of, or only looked at, is waited for."""
        deadline = time.monotonic() + patience
        while not self._flock(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK)
        return True

    async def taken(self, patience: float) -> bool:
        """The same where an event loop runs."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while not self._flock(fcntl.LOCK_EX):
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_LOOK)
        return True

    def share(self) -> None:
        """Holds it together with others who share it, and waits for one who has it alone."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def is_taken(self) -> bool:
        """Whether somebody has it alone just now."""
        taken = not self._flock(fcntl.LOCK_SH)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return taken

    @property
    def text(self) -> str:
        return os.pread(self._file, 1 << 16, 0).decode(errors="replace").strip()

    @text.setter
    def text(self, text: str) -> None:
        os.ftruncate(self._file, 0)
        self.add(text)

    def add(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._file)

    def _flock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
