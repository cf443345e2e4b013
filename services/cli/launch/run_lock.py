"""One `local2 run` per data folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shared.errors import Local2Error


class AlreadyRunning(Local2Error):
    """Another supervisor uses the folder."""


class UnusableFolder(Local2Error):
    """The data folder cannot be made or written; `trouble` says why."""

    def __init__(self, data_dir: Path, trouble: str) -> None:
        super().__init__(
            f"the data folder {data_dir} cannot be used: {trouble};"
            " choose another one with --data-dir or LOCAL2_DATA_DIR"
        )


@contextlib.contextmanager
def run_lock(data_dir: Path) -> Iterator[None]:
    """Holds the folder. The system lets go of it when this process ends, however it ends.

    Raises AlreadyRunning, UnusableFolder.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(data_dir / "run.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise UnusableFolder(data_dir, exc.strerror or str(exc)) from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(
                f"LoCAL2 already runs on the data folder {data_dir} (pid {pid}); stop it with Ctrl-C, or choose "
                "another folder with --data-dir"
            ) from exc
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def running_pid(data_dir: Path) -> int | None:
    """The process id of the supervisor that uses the folder, if any."""
    try:
        handle = os.open(data_dir / "run.lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(handle, 32).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(handle)
    return None
