"""Journal entries as server-sent events, one to one: `event` = entry type, `id` = entry id, `data` as written.

The path of an event is kept short: no JSON is parsed, and the entries of one read leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.http.gateway import Gateway
from shared.bus import Entry, Follower, order
from shared.records.journal import TERMINAL, EntryType, read_end

KEEP_ALIVE = b": keep-alive\n\n"
_TERMINAL = frozenset(kind.value.encode() for kind in TERMINAL)
_CRITIQUE = EntryType.CRITIQUE.value.encode()
# Seconds to read existing entries after the time to wait for new ones has ended.
_READING = 1.0


def frame(kind: bytes, entry_id: str, data: bytes) -> bytes:
    """Return an entry as one server-sent event."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.splitlines())
    if b"\n" in kind or b"\r" in kind:
        kind = b"unknown"
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (entry_id.encode(), kind, data)


def parts(entry: Entry) -> tuple[bytes, bytes]:
    """Return an entry's type and data."""
    fields = entry[1]
    # Our writers use this order of fields.
    if fields[0] == b"type" and fields[-2] == b"data":
        return fields[1], fields[-1]
    raw = dict(zip(fields[::2], fields[1::2], strict=False))
    return raw.get(b"type", b"unknown"), raw.get(b"data", b"{}")


@dataclass(frozen=True, slots=True)
class Ending:
    """When a journal's stream ends.

    until: loop time of the query's deadline, with some grace for its last entry. It limits the waiting: entries that
        exist then are still sent, also to a client that returns later.
    answered: the terminal entry is before the stream's start.
    follow: continue after the terminal entry, at most `follow_seconds`, until the critique.
    """

    until: float
    follow: bool
    follow_seconds: float
    answered: bool


async def heard(follower: Follower, until: float, pause: float) -> list[Entry] | None:
    """Return the next entries; none after a silence of `pause` seconds.

    Returns None when the loop's time `until` has passed and no page is being read.
    """
    left = until - asyncio.get_running_loop().time()
    found = await follower.next(min(pause, left if left > 0 else _READING))
    return None if not found and left <= 0 and not follower.reading else found


# Returns whether the query was deleted, so that no entry will come; called after a silence.
Lost = Callable[[], Awaitable[bool]]


async def journal_events(
    follower: Follower, ending: Ending, keepalive: float, lost: Lost
) -> AsyncGenerator[bytes, None]:
    """Yield the events of one journal. The follower is closed at the end."""
    now = asyncio.get_running_loop().time
    until = now() + ending.follow_seconds if ending.answered else ending.until
    try:
        while (found := await heard(follower, until, keepalive)) is not None:
            if not found:
                if await lost():
                    return
                yield KEEP_ALIVE
                continue
            out = []
            done = False
            for entry in found:
                kind, data = parts(entry)
                out.append(frame(kind, entry[0], data))
                if kind in _TERMINAL:
                    done = not ending.follow
                    until = now() + ending.follow_seconds
                elif kind == _CRITIQUE:
                    done = True
                if done:
                    break
            yield b"".join(out)
            if done:
                return
    finally:
        follower.close()


async def ended(follower: Follower, until: float, pause: float, lost: Lost) -> bool:
    """Wait for the terminal entry; return False when it does not come in time. The follower is closed at the end.

    pause: seconds of silence after which `lost` is called.
    """
    try:
        while (found := await heard(follower, until, pause)) is not None:
            if not found and await lost():
                return False
            if any(parts(entry)[0] in _TERMINAL for entry in found):
                return True
        return False
    finally:
        follower.close()


async def ended_at(gateway: Gateway, key: str) -> tuple[str, str | None]:
    """Return the newest entry's id (`0-0` if there is none), and the terminal entry's id or None."""
    end = await read_end(gateway.bus, key)
    if not end:
        return "0-0", None
    return end[-1].id, end[0].id if end[0].type in TERMINAL else None


def is_before(first: str, second: str) -> bool:
    return order(first) < order(second)


class EventStream(Response):
    """Send the items of an iterator until it ends, the client disconnects or the gateway stops.

    A disconnect cancels no query. left: called when the client disconnected before the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        gateway: Gateway,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        left: Callable[[], None] | None = None,
    ) -> None:
        self._gateway = gateway
        self._events = events
        self._left = left
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def pump() -> bool:
            async with aclosing(self._events):
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            return True

        self._gateway.metrics.streams.inc()
        try:
            whole = await self._gateway.race(pump(), gone(receive))
            if whole is None and self._left is not None and not self._gateway.stopping:
                self._left()
        finally:
            self._gateway.metrics.streams.dec()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
