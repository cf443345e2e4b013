"""The live tail of bus subjects, for operators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

from services.gateway.queries.sse import KEEP_ALIVE, frame
from shared.bus import START, Bus, Entry, ReplyError, order
from shared.bus.keys import stream_key
from shared.bus.streams import drop_poisoned_ids, entries
from shared.telemetry.logging import get_logger

log = get_logger()

# New tools bring new subjects.
_RESCAN_SECONDS = 2.0
# Seconds between two looks when there was nothing, entries of a subject that one takes, and bytes that leave together.
_LOOK = 0.25
_PAGE = 32
_CHUNK = 65_536

_Placed = tuple[tuple[int, int], str, Entry]


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
    """Looks at every subject that matches, those that appear later included."""

    def __init__(self, bus: Bus, patterns: Sequence[str], last: int) -> None:
        self._bus = bus
        self._patterns = patterns
        self._last = last

    async def events(self, keepalive: float) -> AsyncGenerator[bytes, None]:
        now = asyncio.get_running_loop().time
        # the last entry of each subject that was there, or has been told
        told = {subject: await self._bus.newest(stream_key(subject)) for subject in await self._subjects()}
        # what came since then is looked for below: nothing falls between the two, and nothing comes twice
        for at, subject, entry in await self._recent():
            if at <= order(told.get(subject, START)):
                yield event(subject, entry)
        # whatever is published from now on is told: who asks something next misses nothing of it
        yield KEEP_ALIVE
        rescan, alive = now(), now() + keepalive
        while True:
            found, chunk = list[_Placed](), b""
            # while Redis is away there is silence, and no end
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(keepalive):
                    if now() >= rescan:
                        # a subject that appears later is new as a whole
                        told = dict.fromkeys(await self._subjects(), START) | told
                        rescan = now() + _RESCAN_SECONDS
                    found = await self._new(told)
            for _, subject, entry in found:
                try:
                    chunk += event(subject, entry)
                except Exception:
                    # a bug that one entry strikes must not end the tail
                    log.exception("tap.entry_failed", subject=subject, entry_id=entry[0])
                if len(chunk) >= _CHUNK:
                    yield chunk
                    chunk = b""
            if found:
                alive = now() + keepalive
            elif now() >= alive:
                chunk, alive = KEEP_ALIVE, now() + keepalive
            if chunk:
                yield chunk
            if not found:
                await asyncio.sleep(min(_LOOK, keepalive))

    async def _subjects(self) -> list[str]:
        try:
            return [s.name for s in await self._bus.subjects() if matches(s.name, self._patterns)]
        except ReplyError:
            # the list of tools is none just now; the next look finds it mended
            return []

    async def _recent(self) -> list[_Placed]:
        """The last entries over all subjects, in the order of their ids."""
        found: list[_Placed] = []
        if self._last:
            for subject in await self._subjects():
                # a key that is no stream has no entries
                with contextlib.suppress(ReplyError):
                    latest = await self._bus.latest(stream_key(subject), self._last)
                    found += [(order(entry[0]), subject, entry) for entry in latest]
        return sorted(found)[-self._last :]

    async def _new(self, told: dict[str, str]) -> list[_Placed]:
        """The next entries of each subject, in the order of their ids; they are noted as told."""
        reads = [("XRANGE", stream_key(subject), f"({after}", "+", "COUNT", _PAGE) for subject, after in told.items()]
        found: list[_Placed] = []
        for subject, reply in zip(list(told), await self._bus.link.pipe_raw(reads), strict=True):
            if not isinstance(reply, ReplyError) and (new := drop_poisoned_ids(entries(reply))):
                told[subject] = new[-1][0]
                found += [(order(entry[0]), subject, entry) for entry in new]
        return sorted(found)
