"""The queries that this replica works on: deadlines, cancellation, and what every kind of end comes to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from services.generator.attachments import AttachmentMissing, AttachmentsUnavailable
from services.generator.identities import UnknownPersona
from services.generator.opening import has_turn, open_response, open_turn, wait_for_turn
from services.generator.run import Cancelled, Ending, Failure, Parts, Response
from services.generator.terms import UnusableForm
from services.generator.watch import Watch, watched_answer
from shared.contracts import Outgoing, QueryReceived
from shared.envelope import Message
from shared.llm.port import (
    ContextOverflow,
    ModelError,
    ModelMissing,
    ModelRejected,
    ModelUnavailable,
)
from shared.llm.preemption import background_call
from shared.participant.sampling import one_in
from shared.participant.tool_client import Caller
from shared.telemetry import tracing
from shared.telemetry.logging import get_logger
from shared.zones import first_zone

log = get_logger()

_CODES: tuple[tuple[type[ModelError], str], ...] = (
    (UnknownPersona, "unknown_persona"),
    (UnusableForm, "bad_request"),
    (AttachmentMissing, "attachment_missing"),
    (AttachmentsUnavailable, "memory_unavailable"),
    (ModelMissing, "model_missing"),
    (ModelRejected, "model_rejected"),
    (ContextOverflow, "context_overflow"),
    (ModelUnavailable, "model_unavailable"),
)


@dataclass(slots=True)
class _Running:
    """scope: ends with a cancel, or when it is too late. cancelled: it was a cancel."""

    scope: asyncio.Timeout
    cancelled: bool = False


def _too_late(response: Response | None) -> Failure:
    waited = f": it waited for the model ({response.waits})" if response is not None and response.waits else ""
    return Failure("deadline_exceeded", f"the answer was not ready before the query's deadline{waited}")


class Answering:
    """`queries`: how many queries of users are waiting or being answered."""

    def __init__(self, parts: Parts, queries: Callable[[], Awaitable[int]]) -> None:
        self._parts = parts
        self._queries = queries
        self._running: dict[str, _Running] = {}

    def cancel(self, query_id: str) -> None:
        """Stops a query that this replica works on or holds; the model's connection is closed."""
        running = self._running.get(query_id)
        if running is not None and not running.scope.expired():
            running.cancelled = True
            running.scope.reschedule(asyncio.get_running_loop().time())

    async def answer(self, message: Message[QueryReceived]) -> Sequence[Outgoing]:
        """Answers a query, or continues where another replica stopped. Raises Fenced when one has taken over."""
        with watched_answer(self._parts.context.settings, message) as watch:
            if await self._leaves_out(message):
                await self._pass_by(message.payload, message.entry_id)
            elif message.payload.plain:
                async with background_call(self._parts.context.bus, message.entry_id, self._deadline(message)):
                    await self._answer(message, watch)
            else:
                await self._answer(message, watch)
        return ()

    async def _answer(self, message: Message[QueryReceived], watch: Watch) -> None:
        query = message.payload
        caller = self._caller(message)
        left = self._left(message)
        opening = partial(open_response, self._parts, message, caller, left)
        response: Response | None = None
        ending: Ending | None = None
        running = _Running(asyncio.timeout(left))
        try:
            async with running.scope:
                # a cancel ends it
                self._running[caller.query_id] = running
                stopped = not has_turn(message, caller.respondent_id) and not await wait_for_turn(
                    self._parts, message, caller
                )
                if not stopped:
                    response, past, stopped = await open_turn(
                        self._parts, message, caller, partial(opening, answering=True)
                    )
                if stopped:
                    ending = Cancelled()
                elif response is not None:
                    ending = await response.generate(past)
        except TimeoutError:
            if not running.scope.expired():
                raise
            ending = Cancelled() if running.cancelled else _too_late(response)
        except ModelError as exc:
            code = next((code for kind, code in _CODES if isinstance(exc, kind)), "model_error")
            ending = Failure(code, str(exc))
        finally:
            self._running.pop(caller.query_id, None)
        # a cancel or the deadline comes too late now: the answer is published as a whole or not at all
        if ending is not None and (response := response or await opening()) is not None:
            await response.end(ending)
            watch.ended(ending)
        await self._leave(query, caller.query_id)

    async def _leaves_out(self, message: Message[QueryReceived]) -> bool:
        """The shadow answers a sample of the queries, and none while too many wait. It takes no part in what is no
        question to the agent, nor where a client's tools are: only one of two could be given their results."""
        settings, query = self._parts.context.settings, message.payload
        if settings.respondent_id == "A":
            return False
        if query.plain or query.client_tools is not None:
            return True
        if message.deliveries > 1:
            # it may have been begun
            return False
        if not one_in(settings.answer_one_in, message.entry_id):
            return True
        most = settings.leave_out_above
        return most is not None and await self._queries() > most

    async def _pass_by(self, query: QueryReceived, query_id: str) -> None:
        """Leaves the session's lane without having taken a turn in it, wherever the query stands there."""
        log.debug("query.left_out")
        if query.messages is None:
            await self._parts.lanes.leave(query.session_id, query_id)

    async def abandon(self, message: Message[QueryReceived], reason: str) -> Sequence[Outgoing]:
        """Ends the journal of a query that is given up, so that nobody waits for it."""
        left = self._left(message)
        response = await open_response(self._parts, message, self._caller(message), left)
        if response is not None:
            await response.end(Failure("abandoned", reason))
        await self._leave(message.payload, message.entry_id)
        return ()

    def _caller(self, message: Message[QueryReceived]) -> Caller:
        return Caller(
            query_id=message.entry_id,
            session_id=message.payload.session_id,
            user_id=message.payload.user_id,
            respondent_id=self._parts.context.settings.respondent_id,
            deadline=self._deadline(message),
            traceparent=tracing.current() or message.envelope.traceparent,
            time_zone=first_zone(message.payload.time_zone, self._parts.context.settings.zone),
        )

    def _deadline(self, message: Message[QueryReceived]) -> int:
        """By the bus's clock, which gave the entry its id as well."""
        received = int(message.entry_id.partition("-")[0])
        return message.envelope.deadline or received + int(self._parts.context.settings.deadline_seconds * 1000)

    def _left(self, message: Message[QueryReceived]) -> float:
        """Seconds until the query's deadline."""
        return self._parts.context.bus.left(self._deadline(message), message.entry_id)

    async def _leave(self, query: QueryReceived, query_id: str) -> None:
        if query.messages is None:
            await self._parts.lanes.leave(query.session_id, query_id)
        elif query.kept:
            await self._parts.lanes.clear(query.session_id, query_id)
