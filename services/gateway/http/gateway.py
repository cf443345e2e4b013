"""What the routes of one gateway process share. It holds no state of a query."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from services.gateway.http.errors import ApiError
from services.gateway.http.keys import Keys
from services.gateway.http.metrics import Metrics, Reading, take
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, BusFull, JournalSubscriber
from shared.contracts import QUERY_RECEIVED
from shared.errors import BusUnavailable
from shared.participant.registry import SETTLING
from shared.participant.room import LargeMessages
from shared.participant.service import Context
from shared.participant.tool_client import ToolClient
from shared.records import lanes
from shared.records.sessions import Sessions

R = TypeVar("R")

_BACKLOG_SECONDS = 0.25
# The most direct tool calls of one user in progress at one gateway: half of the slots of a tool worker by default.
MOST_CALLS = 8
# What a Redis says that does not take a connection's user or password.
_NOT_LET_IN = ("WRONGPASS", "NOAUTH", "NOPERM")


@dataclass(frozen=True, slots=True)
class _Connected:
    context: Context[GatewaySettings]
    journals: JournalSubscriber
    sessions: Sessions
    tools: ToolClient
    large_queries: LargeMessages


def _not_let_in(trouble: str) -> str:
    """What to say where that is what became of the connection to the bus; else nothing."""
    if not any(sign in trouble for sign in _NOT_LET_IN):
        return ""
    return f"the bus does not let this gateway in ({trouble.rstrip('.')}): see to its LOCAL2_REDIS_URL"


def _away(trouble: str) -> str:
    """What to say of a bus that did not answer in time. trouble: what became of the connection to it."""
    if said := _not_let_in(trouble):
        return said
    what = "is kept busy by a script" if "BUSY " in trouble else "does not answer"
    return f"the bus {what}; try again in a moment"


class Gateway:
    """Serves before Redis answers (with 503) and goes on when it comes back."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._start_settings = settings
        self._begun = time.monotonic()
        self._connected: _Connected | None = None
        self._awaited: Bus | None = None
        self._open: set[asyncio.Timeout] = set()
        self._backlog = 0
        self._uncounted = False
        self._backlog_until = float("-inf")
        self._calls = Counter[str]()
        self.stopping = False
        self.metrics = Metrics()
        self.keys = Keys(self, settings)

    @property
    def settling(self) -> bool:
        """Whether the stack around it may still be starting."""
        return time.monotonic() - self._begun < SETTLING

    def waits_for(self, bus: Bus) -> None:
        """The bus that has not answered yet, and says why."""
        self._awaited = bus

    def attach(self, context: Context[GatewaySettings], journals: JournalSubscriber) -> None:
        """The bus is there."""
        bus = context.bus

        async def unfinished(names: Collection[str]) -> Collection[str]:
            # Until a query has an id, its name is its once-key, which has no dash.
            ids = {name for name in names if "-" in name}
            return {*(set(names) - ids), *(await lanes.awaited(bus, sorted(ids)))}

        large = LargeMessages(bus, unfinished)
        self._connected = _Connected(context, journals, Sessions(bus), ToolClient(context), large)

    @property
    def settings(self) -> GatewaySettings:
        return self._connected.context.settings if self._connected else self._start_settings

    @property
    def context(self) -> Context[GatewaySettings]:
        """Raises BusUnavailable before the first connection, as all that is on the bus."""
        return self._on_the_bus().context

    @property
    def bus(self) -> Bus:
        return self._on_the_bus().context.bus

    @property
    def journals(self) -> JournalSubscriber:
        return self._on_the_bus().journals

    def _on_the_bus(self) -> _Connected:
        if self._connected is None:
            trouble = self._awaited.link.trouble if self._awaited else ""
            # whoever may ask need not know where the bus is
            raise BusUnavailable(_not_let_in(trouble) or "the bus has not answered yet")
        return self._connected

    @property
    def sessions(self) -> Sessions:
        return self._on_the_bus().sessions

    @property
    def tools(self) -> ToolClient:
        return self._on_the_bus().tools

    @property
    def large_queries(self) -> LargeMessages:
        """The large queries that this gateway has accepted and that may be unanswered."""
        return self._on_the_bus().large_queries

    @contextlib.asynccontextmanager
    async def reachable(self, extra: float = 0.0) -> AsyncIterator[None]:
        """A time limit round everything that a request asks of the bus; beyond it, BusUnavailable."""
        try:
            async with asyncio.timeout(self.settings.bus_wait + extra):
                yield
        except TimeoutError as exc:
            raise BusUnavailable(_away(self.bus.link.trouble)) from exc

    async def full(self) -> str | None:
        """Why the bus takes no writes, as of the last heartbeat; None while it does. Raises BusUnavailable."""
        try:
            await self.bus.link.call("PING")
        except BusFull as exc:
            # so a server answers that cannot write to its disk
            return str(exc)
        return self.context.presence.full

    async def check_room(self) -> None:
        """Raises BusFull: who seems to be away may be there, and cannot say so."""
        if (reason := await self.full()) is not None:
            raise BusFull(reason)

    async def backlog(self, most: int) -> int:
        """Queries that wait for a generator or are being answered: as of the last one that was accepted here, or, where
        those were more than `most`, or could not be told, as of a moment ago."""
        now = asyncio.get_running_loop().time()
        if (self._uncounted or self._backlog > most) and now >= self._backlog_until:
            self._backlog_until = now + _BACKLOG_SECONDS
            self._backlog = await self.bus.backlog(QUERY_RECEIVED.stream, "generator")
        return self._backlog

    @contextlib.contextmanager
    def tool_call(self, user_id: str) -> Iterator[None]:
        """Count a direct tool call as in progress during the block. Raises ApiError 429 above MOST_CALLS."""
        if self._calls[user_id] >= MOST_CALLS:
            raise ApiError(
                429,
                "too_many_requests",
                f"{MOST_CALLS} tool calls of yours are in progress, which is the limit; wait until one has ended",
                {"Retry-After": "2"},
            )
        self._calls[user_id] += 1
        try:
            yield
        finally:
            self._calls[user_id] -= 1
            if not self._calls[user_id]:
                del self._calls[user_id]

    def accepted(self, mode: str, unfinished: int | None) -> None:
        """A query was accepted. unfinished: how many there were then, if that is known."""
        self._uncounted = unfinished is None
        if unfinished is not None:
            self._backlog = unfinished
        self.metrics.accepted.labels(mode).inc()

    async def metrics_text(self) -> bytes:
        """What a scrape is told. That the bus is away is part of it; failing would hide the rest."""
        reading: Reading | None = None
        with contextlib.suppress(BusUnavailable):
            async with self.reachable():
                reading = await take(self.bus, self.context.registry)
        return self.metrics.text(reading)

    # ── long requests ────────────────────────────────────────────────────────────────────────────────────────

    async def race(self, work: Awaitable[R], gone: Awaitable[Any]) -> R | None:
        """Return the result of the work, or None when the client has gone or the gateway stops."""
        scope, leaving = asyncio.timeout(0.0 if self.stopping else None), asyncio.ensure_future(gone)

        def left(_: asyncio.Future[Any]) -> None:
            # The loop may call this after the work has ended: a scheduled callback cannot be removed.
            if scope in self._open:
                _end(scope)

        try:
            async with scope:
                leaving.add_done_callback(left)
                self._open.add(scope)
                try:
                    return await work
                finally:
                    self._open.discard(scope)
                    leaving.remove_done_callback(left)
        except TimeoutError:
            if not scope.expired():
                raise
            return None
        finally:
            leaving.cancel()

    def stop(self) -> None:
        """Ends every open stream."""
        self.stopping = True
        for scope in self._open:
            _end(scope)


def _end(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


async def gateway_of(request: Request) -> Gateway:
    # a coroutine, because FastAPI runs plain functions in a thread
    gateway: Gateway = request.app.state.gateway
    return gateway


GatewayDep = Annotated[Gateway, Depends(gateway_of)]
