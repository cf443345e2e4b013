"""The stream that only this replica reads: answers to what it asked, and who wakes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

from shared.bus import START, Bus, Command, ConnectionLost, ReplyError
from shared.bus.streams import drop_poisoned_ids, entries
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger
from shared.telemetry.unread import not_understood

log = get_logger()

# Answers of this size (in bytes) and more are bounded by whoever writes them: to more than a replica ever has calls
# under way, and to so many bytes. Removing a second's worth of smaller ones takes Redis a millisecond.
_LARGE = 1_000
_LENGTH = 1_000
_BYTES = 32_000_000
_PAGE = 200
# One that is no stream is tried again after so long (seconds), and one whose next entry is left out.
_PAUSE = 2.0
_GLANCE = 0.1


def inbox_bound(size: int) -> Command:
    """The part of an XADD that bounds an inbox when an answer of this size is added.

    What a replica has read goes with its heartbeat, and meanwhile no more small answers come than it has asked for.
    What is lost by the bound is found where its worker has stored it.
    """
    return () if size < _LARGE else ("MAXLEN", "~", max(1, min(_LENGTH, _BYTES // size)))


# Is given an entry's id and fields.
Notify = Callable[[str, Mapping[bytes, bytes]], None]
# `late`: nobody waits for it any more. `token`: it does not come from the worker of that call. `malformed`: nobody can
# read it. `unknown`: nobody here asks for entries of its type.
Ignored = Literal["late", "token", "malformed", "unknown"]


def ignored(reason: Ignored) -> None:
    """Counts an entry that nothing comes of."""
    if (meter := metrics.meter()) is not None:
        meter.inbox_ignored(reason)


class Inbox:
    """Hands each entry to whoever asked for its `type`. Whatever else stands in it harms nobody."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        # the id of the last entry that was
        self.read = START
        # the first entry is its owner's: it makes the stream
        self._notify: dict[bytes, Notify] = {b"started": lambda _id, _raw: None}

    def on(self, kind: str, notify: Notify) -> None:
        """Entries whose `type` is `kind` go to `notify`."""
        self._notify[kind.encode()] = notify

    async def run(self, bus: Bus) -> None:
        """Reads until cancelled: one read waits for what comes."""
        async with bus.dedicated("inbox") as connection:
            while True:
                read = ("XREAD", "COUNT", _PAGE, "BLOCK", int(bus.block * 1000), "STREAMS", self.stream, self.read)
                try:
                    reply = await connection.call(*read, retry=False, block=bus.block)
                except ConnectionLost:
                    continue
                except ReplyError as exc:
                    log.error("inbox.unreadable", error=str(exc))
                    await asyncio.sleep(_PAUSE)
                    continue
                found = entries(reply[0][1]) if reply else []
                readable = drop_poisoned_ids(found)
                for entry_id, fields in readable:
                    self._take(entry_id, fields)
                if readable is not found:
                    # The next heartbeat repairs the stream (`Bus.reset_exhausted_ids`).
                    await asyncio.sleep(_GLANCE)

    def _take(self, entry_id: str, fields: list[bytes]) -> None:
        self.read = entry_id
        parts = iter(fields)
        raw = dict(zip(parts, parts))  # noqa: B905 (Redis gives pairs)
        notify = self._notify.get(raw.get(b"type", b""))
        if notify is None:
            ignored("unknown")
            kind = raw.get(b"type", b"")
            not_understood(self.stream, entry_id, "nobody here asks for entries of its type", kind)
            return
        try:
            notify(entry_id, raw)
        except Exception:
            # anybody who may answer may also write nonsense
            ignored("malformed")
            log.exception("inbox.malformed", entry_id=entry_id)
