"""Thinking and answer text on its way into the journal: an answer's first piece at once and by itself, so that it waits
behind nobody's, then all answers of a replica together, once every 20 ms at most. Each write wakes Redis and every
gateway, however much is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared.records.journal import EntryType

INTERVAL = 0.02

Write = Callable[[Sequence[tuple[EntryType, dict[str, Any]]]], Awaitable[None]]


class Beat:
    """When the answers of a replica write, all of them in one loop tick."""

    def __init__(self) -> None:
        self._due: list[asyncio.Event] = []
        self._last = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def at_once(self, event: asyncio.Event) -> None:
        """Sets an event now; where nothing waits for the next beat, that is a whole interval later."""
        event.set()
        if self._timer is None:
            self._last = asyncio.get_running_loop().time()

    def next(self, event: asyncio.Event) -> None:
        """Sets an event with the next beat."""
        self._due.append(event)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._last + INTERVAL), self._strike)

    def _strike(self) -> None:
        self._last = asyncio.get_running_loop().time()
        self._timer = None
        due, self._due = self._due, []
        for event in due:
            event.set()


class DeltaPump:
    """Collects text between two writes. Run `run` beside the reader; `finish` writes the rest.

    extra: fields of every entry (persona and round in a committee).
    """

    def __init__(self, write: Write, extra: dict[str, Any], beat: Beat) -> None:
        self._write = write
        self._extra = extra
        self._beat = beat
        self._pieces: list[tuple[EntryType, list[str]]] = []
        self._due = asyncio.Event()
        self._begun = self._finished = False

    def add(self, kind: EntryType, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            self._pieces[-1][1].append(text)
            return
        first = not self._pieces
        self._pieces.append((kind, [text]))
        if not self._begun:
            self._begun = True
            self._beat.at_once(self._due)
        elif first:
            self._beat.next(self._due)

    def finish(self) -> None:
        self._finished = True
        self._due.set()

    async def run(self) -> None:
        """Writes until `finish` was called and nothing is left. Raises what the journal raises."""
        while self._pieces or not self._finished:
            await self._due.wait()
            self._due.clear()
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                await self._write([(kind, {"text": "".join(texts), **self._extra}) for kind, texts in pieces])
            if self._finished:
                self._due.set()
