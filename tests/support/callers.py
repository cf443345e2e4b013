"""A client as a careful program is one: an Idempotency-Key, another gateway after an error, Last-Event-ID."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

import httpx
from support.stack import order, shown

from shared.records.journal import TERMINAL, EntryType, JournalEntry

_BUSY = frozenset({429, 500, 502, 503, 504})
_PAUSE = 0.1


@dataclass
class Asked:
    """A question and what came of it. `entries` are the events in the order they were received."""

    text: str
    session: str
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    query_id: str | None = None
    entries: list[JournalEntry] = field(default_factory=list)
    reconnects: int = 0
    refused: str = ""

    @property
    def end(self) -> JournalEntry | None:
        return self.entries[-1] if self.entries and self.entries[-1].type in TERMINAL else None

    @property
    def answer(self) -> str | None:
        """The final answer; None when the query did not complete."""
        end = self.end
        return str(end.value()["answer"]) if end is not None and end.type is EntryType.COMPLETED else None

    @property
    def text_shown(self) -> str:
        """What a person has read of it."""
        return shown(self.entries)

    @property
    def in_order(self) -> bool:
        ids = [order(entry.id) for entry in self.entries]
        return all(first < second for first, second in pairwise(ids))


class Caller:
    """Asks at any of several gateways. `alive` seconds without a byte are a broken connection."""

    def __init__(self, urls: Sequence[str], key: str, *, alive: float = 5.0) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(alive, pool=None)
        headers = {"Authorization": f"Bearer {key}"}
        self._clients = [
            httpx.AsyncClient(
                base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False, verify=False
            )
            for url in urls
        ]
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._clients:
            await one.aclose()

    def _next(self) -> httpx.AsyncClient:
        self._turn += 1
        return self._clients[self._turn % len(self._clients)]

    async def ask(self, text: str, session: str, *, deadline: float, patience: float = 30.0) -> Asked:
        """The query as far as it came within its deadline (in seconds) and some patience."""
        asked = Asked(text, session)
        until = time.monotonic() + deadline + patience
        while asked.end is None and not asked.refused and time.monotonic() < until:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    await self._listen(asked, deadline)
            except (httpx.HTTPError, TimeoutError):
                asked.reconnects += 1
            if asked.end is None and not asked.refused:
                await asyncio.sleep(_PAUSE)
        return asked

    async def _listen(self, asked: Asked, deadline: float) -> None:
        """Reads one stream to its end, or until it breaks."""
        http = self._next()
        if asked.query_id is None:
            body = {"query": asked.text, "session_id": asked.session, "deadline_seconds": deadline}
            headers = {"Accept": "text/event-stream", "Idempotency-Key": asked.key}
            stream = http.stream("POST", "/query", json=body, headers=headers)
        else:
            headers = {"Last-Event-ID": asked.entries[-1].id} if asked.entries else {}
            stream = http.stream("GET", f"/queries/{asked.query_id}/events", headers=headers)
        async with stream as answer:
            if answer.status_code in _BUSY:
                asked.reconnects += 1
                return
            if answer.status_code != 200:
                asked.refused = f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:200]}"
                return
            asked.query_id = answer.headers["X-Query-Id"]
            async for entry in _events(answer):
                asked.entries.append(entry)

    async def get(self, path: str, until: float) -> httpx.Response:
        """A successful or final answer of any gateway."""
        return await self._once("GET", path, until)

    async def delete(self, path: str, until: float) -> httpx.Response:
        return await self._once("DELETE", path, until)

    async def _once(self, method: str, path: str, until: float) -> httpx.Response:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._next().request(method, path)
                if answer.status_code not in _BUSY:
                    return answer
            assert time.monotonic() < until, f"{method} {path} was not answered in time"
            await asyncio.sleep(_PAUSE)


async def _events(answer: httpx.Response) -> AsyncIterator[JournalEntry]:
    """The complete events of a stream; one that was cut off is not among them."""
    buffer = b""
    async for chunk in answer.aiter_bytes():
        *whole, buffer = (buffer + chunk).split(b"\n\n")
        for block in whole:
            if block.startswith(b":"):
                continue
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
            yield JournalEntry(fields[b"id"].decode(), EntryType(fields[b"event"].decode()), 0, fields[b"data"])
