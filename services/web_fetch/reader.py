"""Reads pages in processes of their own, which are kept warm, and killed when a page takes more than it may."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.web_fetch.child import LENGTH, frame
from services.web_fetch.errors import FetchError
from services.web_fetch.page import Page
from shared.telemetry.logging import get_logger

log = get_logger()

PROCESSES = 2
# A page with more of either may take seconds.
LARGE_BYTES, LARGE_TAGS = 500_000, 10_000
# The memory of a process that has read so many pages, or a large one, is in pieces.
MANY_PAGES = 500
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of a page's text: `after` is where the next one begins, `cut` says that the page was longer than read."""

    title: str
    text: str
    chars: int
    after: int
    cut: bool


class _Died(Exception):
    """The process did not survive the page."""


class _Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pages = 0

    @classmethod
    async def start(cls) -> _Child:
        # A page that takes the process over finds no address and no password in its environment.
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-B", "-m", "services.web_fetch.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        )

    async def ask(self, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Raises _Died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.pages += 1
        try:
            self.process.stdin.write(frame(request, data))
            await self.process.stdin.drain()
            (length,) = LENGTH.unpack(await self.process.stdout.readexactly(LENGTH.size))
            answer: dict[str, Any] = json.loads(await self.process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise _Died from exc
        return answer

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Reader:
    """A fixed number of places, each with a warm process or none yet."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PROCESSES)
        self._idle: list[_Child] = []
        self._alive = 0
        # Of large pages one is read at a time: for the others there is always a place.
        self._large = asyncio.Lock()

    async def read(self, page: Page, offset: int, max_chars: int) -> Reading:
        """A page that is too much for the extractor is read once more, without parsing it. Raises FetchError."""
        request = {
            "size": len(page.data),
            "declared": page.declared,
            "content_type": page.content_type,
            "cut": page.cut,
            "offset": offset,
            "max_chars": max_chars,
        }
        large = len(page.data) > LARGE_BYTES or page.data.count(b"<") > LARGE_TAGS
        async with self._large if large else contextlib.nullcontext():
            for plain in (False, True):
                try:
                    return Reading(**await self._ask({**request, "plain": plain}, page.data, large=large))
                except _Died:
                    log.warning("page.too_heavy", url=str(page.url), bytes=len(page.data), plain=plain)
        raise FetchError("the page takes more time or memory than a page may")

    async def _ask(self, request: dict[str, Any], data: bytes, *, large: bool) -> dict[str, Any]:
        async with self._places:
            # A large page is its process's last one: it leaves the warm process to the others where it can.
            warm = bool(self._idle) and (not large or self._alive >= PROCESSES)
            child = self._idle.pop() if warm else await self._start()
            keep = False
            try:
                answer = await child.ask(request, data)
                keep = not large and child.pages < MANY_PAGES
            finally:
                if keep:
                    self._idle.append(child)
                else:
                    await self._end(child)
            return answer

    async def _start(self) -> _Child:
        self._alive += 1
        try:
            return await _Child.start()
        except BaseException:
            self._alive -= 1
            raise

    async def _end(self, child: _Child) -> None:
        self._alive -= 1
        await child.end()

    async def close(self) -> None:
        """Ends the processes; those that are at a page are ended by whoever waits for it."""
        while self._idle:
            await self._end(self._idle.pop())


@asynccontextmanager
async def open_reader() -> AsyncIterator[Reader]:
    reader = Reader()
    try:
        yield reader
    finally:
        await reader.close()
