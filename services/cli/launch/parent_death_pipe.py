"""The end of a stack with its supervisor: `python -m services.cli.launch.parent_death_pipe MODULE` runs a module.

Only the supervisor has the writing end of the pipe open, so the pipe ends with it, also after `kill -9`. A thread of
each child waits for that, and ends the process as SIGTERM does, or by force after the grace period.

Every process of a stack shares the lock `crew.lock` in the data folder. The last one finds the lock free and ends the
embedded Redis, which cannot watch a pipe. A new supervisor takes the lock first, so that no process of an earlier stack
is left.
"""

from __future__ import annotations

import math
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from shared.participant.file_lock import FileLock

_NAME = "LOCAL2_PARENT_DEATH_PIPE"
# Seconds in which the embedded Redis writes its data out, or is killed, after the last process of a stack ended.
REDIS_ENDS = 12.0


class ParentDeathPipe:
    """The supervisor's end. grace: seconds in which a child ends after the pipe."""

    def __init__(self, data_dir: Path, grace: int) -> None:
        self._children_end, self._own_end = os.pipe()
        self._data_dir = data_dir.resolve()
        self._grace = grace

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors that a child inherits."""
        return (self._children_end,)

    @property
    def env(self) -> dict[str, str]:
        """The environment variable by which a child finds the pipe."""
        return {_NAME: f"{self._children_end}:{self._grace}:{self._data_dir}"}

    def close(self) -> None:
        """End the children, as the end of the supervisor does."""
        os.close(self._own_end)
        os.close(self._children_end)


def stack_lock(data_dir: Path) -> FileLock:
    """Return the lock that all processes of a stack share, its supervisor included. Raises OSError."""
    return FileLock(data_dir / "crew.lock")


def main(module: str) -> None:
    """Run a module as a child of the supervisor."""
    pipe, grace, folder = os.environ.pop(_NAME).split(":", 2)
    os.set_inheritable(int(pipe), False)
    guard = ChildGuard(int(pipe), int(grace), Path(folder))
    guard.lock.share()
    guard.lock.add(f"{os.getpid()} {module}")
    # until the module has a handler of its own
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        threading.Thread(target=guard.wait, name="parent-death-pipe", daemon=True).start()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        guard.end_redis()


class ChildGuard:
    """The child's end of the pipe."""

    def __init__(self, pipe: int, grace: int, folder: Path) -> None:
        self.lock = stack_lock(folder)
        self._pipe = pipe
        self._grace = grace
        self._folder = folder
        self._ended = False

    def wait(self) -> None:
        """Wait for the end of the supervisor, then end this process."""
        os.read(self._pipe, 1)
        self._ended = True
        # The reader of our output ended too; a write to its closed pipe would be an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # The system ends a process that lets no thread run.
        signal.alarm(self._grace + math.ceil(REDIS_ENDS))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._grace)
        self.end_redis()
        os._exit(1)

    def end_redis(self) -> None:
        """End the embedded Redis if the supervisor ended and this is the last process of the stack."""
        if self._ended and self.lock.take(patience=0):
            from services.cli.launch.embedded_redis import EmbeddedRedis

            EmbeddedRedis(self._folder / "redis").stop_left()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
