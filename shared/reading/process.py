"""The other side of `child`: starts such a process, asks it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any, Self

from shared.reading.child import LENGTH, frame

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
# An answer with more is no answer of ours.
MOST_BYTES = 64 * 1024**2


class Died(Exception):
    """The process did not survive what it was asked."""


class ReadingProcess:
    """asked: how often it was."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.asked = 0

    @classmethod
    async def start(cls, module: str) -> Self:
        """Runs a module whose main is `child.serve`."""
        # What takes the process over finds no address and no password in its environment.
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-B", "-m", module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        )

    async def ask(self, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Raises Died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.asked += 1
        try:
            self.process.stdin.write(frame({**request, "size": len(data)}, data))
            await self.process.stdin.drain()
            (length,) = LENGTH.unpack(await self.process.stdout.readexactly(LENGTH.size))
            if length > MOST_BYTES:
                raise Died
            answer: dict[str, Any] = json.loads(await self.process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as exc:
            raise Died from exc
        return answer

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
