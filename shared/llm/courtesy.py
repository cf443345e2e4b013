"""Letting somebody else go first: what nobody waits for does not slow down what somebody waits for.

A model backend has no priorities. Respondent B and the critic therefore begin a model call only while few enough
queries of users are being answered, and break one off when more come: closing the connection frees the GPU at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from pydantic import Field

from shared.bus import Bus, ReplyError
from shared.contracts import QUERY_RECEIVED
from shared.errors import TransientError
from shared.llm.adapter import WiredChatModel
from shared.llm.port import ChatRequest, Delta, ModelFacts, StreamInterrupted
from shared.participant.settings import Settings

_LOOK_SECONDS = 0.05


class CourtesySettings(Settings):
    """Of a participant that comes after the users' queries."""

    yield_above: int | None = Field(
        default=0,
        ge=0,
        description="Model calls wait while more than so many queries are being answered; null: they never wait. "
        "Raise it to what the backend answers at the same time without slowing down, less one",
    )
    yield_seconds: float = Field(default=60.0, ge=0, le=3600, description="Longest wait before each model call")


class Yielded(StreamInterrupted):
    """The call was broken off in favour of a user's query; it is to be made again."""


def answering(bus: Bus) -> Callable[[], Awaitable[int]]:
    """How many queries of users are waiting for the generator or being answered by it."""

    async def count() -> int:
        try:
            return await bus.backlog(QUERY_RECEIVED.stream, "generator")
        except (TransientError, ReplyError):
            # without the bus there is nothing to be considerate of
            return 0

    return count


class CourteousChatModel:
    """A chat model (see `shared.llm.port.ChatModel`) that yields to users' queries.

    queries: how many there are now. settings: read anew for each call.
    """

    def __init__(
        self, model: WiredChatModel, queries: Callable[[], Awaitable[int]], settings: Callable[[], CourtesySettings]
    ) -> None:
        self._model = model
        self._queries = queries
        self._settings = settings
        self.yielded = 0

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        """As the model's own, in its turn. Raises Yielded when it was broken off, which `request.yields` allows."""
        await self.turn()
        async with aclosing(self.stream_now(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_now(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        """The same without waiting for the turn."""
        above = self._settings().yield_above
        watching = asyncio.create_task(self._watch(above)) if request.yields and above is not None else None
        try:
            async with aclosing(self._model.stream(request)) as deltas:
                while (delta := await self._next(deltas, watching)) is not None:
                    yield delta
        finally:
            if watching is not None:
                watching.cancel()

    async def _next(self, deltas: AsyncGenerator[Delta, None], watching: asyncio.Task[None] | None) -> Delta | None:
        """The next delta, None at the end. Raises Yielded as soon as the watch ends."""
        if watching is None:
            return await anext(deltas, None)
        coming = asyncio.ensure_future(anext(deltas, None))
        try:
            await asyncio.wait({coming, watching}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            self.yielded += 1
            raise Yielded("a user's query came first")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def turn(self) -> None:
        """Returns when few enough queries are being answered, or the wait has been long enough."""
        settings = self._settings()
        until = asyncio.get_running_loop().time() + settings.yield_seconds
        while settings.yield_above is not None and await self._queries() > settings.yield_above:
            if asyncio.get_running_loop().time() >= until:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _watch(self, above: int) -> None:
        """Ends when more queries have come than there were to begin with, and than are allowed for."""
        before = await self._queries()
        while (now := await self._queries()) <= max(above, before):
            before = min(before, now)
            await asyncio.sleep(_LOOK_SECONDS)

    async def facts(self, model: str) -> ModelFacts:
        return await self._model.facts(model)

    async def reachable(self, model: str) -> str | None:
        return await self._model.reachable(model)

    async def aclose(self) -> None:
        await self._model.aclose()
