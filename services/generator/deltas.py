"""Thinking and answer text on its way into the journal: the first piece at once, then one write per 20 ms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared.records.journal import EntryType

INTERVAL = 0.02

Write = Callable[[Sequence[tuple[EntryType, dict[str, Any]]]], Awaitable[None]]


class DeltaPump:
    """Collects text while a write is under way. Run `run` beside the reader; `finish` writes the rest.

    extra: fields of every entry (persona and round in a committee).
    """

    def __init__(self, write: Write, extra: dict[str, Any]) -> None:
        self._write = write
        self._extra = extra
        self._pieces: list[tuple[EntryType, list[str]]] = []
        self._arrived = asyncio.Event()
        self._finished = asyncio.Event()

    def add(self, kind: EntryType, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            self._pieces[-1][1].append(text)
        else:
            self._pieces.append((kind, [text]))
        self._arrived.set()

    def finish(self) -> None:
        self._finished.set()
        self._arrived.set()

    async def run(self) -> None:
        """Writes until `finish` was called and nothing is left. Raises what the journal raises."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                await self._write([(kind, {"text": "".join(texts), **self._extra}) for kind, texts in pieces])
            if self._finished.is_set():
                if self._pieces:
                    self._arrived.set()
                    continue
                return
            await self._pause()

    async def _pause(self) -> None:
        """Up to the interval; the end of the stream cuts it short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL):
                await self._finished.wait()
