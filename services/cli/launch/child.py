"""One supervised process: started, its lines passed on, started again when it dies, stopped by its id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.cli.launch.parent_death_pipe import ParentDeathPipe

LINE_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between starts: they double up to `longest`; a process that lived for `good` begins anew."""

    first: float = 0.2
    longest: float = 10.0
    good: float = 10.0

    def after(self, failures: int) -> float:
        return min(self.first * 2.0 ** min(max(0, failures - 1), 30), self.longest)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `env` is added to this process's environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """on_line: every line of its stderr, and of its stdout unless `on_output` takes those.
    on_end: called with the exit status whenever it ends although nobody stopped it.
    """

    def __init__(
        self,
        spec: ChildSpec,
        pipe: ParentDeathPipe,
        on_line: Callable[[str], None],
        *,
        backoff: Backoff | None = None,
        on_output: Callable[[str], None] | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        self.spec = spec
        self.starts = 0
        self.failures = 0
        self._pipe = pipe
        self._on_line = on_line
        self._on_output = on_output or on_line
        self._on_end = on_end or (lambda _status: None)
        self._backoff = backoff or Backoff()
        self._process: asyncio.subprocess.Process | None = None
        self._grace = 0.0
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        """Keeps the process running until `stop`."""
        try:
            await self._keep_running()
        finally:
            self._ended.set()

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            status = await self._once()
            if self._stopping.is_set():
                return
            self.failures = 1 if loop.time() - began >= self._backoff.good else self.failures + 1
            pause = self._backoff.after(self.failures)
            self._on_end(status)
            self._on_line(f"ended with {described(status)}; starting again in {pause:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _once(self) -> int:
        """One life of the process. Returns its exit status, 127 when it could not be started."""
        spec = self.spec
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                env={**os.environ, **spec.env, **self._pipe.env},
                pass_fds=self._pipe.fds,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                # Ctrl-C reaches the supervisor alone, which then stops the others in its own order.
                start_new_session=True,
                limit=LINE_LIMIT,
            )
        except OSError as exc:
            self._on_line(f"cannot be started: {exc}")
            return 127
        self._process = process
        self.starts += 1
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.create_task(_pump(process.stdout, self._on_output)),
            asyncio.create_task(_pump(process.stderr, self._on_line)),
        ]
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            await self._end(process, ended)
        status = await ended
        # A grandchild may hold the pipes open: the process's own last words are there by now.
        await asyncio.wait(pumps, timeout=1.0)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, stopping, return_exceptions=True)
        return status

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        _signal(process, signal.SIGTERM)
        await asyncio.wait({ended}, timeout=self._grace)
        if not ended.done():
            self._on_line(f"did not stop within {self._grace:g} s; killed")
            _signal(process, signal.SIGKILL)

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds. Returns when the process is gone; `run` returns by it."""
        self._grace = grace
        self._stopping.set()
        await self._ended.wait()


def described(status: int) -> str:
    """An exit status for people: a signal by its name."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _pump(reader: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            # A line beyond the limit; the reader has dropped it and goes on.
            on_line("[a line longer than 1 MB was left out]")
            continue
        if not line:
            return
        on_line(line.decode(errors="replace").rstrip("\r\n"))
