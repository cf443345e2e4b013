"""Thinking and answer text on its way into the journal: an answer's first piece at once and by itself, so that it waits
behind nobody's, then all answers of a replica together, once every 20 ms at most. Each write wakes Redis and every
gateway, however much is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from shared.records.journal import EntryType, Items, Sent

INTERVAL = 0.02


class Writer(Protocol):
    """A journal's; see JournalWriter."""

    def send(self, items: Items) -> Sent: ...

    async def confirm(self, sent: Sent) -> None: ...


class Beat:
    """When the answers of a replica write, all of them in one loop tick."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self._last = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def begun(self) -> None:
        """Somebody writes now; where nothing waits for the next beat, that is a whole interval later."""
        if self._timer is None:
            self._last = asyncio.get_running_loop().time()

    def next(self, write: Callable[[], None]) -> None:
        """Has something written with the next beat."""
        self._due.append(write)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._last + INTERVAL), self._strike)

    def _strike(self) -> None:
        self._last = asyncio.get_running_loop().time()
        self._timer = None
        due, self._due = self._due, []
        for write in due:
            write()


class DeltaPump:
    """Collects text between two writes, of which one is under way at a time. Nobody waits for them: whoever adds looks
    whether the journal has `refused` one, and writes the `rest`.

    extra: fields of every entry (persona and round in a committee).
    """

    def __init__(self, writer: Writer, extra: dict[str, Any], beat: Beat) -> None:
        self._writer = writer
        self._extra = extra
        self._beat = beat
        self._pieces: list[tuple[EntryType, list[str]]] = []
        self._sent: Sent | None = None
        self._begun = self.refused = False

    def add(self, kind: EntryType, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            self._pieces[-1][1].append(text)
            return
        self._pieces.append((kind, [text]))
        if not self._begun:
            self._begun = True
            self._beat.begun()
            self._send()
        elif self._sent is None and len(self._pieces) == 1:
            self._beat.next(self._send)

    def _send(self) -> None:
        if self._sent is None and (items := self.rest()):
            self._sent = sent = self._writer.send(items)
            sent.replies.add_done_callback(lambda _: self._answered(sent))

    def _answered(self, sent: Sent) -> None:
        self.refused = not sent.written
        if not self.refused:
            self._go_on()

    def _go_on(self) -> None:
        self._sent = None
        if self._pieces:
            self._beat.next(self._send)

    async def settle(self) -> None:
        """Returns when what was sent is written. Raises what the journal raises."""
        if self._sent is not None:
            await self._writer.confirm(self._sent)
            self.refused = False
            self._go_on()

    def rest(self) -> Items:
        """What has not been sent, and is not sent any more."""
        pieces, self._pieces = self._pieces, []
        return [(kind, {"text": "".join(texts), **self._extra}) for kind, texts in pieces]
