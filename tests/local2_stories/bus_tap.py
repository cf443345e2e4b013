"""What is published on the bus while a story runs, read from the gateway's live tail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from services.cli.api import Api, ApiError
from services.cli.sse import Event, Parser, lines

# After a lost connection what was published meanwhile comes first.
_LAST = 500
_IDLE = httpx.Timeout(60.0, connect=5.0)
# What is published in the same millisecond is in this order, by the beginning of its subject.
_ORDER = (
    "query.received", "agent.transition", "tool.request", "tool.result", "query.cancel", "response.generation",
    "answer.dialog", "critique.result", "pairwise.result", "reward.event",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A message that was seen on the bus; `entry_id` is that of its entry in the subject's stream."""

    subject: str
    entry_id: str
    payload: dict[str, Any]
    respondent_id: str = "A"
    correlation_id: str = ""
    causation_id: str = ""

    def concerns(self, query_id: str) -> bool:
        """Whether it is about a query, or is the query itself."""
        named = (self.entry_id if self.subject == "query.received" else "", self.correlation_id,
                 self.payload.get("query_id"), self.payload.get("original_query_id"))  # fmt: skip
        return query_id in named

    def place(self) -> tuple[int, int]:
        """Where it stands among others: by the bus's clock."""
        rank = next((n for n, name in enumerate(_ORDER) if self.subject.startswith(name)), len(_ORDER))
        return int(self.entry_id.partition("-")[0]), rank


class BusTap:
    """Every message that is published while it is open. Open it before the query: a work stream forgets messages as
    soon as everybody has handled them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._found: dict[tuple[str, str], BusMessage] = {}
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

    def about(self, query_id: str) -> list[BusMessage]:
        """The messages about a query, in the order in which they were published."""
        found = [message for message in self._found.values() if message.concerns(query_id)]
        return sorted(found, key=BusMessage.place)

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
        params = {"last": _LAST if self._opened.is_set() else 0}
        async with http.stream("GET", "/bus/events", params=params, timeout=_IDLE) as response:
            if not response.is_success:
                await response.aread()
                raise self._api.refusal(response)
            parser = Parser()
            async with aclosing(lines(response)) as following:
                async for line in following:
                    # the first line comes when every stream is followed
                    self._opened.set()
                    event = parser.feed(line)
                    if event is None or not isinstance(event.data.get("payload"), dict):
                        continue
                    async with self._changed:
                        self._found.setdefault((event.type, event.id), _message(event))
                        self._changed.notify_all()


def _message(event: Event) -> BusMessage:
    named = {
        name: str(event.data[name])
        for name in ("respondent_id", "correlation_id", "causation_id")
        if event.data.get(name)
    }
    return BusMessage(event.type, event.id, event.data["payload"], **named)
