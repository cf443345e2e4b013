"""What ties a stack's processes to their supervisor: `python -m services.cli.launch.leash MODULE` runs a module tied.

The leash is a pipe that the supervisor alone holds open for writing: it is cut when the supervisor ends, also after
`kill -9`. Each process waits for that in a thread, and then ends as SIGTERM ends it, or by itself when that takes too
long. Until then each of them shares the lock on `crew.lock` in the data folder: the last one finds it free, and ends
the embedded Redis, which cannot watch a pipe; and a new supervisor takes it before it starts anything, so that it meets
none of the former crew.
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

_NAME = "LOCAL2_LEASH"
# What the embedded Redis may take to write everything out, or to be killed, when the last process of a stack ends it.
REDIS_ENDS = 12.0


class Leash:
    """The supervisor's end. grace: seconds that a process may take to end when it is cut."""

    def __init__(self, data_dir: Path, grace: int) -> None:
        self._held_by_crew, self._ours = os.pipe()
        self._data_dir = data_dir.resolve()
        self._grace = grace

    @property
    def fds(self) -> tuple[int, ...]:
        """What a tied process inherits."""
        return (self._held_by_crew,)

    @property
    def env(self) -> dict[str, str]:
        return {_NAME: f"{self._held_by_crew}:{self._grace}:{self._data_dir}"}

    def cut(self) -> None:
        os.close(self._ours)
        os.close(self._held_by_crew)


def crew_lock(data_dir: Path) -> FileLock:
    """Shared by every process of a stack, its supervisor included. Raises OSError."""
    return FileLock(data_dir / "crew.lock")


def main(module: str) -> None:
    leash, grace, folder = os.environ.pop(_NAME).split(":", 2)
    os.set_inheritable(int(leash), False)
    tied = _Tied(int(leash), int(grace), Path(folder))
    tied.crew.share()
    tied.crew.add(f"{os.getpid()} {module}")
    # until the module has a handler of its own
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        threading.Thread(target=tied.wait, name="leash", daemon=True).start()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        tied.leave()


class _Tied:
    """The process's end."""

    def __init__(self, leash: int, grace: int, folder: Path) -> None:
        self.crew = crew_lock(folder)
        self._leash = leash
        self._grace = grace
        self._folder = folder
        self._cut = False

    def wait(self) -> None:
        os.read(self._leash, 1)
        self._cut = True
        # who read our lines is gone too, and a line must not become an error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # the system ends what lets no thread run
        signal.alarm(self._grace + math.ceil(REDIS_ENDS))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._grace)
        self.leave()
        os._exit(1)

    def leave(self) -> None:
        """Ends Redis if the leash is cut and nobody else is left."""
        if self._cut and self.crew.take(patience=0):
            from services.cli.launch.embedded_redis import EmbeddedRedis

            EmbeddedRedis(self._folder / "redis").stop_left()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
