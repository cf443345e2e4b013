"""Preemption: background model calls wait for interactive queries, and are cancelled in favour of them.

A model backend has no priorities, and the usual one writes one answer at a time. A background call (respondent B, the
judge, memory's labels) therefore begins only while no user waits for an answer. It is cancelled when a query arrives
(a closed connection frees the GPU at once), and repeated later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from pydantic import AliasChoices, Field

from shared.bus import Bus, ReplyError
from shared.bus.keys import CHORES
from shared.contracts import QUERY_RECEIVED
from shared.errors import TransientError
from shared.llm.port import (
    ChatRequest,
    Delta,
    ModelFacts,
    ModelOverloaded,
    ModelUnavailable,
    StreamInterrupted,
    TextDelta,
)
from shared.participant.settings import Settings

if TYPE_CHECKING:
    # The gateway and reward only count queries: they have no model.
    from shared.llm.adapter import WiredChatModel

# Intervals (seconds) between two counts of the queries: during a call, and while a call waits.
_WATCH_SECONDS = 0.05
_LOOK_SECONDS = 0.2
# Nobody has looked for so long: whether it was quiet meanwhile is not known.
_UNSEEN_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_A_DAY = 86_400


class PreemptionSettings(Settings):
    """Of a participant that comes after the users' queries."""

    yield_above: int | None = Field(
        default=0,
        ge=0,
        description="Model calls wait while more than so many queries are being answered; null: they never wait. "
        "A model server that has more slots than one is taken to bear as many as it has, less one",
    )
    yield_rest: float = Field(
        default=6.0,
        ge=0,
        le=600,
        description="Seconds without a query before model calls begin, where the server has one slot: whoever reads "
        "an answer may ask on, and finds the slot free and the conversation in the server's cache",
    )
    yield_seconds: float = Field(
        default=900.0,
        ge=0,
        le=86_400,
        description="Longest that a model call is put off; after that it begins, and is not broken off any more",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        validation_alias=AliasChoices("OLLAMA_NUM_PARALLEL"),
        description="Answers that the model server writes at the same time; unset: as it says, one where it does not",
    )


class Preempted(StreamInterrupted):
    """The call was cancelled in favour of a user's query; repeat it."""


def answering(bus: Bus) -> Callable[[], Awaitable[int]]:
    """Return what counts all queries that are in line for the generator, or being answered."""

    async def count() -> int:
        try:
            return await bus.backlog(QUERY_RECEIVED.stream, "generator")
        except (TransientError, ReplyError):
            # without the bus there is nothing to be considerate of
            return 0

    return count


@asynccontextmanager
async def background_call(bus: Bus, query_id: str, until: int) -> AsyncIterator[None]:
    """Mark a query as a program's own (a title, for example) while it is handled: no user waits for it.

    until: when the mark ends in any case, in ms by the bus's clock.
    """
    await bus.link.pipe([("ZADD", CHORES, until, query_id), ("EXPIRE", CHORES, _A_DAY)])
    yield
    # Not after an error: another replica may have taken the query over. The entry then expires.
    with suppress(TransientError):
        await bus.link.call("ZREM", CHORES, query_id)


def interactive_queries(bus: Bus) -> Callable[[], Awaitable[int]]:
    """Return what counts the queries that a user waits for: in line for the generator, or being answered."""

    async def count() -> int:
        try:
            queries = await bus.backlog(QUERY_RECEIVED.stream, "generator")
            return max(0, queries - int(await bus.link.call("ZCOUNT", CHORES, bus.now_ms(), "+inf")))
        except (TransientError, ReplyError):
            return 0

    return count


class PreemptibleChatModel:
    """A chat model (see `shared.llm.port.ChatModel`) that yields to users' queries.

    queries: how many there are now. settings: read anew for each call. waiting: entered while it waits for its turn.
    """

    def __init__(
        self,
        model: WiredChatModel,
        queries: Callable[[], Awaitable[int]],
        settings: Callable[[], PreemptionSettings],
        waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._model = model
        self._queries = queries
        self._settings = settings
        self._waiting = waiting
        self._clock = asyncio.get_running_loop().time
        self._idle_since: float | None = None
        self._looked = 0.0
        self.yielded = 0

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        """Like the model's `stream`, after waiting for the queries of users. Raises Preempted when one arrives."""
        until = self._until(request)
        await self._turn(request.model, until)
        async with aclosing(self._stream(request, until)) as deltas:
            async for delta in deltas:
                yield delta

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        """Return the text of a background call. It waits for the queries of users, and is repeated when preempted.

        seconds: longest time of one try; waiting for the turn does not count. load: seconds more until the first word,
        for a server that may have to load the model. patience: how long a backend that is away or busy is waited for.
        Raises ModelError, and TimeoutError when a try takes too long.
        """
        until, away, pause = self._until(request), self._clock() + patience, _FIRST_PAUSE
        while True:
            await self._turn(request.model, until)
            try:
                async with (
                    asyncio.timeout(seconds + load) as limit,
                    aclosing(self._stream(request, until)) as deltas,
                ):
                    said: list[str] = []
                    async for delta in deltas:
                        if not said:
                            limit.reschedule(min(limit.when() or math.inf, self._clock() + seconds))
                        said.append(delta.text if isinstance(delta, TextDelta) else "")
                    return "".join(said)
            except Preempted:
                continue
            except (ModelUnavailable, ModelOverloaded):
                if self._clock() + pause > away:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def turn(self, model: str) -> None:
        """Wait until a background call may begin, or was put off for `yield_seconds`."""
        await self._turn(model, self._clock() + self._settings().yield_seconds)

    def _until(self, request: ChatRequest) -> float:
        seconds = self._settings().yield_seconds
        return self._clock() + (seconds if request.patience is None else min(request.patience, seconds))

    async def _above(self, model: str) -> int | None:
        """How many queries a call may run beside; None: any number."""
        settings = self._settings()
        if settings.yield_above is None:
            return None
        slots = settings.slots or (await self._model.facts(model)).slots or 1
        return max(settings.yield_above, slots - 1)

    async def _idle_for(self, above: int) -> float | None:
        """Return for how many seconds there was no query, as far as this was polled; None while there is one."""
        now, queries = self._clock(), await self._queries()
        if queries > above:
            self._idle_since = None
        elif self._idle_since is None or now - self._looked > _UNSEEN_SECONDS:
            self._idle_since = now
        self._looked = now
        return None if self._idle_since is None else now - self._idle_since

    async def _turn(self, model: str, until: float) -> None:
        """Returns when it is quiet enough, or the call has been put off for long enough."""
        above = await self._above(model)
        if above is None or self._clock() >= until or await self._lacks(above) is None:
            return
        async with self._waiting():
            while self._clock() < until and (lacking := await self._lacks(above)) is not None:
                await asyncio.sleep(lacking)

    async def _lacks(self, above: int) -> float | None:
        """Seconds until another look at whether it is quiet enough; None when it is."""
        rest = 0.0 if above else self._settings().yield_rest
        quiet = await self._idle_for(above)
        if quiet is None:
            return _LOOK_SECONDS
        return min(_LOOK_SECONDS, rest - quiet) if quiet < rest else None

    async def _stream(self, request: ChatRequest, until: float) -> AsyncGenerator[Delta, None]:
        above = await self._above(request.model)
        watching = None
        if above is not None and self._clock() < until:
            watching = asyncio.create_task(self._watch(above, until))
        try:
            async with aclosing(self._model.stream(request)) as deltas:
                while (delta := await self._next(deltas, watching)) is not None:
                    yield delta
        finally:
            if watching is not None:
                watching.cancel()

    async def _next(self, deltas: AsyncGenerator[Delta, None], watching: asyncio.Task[bool] | None) -> Delta | None:
        """Return the next delta, None at the end. Raises Preempted when a query of a user arrives."""
        if watching is None or (watching.done() and not watching.result()):
            return await anext(deltas, None)
        coming = asyncio.ensure_future(anext(deltas, None))
        try:
            await asyncio.wait({coming, watching}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done() or not watching.result():
                return await coming
            self.yielded += 1
            raise Preempted("a user's query came first")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def _watch(self, above: int, until: float) -> bool:
        """True as soon as more queries are there than may be, False when the call need not yield any more."""
        while self._clock() < until:
            if await self._idle_for(above) is None:
                return True
            await asyncio.sleep(_WATCH_SECONDS)
        return False

    async def facts(self, model: str) -> ModelFacts:
        return await self._model.facts(model)

    async def reachable(self, model: str) -> str | None:
        return await self._model.reachable(model)

    async def aclose(self) -> None:
        await self._model.aclose()
