"""A memory in a process of its own that dies at a chosen step: `python -m support.memory_replica STEP TIMES`.

STEP is one of the keeper's; the process ends by SIGKILL when it comes to it for the TIMES-th time. `-`: never.
"""

from __future__ import annotations

import os
import signal
import sys

from services.memory.service import builder
from services.memory.settings import MemorySettings
from shared.service import Service


def main(step: str, times: int) -> None:
    left = times

    def fault(name: str) -> None:
        nonlocal left
        left -= name == step
        if name == step and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    Service("memory", MemorySettings, builder(fault)).main()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
