"""One query from its claim to its end: turn, journal, loop, and what is published."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import date
from typing import Any

from services.generator.context import split_turns
from services.generator.lane import Lanes
from services.generator.loop import Answer, run_agent
from services.generator.loop import Message as ChatMessage
from services.generator.machine import IDLE, TABLE
from services.generator.recall import Recall, partial_text, recall
from services.generator.settings import GeneratorSettings
from services.generator.steps import Conversation, JournalSteps, Ports, show_transition
from shared.contracts import (
    ANSWER_DIALOG,
    PREFIX,
    RESPONSE_GENERATION,
    AnswerDialog,
    QueryReceived,
    ResponseGeneration,
)
from shared.envelope import Message, now_ms
from shared.errors import PermanentError
from shared.journal import EntryType, JournalWriter, closing, journal_key, read_journal, response_id
from shared.llm.port import (
    ChatModel,
    ContextOverflow,
    ModelError,
    ModelMissing,
    ModelRejected,
    ModelUnavailable,
)
from shared.logging import get_logger
from shared.machine import Machine
from shared.service import Context
from shared.sessions import Sessions, Turn
from shared.tool_client import Caller, ToolClient

log = get_logger()

_CODES: tuple[tuple[type[ModelError], str], ...] = (
    (ModelMissing, "model_missing"),
    (ModelRejected, "model_rejected"),
    (ContextOverflow, "context_overflow"),
    (ModelUnavailable, "model_unavailable"),
)


def cancel_key(query_id: str) -> str:
    """Set by the gateway, so that a cancel is seen by whoever takes the query later."""
    return f"{PREFIX}cancel:{query_id}"


class Answering:
    def __init__(
        self,
        context: Context[GeneratorSettings],
        model: ChatModel,
        tools: ToolClient,
        sessions: Sessions,
        lanes: Lanes,
    ) -> None:
        self._context = context
        self._model = model
        self._tools = tools
        self._sessions = sessions
        self._lanes = lanes
        self._running: dict[str, asyncio.Timeout] = {}
        self._cancelled: set[str] = set()

    def cancel(self, query_id: str) -> None:
        """Stops a query that this replica works on or holds; the model's connection is closed."""
        scope = self._running.get(query_id)
        if scope is not None:
            self._cancelled.add(query_id)
            scope.reschedule(asyncio.get_running_loop().time())

    async def answer(self, message: Message[QueryReceived]) -> None:
        """Answers a query, or continues where another replica stopped. Raises Fenced when one has taken over."""
        query = message.payload
        caller = self._caller(message)
        run = _Run(self, message, caller)
        try:
            async with self._bounded(caller) as scope:
                await run.prepare()
                await run.generate()
        except TimeoutError:
            if not scope.expired():
                raise
            if caller.query_id in self._cancelled:
                await run.cancelled()
            else:
                await run.failed("deadline_exceeded", "the answer was not ready before the query's deadline")
        except ModelError as exc:
            code = next((code for kind, code in _CODES if isinstance(exc, kind)), "model_error")
            await run.failed(code, str(exc))
        finally:
            self._cancelled.discard(caller.query_id)
        await self._leave(query, caller.query_id)

    async def abandon(self, message: Message[QueryReceived], reason: str) -> None:
        """Ends the journal of a query that is given up, so that nobody waits for it."""
        run = _Run(self, message, self._caller(message))
        await run.claim()
        if run.recall.terminal is None:
            await run.failed("abandoned", reason)
        await self._leave(message.payload, message.entry_id)

    def _caller(self, message: Message[QueryReceived]) -> Caller:
        envelope, settings = message.envelope, self._context.settings
        received = int(message.entry_id.partition("-")[0])
        return Caller(
            query_id=message.entry_id,
            session_id=message.payload.session_id,
            user_id=message.payload.user_id,
            respondent_id=settings.respondent_id,
            deadline=envelope.deadline or received + int(settings.deadline_seconds * 1000),
            traceparent=envelope.traceparent,
        )

    @contextlib.asynccontextmanager
    async def _bounded(self, caller: Caller) -> AsyncIterator[asyncio.Timeout]:
        """Ends with TimeoutError at the deadline, or as soon as the query is cancelled."""
        assert caller.deadline is not None
        async with asyncio.timeout((caller.deadline - now_ms()) / 1000) as scope:
            self._running[caller.query_id] = scope
            try:
                if await self._context.bus.link.call("EXISTS", cancel_key(caller.query_id)):
                    self.cancel(caller.query_id)
                    await asyncio.sleep(0)
                yield scope
            finally:
                del self._running[caller.query_id]

    async def _leave(self, query: QueryReceived, query_id: str) -> None:
        if query.messages is None:
            await self._lanes.leave(query.session_id, query_id)


class _Run:
    """The life of one response at one replica."""

    def __init__(self, owner: Answering, message: Message[QueryReceived], caller: Caller) -> None:
        self._owner = owner
        self._context = owner._context
        self._message = message
        self._query = message.payload
        self._caller = caller
        self._settings = owner._context.settings
        self._response_id = response_id(caller.query_id, caller.respondent_id)
        self._key = journal_key(caller.query_id, caller.respondent_id)
        self._writer: JournalWriter | None = None
        self._ports: Ports | None = None
        self.recall = Recall()

    @property
    def _stored(self) -> bool:
        return self._query.messages is None

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self) -> None:
        """Waits for the turn, then becomes the journal's writer."""
        if self._stored:
            place = (self._query.session_id, self._caller.query_id, self._query.lane_ticket)
            if not await self._owner._lanes.mine(*place):
                async with self._message.parked():
                    await self._owner._lanes.wait(*place)
        await self.claim()

    async def claim(self) -> None:
        data = {
            "query_id": self._caller.query_id,
            "response_id": self._response_id,
            "session_id": self._query.session_id,
            "respondent_id": self._caller.respondent_id,
            "replica": self._context.replica,
            "model": self._query.model or self._settings.model,
            "attempt": self._message.deliveries,
        }
        assert self._caller.deadline is not None
        ttl = max(0, (self._caller.deadline - now_ms()) // 1000) + self._settings.retention
        self._writer, before = await JournalWriter.claim(
            self._context.bus, self._key, data, ttl, fresh=self._message.deliveries == 1
        )
        self.recall = recall(before)
        self._ports = Ports(
            context=self._context,
            model=self._owner._model,
            tools=self._owner._tools,
            writer=self._writer,
            recall=self.recall,
            machine=Machine(TABLE, IDLE),
            caller=self._caller,
            response_id=self._response_id,
            attempt=self._message.deliveries,
        )

    # ── the answer ───────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self) -> None:
        if self.recall.terminal is not None:
            return  # everything is written; only the acknowledgement was missing
        assert self._ports is not None
        await show_transition(self._ports, "RECEIVE")
        conversation = await self._conversation()
        await show_transition(self._ports, "START_GENERATION")
        options = self._settings.sampling(self._query.options)
        steps = JournalSteps(
            ports=self._ports,
            conversation=conversation,
            model_name=self._query.model or self._settings.model,
            options=options,
            allowed=None if self._query.tools is None else frozenset(self._query.tools),
        )
        question = {"role": "user", "content": self._query.query}
        answer = await run_agent(steps, question, self._settings.max_tool_iterations)
        await self._complete(answer, options, conversation.ratio)

    async def _conversation(self) -> Conversation:
        system: list[ChatMessage] = [{"role": "system", "content": self._system_prompt()}]
        if self._query.messages is not None:
            given, turns = split_turns([message.model_dump(exclude_none=True) for message in self._query.messages])
            return Conversation([*system, *given], turns)
        query = self._query
        if self._message.deliveries == 1:
            owner = await self._owner._sessions.open(query.session_id, query.user_id, query.query)
            if owner != query.user_id:
                raise PermanentError(f"session {query.session_id} belongs to another user")
        turns_kept = await self._owner._sessions.turns(query.session_id, self._caller.respondent_id)
        limit = self._settings.history_turns
        recent = turns_kept[-limit:] if limit else []
        conversation = Conversation(system, [list(turn.messages()) for turn in recent])
        if recent and recent[-1].ratio:
            conversation.ratio = recent[-1].ratio
        return conversation

    def _system_prompt(self) -> str:
        return f"{self._settings.system_prompt}\n\nToday's date: {date.today().isoformat()}"

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _complete(self, answer: Answer, options: dict[str, Any], ratio: float) -> None:
        """Publishes, stores the turn, then tells the client: whoever has seen `completed` finds all of it done."""
        assert self._ports is not None
        assert self._writer is not None
        await show_transition(self._ports, "PUBLISH")
        query, caller = self._query, self._caller
        generation = ResponseGeneration(
            query_id=caller.query_id,
            response_id=self._response_id,
            session_id=query.session_id,
            user_id=query.user_id,
            respondent_id=self._settings.respondent_id,
            generator_id=self._settings.name,
            query=query.query,
            answer=answer.text,
            thinking=answer.thinking,
            tool_calls=answer.tool_calls,
            model=answer.model,
            options=options,
            usage=answer.usage,
            finish_reason=answer.finish_reason,
        )
        dialog = AnswerDialog(
            session_id=query.session_id,
            query_id=caller.query_id,
            query=query.query,
            answer=answer.text,
            respondent_id=self._settings.respondent_id,
        )
        headers = {**caller.headers(), "causation_id": self._message.envelope.id}
        bus = self._context.bus
        commands = [
            bus.publishing(RESPONSE_GENERATION.of(generation, once=self._response_id, **headers)),
            bus.publishing(ANSWER_DIALOG.of(dialog, once=self._response_id, **headers)),
        ]
        if self._stored:
            commands += self._turn(answer.text, ratio)
        await bus.link.pipe(commands)
        completed = {
            "answer": answer.text,
            "thinking": answer.thinking,
            "tool_calls": [record.model_dump(mode="json") for record in answer.tool_calls],
            "usage": answer.usage.model_dump(),
            "finish_reason": answer.finish_reason,
            "model": answer.model,
        }
        await self._end(EntryType.COMPLETED, completed)
        await show_transition(self._ports, "RESET", journal=False)

    def _turn(self, answer: str, ratio: float | None, *, interrupted: bool = False) -> list[Any]:
        turn = Turn(self._caller.query_id, self._query.query, answer, now_ms(), interrupted, ratio)
        return self._owner._sessions.appending(self._query.session_id, self._caller.respondent_id, turn)

    async def failed(self, code: str, text: str) -> None:
        if self._writer is None:
            await self.claim()
        if self.recall.terminal is not None:
            return
        log.warning("query.failed", code=code, reason=text)
        await self._fail_state()
        await self._end(EntryType.FAILED, {"code": code, "message": text})

    async def cancelled(self) -> None:
        """What had been written of the answer is kept in the session, marked as interrupted."""
        if self._writer is None:
            await self.claim()
        if self.recall.terminal is not None:
            return
        answer, thinking = partial_text(await read_journal(self._context.bus, self._key))
        await self._fail_state()
        if self._stored and answer.strip():
            await self._context.bus.link.pipe(self._turn(answer, None, interrupted=True))
        await self._end(EntryType.CANCELLED, {"answer": answer, "thinking": thinking})

    async def _fail_state(self) -> None:
        assert self._ports is not None
        if self._ports.machine.state != IDLE:
            self.recall.states = 0
            await show_transition(self._ports, "FAIL")

    async def _end(self, kind: EntryType, data: dict[str, Any]) -> None:
        assert self._writer is not None
        await self._writer.append(kind, data, [closing(self._key, self._settings.retention)])
