"""The queries that this replica works on: their steps in order, deadlines and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from services.generator.ending import Cancelled, Ending, Failure, end, failure_of
from services.generator.generation import generate
from services.generator.opening import claim_response, deadline_of, load_past, seconds_left, wait_for_turn
from services.generator.response_run import ResponseRun, RunDeps
from services.generator.shadow import is_left_out
from services.generator.watch import watched_answer
from shared.contracts import Outgoing, QueryReceived
from shared.envelope import Message
from shared.llm.port import ModelError
from shared.llm.preemption import background_call
from shared.participant.tool_client import Caller
from shared.telemetry import tracing
from shared.telemetry.logging import get_logger
from shared.zones import first_zone

log = get_logger()


@dataclass(slots=True)
class _Running:
    """A query that this replica works on. scope: ends with a cancel or at the deadline. cancelled: it was a cancel."""

    scope: asyncio.Timeout
    cancelled: bool = False
    run: ResponseRun | None = None
    ending: Ending | None = None

    def cancel(self) -> None:
        if not self.scope.expired():
            self.cancelled = True
            self.scope.reschedule(asyncio.get_running_loop().time())

    def interrupted(self) -> Ending:
        """Return the ending of a scope that has expired."""
        if self.cancelled:
            return Cancelled()
        waited = f": it waited for the model ({self.run.waits_for})" if self.run and self.run.waits_for else ""
        return Failure("deadline_exceeded", f"the answer was not ready before the query's deadline{waited}")


class Answering:
    """Answers the queries of this replica. queries: returns the number of unfinished interactive queries."""

    def __init__(self, deps: RunDeps, queries: Callable[[], Awaitable[int]]) -> None:
        self._deps = deps
        self._queries = queries
        self._running: dict[str, _Running] = {}

    def cancel(self, query_id: str) -> None:
        """Stop a query that this replica runs or has waiting; the connection to the model is closed."""
        if (running := self._running.get(query_id)) is not None:
            running.cancel()

    async def answer(self, message: Message[QueryReceived]) -> Sequence[Outgoing]:
        """Answer a query, or continue where another replica stopped. Raises Fenced if another replica has taken over.

        Each step ends before the next one begins, so no step reads what an earlier one has not written yet.
        """
        deps = self._deps
        with watched_answer(deps.context.settings, message) as watch:
            caller = self._caller(message)
            if await is_left_out(deps.context.settings, message, self._queries):
                log.debug("query.left_out")
                await self._release(message)
                return ()
            async with self._in_background(message):
                async with self._limited(message) as running:
                    if not await wait_for_turn(deps, message, caller):
                        running.ending = Cancelled()
                    elif (run := await claim_response(deps, message, caller, starts=True)) is not None:
                        running.run = run
                        past = await load_past(run)
                        running.ending = Cancelled() if past is None else await generate(run, past)
                # Nothing interrupts from here on: an answer is published as a whole or not at all.
                if running.ending is not None and (run := running.run or await claim_response(deps, message, caller)):
                    await end(run, running.ending)
                    watch.ended(running.ending)
                await self._release(message)
        return ()

    async def abandon(self, message: Message[QueryReceived], reason: str) -> Sequence[Outgoing]:
        """End the journal of a query that is given up, so that no client waits for it."""
        run = await claim_response(self._deps, message, self._caller(message))
        if run is not None:
            await end(run, Failure("abandoned", reason))
        await self._release(message)
        return ()

    @contextlib.asynccontextmanager
    async def _limited(self, message: Message[QueryReceived]) -> AsyncIterator[_Running]:
        """Run the block until the query's deadline or its cancel. A failure of the model is the ending, too."""
        running = _Running(asyncio.timeout(seconds_left(self._deps, message)))
        try:
            async with running.scope:
                self._running[message.entry_id] = running
                yield running
        except TimeoutError:
            if not running.scope.expired():
                raise
            running.ending = running.interrupted()
        except ModelError as exc:
            running.ending = failure_of(exc)
        finally:
            self._running.pop(message.entry_id, None)

    def _in_background(self, message: Message[QueryReceived]) -> AbstractAsyncContextManager[None]:
        """Mark a program's own call while it is handled: no user waits for it."""
        if not message.payload.plain:
            return contextlib.nullcontext()
        deadline = deadline_of(self._deps, message)
        return background_call(self._deps.context.bus, message.entry_id, deadline)

    def _caller(self, message: Message[QueryReceived]) -> Caller:
        settings = self._deps.context.settings
        return Caller(
            query_id=message.entry_id,
            session_id=message.payload.session_id,
            user_id=message.payload.user_id,
            respondent_id=settings.respondent_id,
            deadline=deadline_of(self._deps, message),
            traceparent=tracing.current() or message.envelope.traceparent,
            time_zone=first_zone(message.payload.time_zone, settings.zone),
        )

    async def _release(self, message: Message[QueryReceived]) -> None:
        """Release the query's place in its session's queue."""
        query = message.payload
        if query.messages is None:
            await self._deps.session_queues.release(query.session_id, message.entry_id)
        elif query.kept:
            await self._deps.session_queues.erase_deleted(query.session_id, message.entry_id)
