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

# While one of them is at a heavy page, the other goes on.
PROCESSES = 2
# The memory of a process that has read so much, or so often, is in pieces.
LARGE_BYTES, MANY_PAGES = 500_000, 500
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
        # The last one used comes first: what is never needed is never started.
        self._places: asyncio.LifoQueue[_Child | None] = asyncio.LifoQueue()
        for _ in range(PROCESSES):
            self._places.put_nowait(None)

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
        for plain in (False, True):
            try:
                return Reading(**await self._ask({**request, "plain": plain}, page.data))
            except _Died:
                log.warning("page.too_heavy", url=str(page.url), bytes=len(page.data), plain=plain)
        raise FetchError("the page takes more time or memory than a page may")

    async def _ask(self, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        child = await self._places.get()
        kept: _Child | None = None
        try:
            child = child or await _Child.start()
            answer = await child.ask(request, data)
            if len(data) <= LARGE_BYTES and child.pages < MANY_PAGES:
                kept = child
            return answer
        finally:
            try:
                if child and not kept:
                    await child.end()
            finally:
                self._places.put_nowait(kept)

    async def close(self) -> None:
        """Ends the processes; those that are at a page are ended by whoever waits for it."""
        while not self._places.empty():
            if child := self._places.get_nowait():
                await child.end()


@asynccontextmanager
async def open_reader() -> AsyncIterator[Reader]:
    reader = Reader()
    try:
        yield reader
    finally:
        await reader.close()
