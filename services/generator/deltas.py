"""Thinking and answer text on its way into the journal.

The first piece of an answer is written at once and alone, so that it waits for no other write. Later pieces of all
answers of a replica are written together, at most once in 20 ms: each write wakes Redis and every gateway, whatever its
size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from shared.records.events import AnswerPiece, ThinkingPiece
from shared.records.journal import Events, Sent

# The model of a piece's entry.
Kind = type[ThinkingPiece] | type[AnswerPiece]

INTERVAL = 0.02


class Writer(Protocol):
    """The writer of a journal; see JournalWriter."""

    def send(self, events: Events) -> Sent: ...

    async def confirm(self, sent: Sent) -> None: ...


class FlushTimer:
    """Call the writes of all answers of a replica in one loop tick, at most once per interval."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self._last = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Begin a new interval now, unless a write is due already."""
        if self._timer is None:
            self._last = asyncio.get_running_loop().time()

    def schedule(self, write: Callable[[], None]) -> None:
        """Call `write` at the next tick."""
        self._due.append(write)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._last + INTERVAL), self._tick)

    def _tick(self) -> None:
        self._last = asyncio.get_running_loop().time()
        self._timer = None
        due, self._due = self._due, []
        for write in due:
            write()


class DeltaPump:
    """Collect text between two writes. One write is in flight at a time.

    The caller of `add` waits for no write: it checks `refused`, calls `settle` for the error, and writes what `drain`
    returns. extra: fields of every entry (persona and round in a committee).
    """

    def __init__(self, writer: Writer, extra: dict[str, Any], timer: FlushTimer) -> None:
        self._writer = writer
        self._extra = extra
        self._timer = timer
        self._pieces: list[tuple[Kind, list[str]]] = []
        self._sent: Sent | None = None
        self._begun = self.refused = False

    def add(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            self._pieces[-1][1].append(text)
            return
        self._pieces.append((kind, [text]))
        if not self._begun:
            self._begun = True
            self._timer.restart()
            self._send()
        elif self._sent is None and len(self._pieces) == 1:
            self._timer.schedule(self._send)

    def _send(self) -> None:
        if self._sent is None and (events := self.drain()):
            self._sent = sent = self._writer.send(events)
            sent.replies.add_done_callback(lambda _: self._confirmed(sent))

    def _confirmed(self, sent: Sent) -> None:
        self.refused = not sent.written
        if not self.refused:
            self._resume()

    def _resume(self) -> None:
        self._sent = None
        if self._pieces:
            self._timer.schedule(self._send)

    async def settle(self) -> None:
        """Wait until the write in flight is confirmed. Raises the journal's errors."""
        if self._sent is not None:
            await self._writer.confirm(self._sent)
            self.refused = False
            self._resume()

    def drain(self) -> Events:
        """Return the entries that have not been sent; they are not sent later."""
        pieces, self._pieces = self._pieces, []
        return [kind(text="".join(texts), **self._extra) for kind, texts in pieces]
