"""Ends what a test process has started and could not end, because it was ended itself: a Redis that a script keeps busy
does not even hear that it shall. `python guard.py PID RUN` waits until that process is gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid

import psutil

_NAME = "TESTED_BY"
_LOOK = 0.5


# For a Redis server: its title would stand in the place of its environment.
READABLE = {"set-proc-title": "no"}


def guard() -> None:
    """Whatever this process starts from now on ends at the latest with it, however it ends."""
    run = uuid.uuid4().hex
    # it holds none of our outputs open, and no signal to our group reaches it
    nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    command = [sys.executable, __file__, str(os.getpid()), run]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere, setsid=True)
    os.environ[_NAME] = run


def mark() -> dict[str, str]:
    """What stands in the environment of all that is ended; for who gets one of his own."""
    return {_NAME: os.environ[_NAME]} if _NAME in os.environ else {}


def main(tests: int, run: str) -> None:
    while os.getppid() == tests:
        time.sleep(_LOOK)

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_NAME) == run:
                    found.append(process)
        return found

    # what was just being started when its parent was killed
    while processes := left():
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_LOOK)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
