"""The stream that only this replica reads: answers to what it asked, and who wakes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shared.bus import Tail
from shared.telemetry.logging import get_logger

log = get_logger()

# More than a replica ever has calls under way: what it has read is of no use to anybody.
INBOX_LENGTH = 1_000

Notify = Callable[[Mapping[bytes, bytes]], None]


class Inbox:
    """Hands each entry to whoever asked for its `type`. Whatever else stands in it harms nobody."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._notify: dict[bytes, Notify] = {}

    def on(self, kind: str, notify: Notify) -> None:
        """Entries whose `type` is `kind` go to `notify`."""
        self._notify[kind.encode()] = notify

    async def run(self, tail: Tail) -> None:
        """Reads until cancelled."""
        follower = tail.follow(self.stream)
        while True:
            for entry_id, fields in await follower.next():
                raw = dict(zip(fields[::2], fields[1::2], strict=True))
                notify = self._notify.get(raw.get(b"type", b""))
                if notify is None:
                    continue
                try:
                    notify(raw)
                except Exception:
                    # anybody who may answer may also write nonsense
                    log.exception("inbox.malformed", entry_id=entry_id)
