"""Thinking and answer text on its way into the journal: the first piece at once, then one write per tick of 20 ms.

All answers of a replica share the tick, so that what they have to say leaves in one write.
"""

from __future__ import annotations

import asyncio
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
        self._wake = asyncio.Event()
        self._begun = self._due = self._finished = False

    def add(self, kind: EntryType, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            self._pieces[-1][1].append(text)
        else:
            self._pieces.append((kind, [text]))
        if self._due:
            return
        self._due = True
        if self._begun:
            loop = asyncio.get_running_loop()
            loop.call_later(INTERVAL - loop.time() % INTERVAL, self._wake.set)
        else:
            self._begun = True
            self._wake.set()

    def finish(self) -> None:
        self._finished = True
        self._wake.set()

    async def run(self) -> None:
        """Writes until `finish` was called and nothing is left. Raises what the journal raises."""
        while self._pieces or not self._finished:
            await self._wake.wait()
            self._wake.clear()
            self._due = False
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                await self._write([(kind, {"text": "".join(texts), **self._extra}) for kind, texts in pieces])
