"""One `local2 run` per data folder, whatever path leads to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from services.cli.launch.parent_death_pipe import REDIS_ENDS, stack_lock
from shared.errors import Local2Error
from shared.participant.file_lock import FileLock

_QUIET = 0.2


class AlreadyRunning(Local2Error):
    """Another supervisor, or what is left of its stack, uses the folder."""


class UnusableFolder(Local2Error):
    """The data folder cannot be made or written; `trouble` says why."""

    exit_status = 2

    def __init__(self, data_dir: Path, trouble: str) -> None:
        super().__init__(
            f"the data folder {data_dir} cannot be used: {trouble};"
            " choose another one with --data-dir or LOCAL2_DATA_DIR"
        )


@contextlib.asynccontextmanager
async def run_lock(
    data_dir: Path, patience: float = REDIS_ENDS, say: Callable[[str], None] = lambda _line: None
) -> AsyncIterator[None]:
    """Lock the folder until this process ends, also after `kill -9`. Raises AlreadyRunning, UnusableFolder.

    patience: seconds in which the processes of a killed supervisor end.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack_lock(data_dir)
            stack.callback(lock.close)
            run = FileLock(data_dir / "run.lock")
            stack.callback(run.close)
            if not run.take():
                raise AlreadyRunning(
                    f"LoCAL2 already runs on the data folder {data_dir} (pid {run.text or 'unknown'}); stop it with "
                    "Ctrl-C, or choose another folder with --data-dir"
                )
            run.text = str(os.getpid())
            await _wait_for_processes(lock, data_dir, patience, say)
        except OSError as exc:
            raise UnusableFolder(data_dir, exc.strerror or str(exc)) from exc
        yield


async def _wait_for_processes(lock: FileLock, data_dir: Path, patience: float, say: Callable[[str], None]) -> None:
    if not await lock.taken(_QUIET):
        say(f"processes of an earlier run on {data_dir} are ending: waiting for them")
        if not await lock.taken(patience):
            left = " ".join(line.split()[0] for line in lock.text.splitlines() if _lives(line.split()[0]))
            raise AlreadyRunning(
                f"processes of an earlier run still use the data folder {data_dir}; end them"
                f"{f' with: kill -9 {left}' if left else ''}, or choose another folder with --data-dir"
            )
    lock.text = f"{os.getpid()} supervisor"
    # From now on no other process is the last one of the stack.
    lock.share()


def running_pid(data_dir: Path) -> int | None:
    """The process id of the supervisor that uses the folder, if any."""
    path = data_dir / "run.lock"
    if not path.exists():
        return None
    try:
        lock = FileLock(path)
    except OSError:
        return None
    try:
        return int(lock.text) if lock.is_taken() and lock.text.isdigit() else None
    finally:
        lock.close()


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
