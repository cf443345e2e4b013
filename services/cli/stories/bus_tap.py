"""What is published on the bus while a story runs, read from the gateway's live tail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import httpx

from services.cli.api import Api, ApiError
from services.cli.sse import Parser, lines

# Earlier messages come first, so that nothing is missed between the opening and the first query.
_LAST = 200
_IDLE = httpx.Timeout(60.0, connect=5.0)


class BusTap:
    """Open it before the query: a work stream forgets messages as soon as everybody has handled them."""

    def __init__(self, api: Api, subjects: Sequence[str]) -> None:
        self._api = api
        self._subjects = list(subjects)
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self._changed = asyncio.Condition()
        self._opened = asyncio.Event()
        self._failed: ApiError | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        await self._opened.wait()
        if self._failed is not None:
            await self._reading
            raise self._failed
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def about(self, subject: str, query_id: str) -> list[dict[str, Any]]:
        """The payloads of a subject that belong to a query, in the order they came."""
        payloads = [payload for (name, _), payload in self._found.items() if name == subject]
        return [p for p in payloads if query_id in (p.get("query_id"), p.get("original_query_id"))]

    async def wait_for(self, fact: Callable[[], bool], within: float) -> bool:
        """Whether the fact came true in time; it is looked at after every message."""
        try:
            async with asyncio.timeout(within), self._changed:
                await self._changed.wait_for(fact)
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        try:
            while True:
                try:
                    await self._once()
                except httpx.HTTPError:
                    # The gateway may be started again at any moment; the story goes on, and so does its tap.
                    await asyncio.sleep(0.2)
        except ApiError as exc:
            self._failed = exc
        finally:
            self._opened.set()

    async def _once(self) -> None:
        http = self._api.http
        params = httpx.QueryParams({"subject": self._subjects, "last": _LAST})
        async with http.stream("GET", "/bus/events", params=params, timeout=_IDLE) as response:
            if not response.is_success:
                await response.aread()
                raise self._api.refusal(response)
            self._opened.set()
            parser = Parser()
            async with aclosing(lines(response)) as following:
                async for line in following:
                    event = parser.feed(line)
                    if event is None or not isinstance(event.data.get("payload"), dict):
                        continue
                    async with self._changed:
                        self._found.setdefault((event.type, event.id), event.data["payload"])
                        self._changed.notify_all()
