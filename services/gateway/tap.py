"""The live tail of bus subjects, for operators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from typing import Any

import orjson

from services.gateway.sse import KEEP_ALIVE, frame
from shared.bus import Bus, Entry, Follower, ReplyError, Tail, order
from shared.bus.keys import stream_key
from shared.participant.background import kept_up

# New tools bring new subjects.
_RESCAN_SECONDS = 2.0


def matches(subject: str, patterns: Sequence[str]) -> bool:
    """A pattern is a subject, or the beginning of one followed by `*`."""
    return any(subject.startswith(p[:-1]) if p.endswith("*") else subject == p for p in patterns)


def event(subject: str, entry: Entry) -> bytes:
    """One bus entry, whatever its form."""
    entry_id, fields = entry
    texts = [field.decode(errors="backslashreplace") for field in fields]
    shown: dict[str, Any] = dict(zip(texts[::2], texts[1::2], strict=False))
    # a payload that is not JSON, or nested deeper than can be written, is shown as text
    with contextlib.suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
        shown["payload"] = orjson.Fragment(orjson.dumps(orjson.loads(shown.get("payload", "null"))))
    return frame(subject.encode(), entry_id, orjson.dumps({**shown, "subject": subject, "entry_id": entry_id}))


class Tap:
    """Follows every subject that matches, those that appear later included."""

    def __init__(self, bus: Bus, tail: Tail, patterns: Sequence[str], last: int) -> None:
        self._bus = bus
        self._tail = tail
        self._patterns = patterns
        self._last = last
        # small: a slow operator slows the followers down, which cost no memory
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(100)

    async def events(self, keepalive: float) -> AsyncGenerator[bytes, None]:
        followers: list[Follower] = []
        pumps: list[asyncio.Task[None]] = []
        try:
            async for chunk in self._run(followers, pumps, keepalive):
                yield chunk
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for follower in followers:
                follower.close()

    async def _run(
        self, followers: list[Follower], pumps: list[asyncio.Task[None]], keepalive: float
    ) -> AsyncIterator[bytes]:
        now = asyncio.get_running_loop().time
        since = {subject: await self._bus.newest(stream_key(subject)) for subject in await self._subjects()}
        # what came since then is followed: nothing falls between the two, and nothing comes twice
        recent = [one for one in await self._recent() if one[0] <= order(since.get(one[1], "0-0"))]
        for _, subject, entry in recent:
            yield event(subject, entry)
        followed: set[str] = set()
        rescan, alive, first = now(), now() + keepalive, True
        while True:
            if now() >= rescan:
                for subject in list(since) if first else await self._subjects():
                    if subject not in followed:
                        followed.add(subject)
                        # a subject that appears later is new as a whole
                        follower = self._tail.follow(stream_key(subject), since.get(subject, "0-0"))
                        followers.append(follower)
                        pumps.append(asyncio.create_task(kept_up("tap", partial(self._pump, subject, follower))))
                rescan = now() + _RESCAN_SECONDS
            if first:
                # whatever is published from now on is told: who asks something next misses nothing of it
                first = False
                yield KEEP_ALIVE
            try:
                async with asyncio.timeout_at(min(rescan, alive)):
                    chunk = await self._queue.get()
            except TimeoutError:
                if now() >= alive:
                    alive = now() + keepalive
                    yield KEEP_ALIVE
                continue
            while not self._queue.empty() and len(chunk) < 65_536:
                chunk += self._queue.get_nowait()
            alive = now() + keepalive
            yield chunk

    async def _subjects(self) -> list[str]:
        try:
            return [s.name for s in await self._bus.subjects() if matches(s.name, self._patterns)]
        except ReplyError:
            # the list of tools is none just now; the next look finds it mended
            return []

    async def _recent(self) -> list[tuple[tuple[int, int], str, Entry]]:
        """The last entries over all subjects, in the order of their ids."""
        found: list[tuple[tuple[int, int], str, Entry]] = []
        if self._last:
            for subject in await self._subjects():
                # a key that is no stream has no entries
                with contextlib.suppress(ReplyError):
                    entries = await self._bus.latest(stream_key(subject), self._last)
                    found += [(order(entry[0]), subject, entry) for entry in entries]
        return sorted(found)[-self._last :]

    async def _pump(self, subject: str, follower: Follower) -> None:
        while True:
            for entry in await follower.next():
                await self._queue.put(event(subject, entry))
