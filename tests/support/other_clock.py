"""A process on a host whose clock is wrong: `python -m support.other_clock SECONDS MODULE ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys
import time


def set_ahead(seconds: float) -> None:
    """Let this process read a wall clock that is ahead of the real one; its monotonic clock stays right."""
    wall, wall_ns = time.time, time.time_ns
    time.time = lambda: wall() + seconds
    time.time_ns = lambda: wall_ns() + int(seconds * 1_000_000_000)


if __name__ == "__main__":
    set_ahead(float(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
