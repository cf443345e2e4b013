"""Processes that the harness starts: found by their handle, spoken to by lines, always ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Child:
    """A Python process. `ask` sends a line and returns the JSON of the answer. Its log goes to `log`.

    The caller's LOCAL2_ settings are removed: the process has the defaults and `env`.
    python: the interpreter; by default the one that runs the bench.
    """

    def __init__(self, args: Sequence[str], log: Path, env: Mapping[str, str], python: str = sys.executable) -> None:
        self._log = log
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL2_")}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [python, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                env={**kept, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **env},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> Any:
        """The next line as JSON. Raises RuntimeError with the end of the log when the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
            raise RuntimeError("\n".join([f"process {self.pid} ended:", *words]))
        return orjson.loads(line)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return self.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """The end of its input, then SIGTERM, then SIGKILL."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        for end in (None, self.process.terminate, self.process.kill):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=8)
                break
        assert self.process.stdout is not None
        self.process.stdout.close()


class Participant(Child):
    """A Python program that does not listen to its input: it is stopped by SIGTERM."""

    def stop(self) -> None:
        self.process.terminate()
        super().stop()
