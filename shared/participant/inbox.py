"""The inbox of a replica: a stream that only it reads, with answers to its requests and notifications."""

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

# The writer of an answer of this size (bytes) or more trims the inbox: to more entries than a replica ever has calls in
# progress, and to a number of bytes. Smaller answers need no limit: removing a second's worth takes Redis 1 ms.
_LARGE_BYTES = 1_000
_MAX_LENGTH = 1_000
_MAX_BYTES = 32_000_000
_PAGE = 200
# Seconds until the next read when the key is not a stream, or when entries were dropped.
_PAUSE_S = 2.0
_SHORT_PAUSE_S = 0.1


def inbox_bound(size: int) -> Command:
    """Return the arguments of an XADD that trim an inbox when an answer of this size (bytes) is added.

    A replica removes the entries that it has read with its next heartbeat. A caller finds trimmed answers in their
    result keys.
    """
    return () if size < _LARGE_BYTES else ("MAXLEN", "~", max(1, min(_MAX_LENGTH, _MAX_BYTES // size)))


# Called with an entry's id and fields.
Notify = Callable[[str, Mapping[bytes, bytes]], None]
# late: no caller waits for the answer. token: the entry has the wrong token. malformed: the entry cannot be decoded.
# unknown: the entry's type has no handler.
Ignored = Literal["late", "token", "malformed", "unknown"]


def ignored(reason: Ignored) -> None:
    """Count an ignored entry."""
    if (meter := metrics.meter()) is not None:
        meter.inbox_ignored(reason)


class Inbox:
    """Dispatches inbox entries to handlers by `type`. Unknown entries are counted and ignored."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        # the id of the last entry that was read
        self.read = START
        # The owner writes the first entry, which creates the stream.
        self._notify: dict[bytes, Notify] = {b"started": lambda _id, _raw: None}

    def on(self, kind: str, notify: Notify) -> None:
        """Call `notify` for entries whose `type` is `kind`."""
        self._notify[kind.encode()] = notify

    async def run(self, bus: Bus) -> None:
        """Read until cancelled."""
        async with bus.dedicated("inbox") as connection:
            while True:
                read = ("XREAD", "COUNT", _PAGE, "BLOCK", int(bus.block * 1000), "STREAMS", self.stream, self.read)
                try:
                    reply = await connection.call(*read, retry=False, block=bus.block)
                except ConnectionLost:
                    continue
                except ReplyError as exc:
                    log.error("inbox.unreadable", error=str(exc))
                    await asyncio.sleep(_PAUSE_S)
                    continue
                found = entries(reply[0][1]) if reply else []
                readable = drop_poisoned_ids(found)
                for entry_id, fields in readable:
                    self._take(entry_id, fields)
                if readable is not found:
                    # The next heartbeat repairs the stream (`Bus.reset_exhausted_ids`).
                    await asyncio.sleep(_SHORT_PAUSE_S)

    def _take(self, entry_id: str, fields: list[bytes]) -> None:
        self.read = entry_id
        parts = iter(fields)
        raw = dict(zip(parts, parts))  # noqa: B905 (Redis gives pairs)
        notify = self._notify.get(raw.get(b"type", b""))
        if notify is None:
            ignored("unknown")
            kind = raw.get(b"type", b"")
            not_understood(self.stream, entry_id, "no handler for entries of its type", kind)
            return
        try:
            notify(entry_id, raw)
        except Exception:
            # Any writer of the inbox may write malformed entries.
            ignored("malformed")
            log.exception("inbox.malformed", entry_id=entry_id)
