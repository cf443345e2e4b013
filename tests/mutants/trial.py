"""Trying a change: do the tests that run its line notice it?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mutants.changes import Change
from mutants.copy import Copy, end

# A test that takes so much longer than it did may hang, and is asked again, with more patience: a busy machine is slow.
# The first one of a file also starts what the others need.
_PATIENCE, _TIMES = (5.0, 15.0), (4.0, 6.0)
# Nothing imports or collects for so long.
_START = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """by: the test that noticed the change, or None. why: `fails`, `hangs`, `breaks` (nothing could be imported).
    tried: how many tests there were to ask. seconds: what it took of a processor."""

    change: Change
    by: str | None = None
    why: str = ""
    tried: int = 0
    seconds: float = 0.0

    def after(self, before: Verdict) -> Verdict:
        """With what was tried of the same change before."""
        return replace(self, tried=before.tried + self.tried, seconds=before.seconds + self.seconds)


class Bench:
    """A copy of the checkout and a warm process in it: one trial at a time."""

    def __init__(self, checkout: Path) -> None:
        self._copy = Copy(checkout)
        self._process: asyncio.subprocess.Process | None = None
        self._seconds = 0.0

    @property
    def root(self) -> Path:
        """The copy's folder."""
        return self._copy.root

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._copy.__enter__)
        await asyncio.to_thread(self._copy.compile)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), 10.0)
            except TimeoutError:
                # in the middle of a trial, which is a session of its own
                end(self._process.pid)
                await self._process.wait()
        await asyncio.to_thread(self._copy.__exit__, kind, error, trace)

    async def check(self, tests: Sequence[str], seconds: Mapping[str, float]) -> None:
        """Raises RuntimeError when tests that passed fail here with nothing changed."""
        why, test = await self._run(tests, seconds, again=True)
        if why:
            log = self._copy.root.with_name("log").read_text(errors="replace")
            raise RuntimeError(f"{test or tests[0]} {why} in a copy with nothing changed:\n{log[-2000:]}")

    async def judge(self, change: Change, rounds: Sequence[Sequence[str]], seconds: Mapping[str, float]) -> Verdict:
        """Runs the tests in this order until one notices the change: it must fail twice, and pass without it.

        rounds: tests that are collected together. seconds: how long each test takes when nothing is changed.
        """
        tried = sum(len(tests) for tests in rounds)
        file = self._copy.root / change.path
        source = file.read_bytes()
        changed = change.applied(source)
        self._seconds = 0.0
        try:
            for tests in rounds:
                left = list(tests)
                while left:
                    file.write_bytes(changed)
                    why, test = await self._run(left, seconds)
                    if why == "breaks":
                        return Verdict(change, "import", why, tried, self._seconds)
                    if test is None:
                        break
                    again, _ = await self._run([test], seconds, again=True)
                    file.write_bytes(source)
                    if again and not (await self._run([test], seconds, again=True))[0]:
                        return Verdict(change, test, again, tried, self._seconds)
                    left = left[left.index(test) + 1 :] if test in left else []
            return Verdict(change, tried=tried, seconds=self._seconds)
        finally:
            file.write_bytes(source)

    async def _run(
        self, tests: Sequence[str], seconds: Mapping[str, float], *, again: bool = False
    ) -> tuple[str, str | None]:
        """What became of them: nothing, or why and where it ended."""
        process = await self._warm()
        assert process.stdin is not None
        asked = {"tests": list(tests), "log": str(self._copy.root.with_name("log"))}
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        pid, running, limit = 0, None, _START
        why: str = ""
        where: str | None = None
        while True:
            try:
                told: dict[str, Any] = await asyncio.wait_for(self._line(process), limit)
            except TimeoutError:
                why, where = "hangs", running or tests[0]
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                limit = _START
                continue
            match told:
                case {"pid": int(number)}:
                    pid = number
                case {"starts": str(name)}:
                    running, limit = name, _PATIENCE[again] + _TIMES[again] * seconds.get(name, 1.0)
                case {"fails": str(name)} if not why:
                    why, where = "fails", name
                    limit = _START
                case {"ends": int(status), "seconds": int() | float() as took}:
                    self._seconds += took
                    await asyncio.to_thread(self._copy.tidy)
                    if not why and status != 0:
                        why, where = ("fails", running) if running else ("breaks", None)
                    return why, where

    async def _warm(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mutants.warm"),
                cwd=self._copy.root,
                env=self._copy.environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=2**20,
            )
        return self._process

    async def _line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs the tests has ended with status {await process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told
