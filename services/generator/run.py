"""The life of one response at one replica: its turn, its journal, its answer, and what is published of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any

from services.generator.committee import PERSONA_TOOLS, Seat, UnknownPersona, deliberate, load_identities
from services.generator.context import split_turns
from services.generator.lane import Lanes
from services.generator.loop import Answer, in_order, run_agent
from services.generator.loop import Message as ChatMessage
from services.generator.machine import IDLE, TABLE
from services.generator.recall import Recall, partial_text, recall
from services.generator.settings import GeneratorSettings, prompt_version
from services.generator.steps import Conversation, JournalSteps, Ports, show_transition
from shared.contracts import (
    ANSWER_DIALOG,
    RESPONSE_GENERATION,
    AnswerDialog,
    Deliberation,
    QueryReceived,
    ResponseGeneration,
)
from shared.envelope import Message, now_ms
from shared.errors import PermanentError
from shared.llm.port import (
    ChatModel,
    ToolCall,
)
from shared.participant.machine import Machine
from shared.participant.service import Context
from shared.participant.tool_client import Caller, ToolClient
from shared.records.journal import (
    EntryType,
    JournalEnded,
    JournalWriter,
    closing,
    journal_key,
    read_journal,
    response_id,
)
from shared.records.sessions import Sessions, Turn
from shared.telemetry.logging import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """What every run of this replica shares."""

    context: Context[GeneratorSettings]
    model: ChatModel
    tools: ToolClient
    sessions: Sessions
    lanes: Lanes


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is ready to be published."""

    answer: Answer
    options: dict[str, Any]
    ratio: float
    deliberations: list[Deliberation] | None


class Stopped(Exception):
    """The query was cancelled before anybody had begun with it."""


class Run:
    """The life of one response at one replica."""

    def __init__(self, parts: Parts, message: Message[QueryReceived], caller: Caller) -> None:
        self._parts = parts
        self._context = parts.context
        self._message = message
        self._query = message.payload
        self._caller = caller
        self._settings = parts.context.settings
        self._response_id = response_id(caller.query_id, caller.respondent_id)
        self._key = journal_key(caller.query_id, caller.respondent_id)
        self._writer: JournalWriter | None = None
        self._ports: Ports | None = None
        self.recall = Recall()

    @property
    def _stored(self) -> bool:
        return self._query.messages is None

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, cancel_flag: str) -> None:
        """Waits for the turn, then becomes the journal's writer. Raises Stopped when the query was cancelled before."""
        flagged = self._context.bus.link.call("EXISTS", cancel_flag)
        if self._stored:
            place = (self._query.session_id, self._caller.query_id, self._query.lane_ticket)
            stopped, mine = await asyncio.gather(flagged, self._parts.lanes.mine(*place))
            if not stopped and not mine:
                async with self._message.parked():
                    await self._parts.lanes.wait(*place)
        else:
            stopped = await flagged
        if stopped:
            raise Stopped
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
        try:
            self._writer, before = await JournalWriter.claim(
                self._context.bus, self._key, data, ttl, fresh=self._message.deliveries == 1
            )
        except JournalEnded:
            # its owner died between the last entry and the acknowledgement
            self.recall = recall(await read_journal(self._context.bus, self._key))
            return
        self.recall = recall(before)
        self._ports = Ports(
            context=self._context,
            model=self._parts.model,
            tools=self._parts.tools,
            writer=self._writer,
            recall=self.recall,
            machine=Machine(TABLE, IDLE),
            caller=self._caller,
            response_id=self._response_id,
            attempt=self._message.deliveries,
        )

    # ── the answer ───────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self) -> Finished | None:
        """The answer; None when everything is written and only the acknowledgement was missing."""
        if self.recall.terminal is not None:
            return None
        assert self._ports is not None
        _, conversation = await in_order([partial(show_transition, self._ports, "RECEIVE"), self._conversation])
        await show_transition(self._ports, "START_GENERATION")
        options = self._settings.sampling(self._query.options)
        question = {"role": "user", "content": self._query.query}
        if self._query.mode == "committee":
            answer, deliberations = await self._committee(conversation, options, question)
        else:
            steps = self._steps(conversation, options)
            answer, deliberations = await run_agent(steps, question, self._settings.max_tool_iterations), None
        return Finished(answer, options, conversation.ratio, deliberations)

    def _steps(
        self,
        conversation: Conversation,
        options: dict[str, Any],
        seat: Seat | None = None,
        among: frozenset[str] | None = None,
    ) -> JournalSteps:
        """The steps of the answer, or of one committee member; `among` bounds the tools further."""
        assert self._ports is not None
        allowed = None if self._query.tools is None else frozenset(self._query.tools)
        if among is not None:
            allowed = among if allowed is None else allowed & among
        return JournalSteps(
            ports=self._ports,
            conversation=conversation,
            model_name=self._query.model or self._settings.model,
            options=options,
            allowed=allowed,
            scope=seat.scope if seat else "",
            labels={"persona": seat.persona, "round": seat.round} if seat else {},
        )

    async def _committee(
        self, conversation: Conversation, options: dict[str, Any], question: ChatMessage
    ) -> tuple[Answer, list[Deliberation]]:
        identities = load_identities(self._settings.identities)
        personas = self._query.personas or list(identities.personas)
        unknown = sorted(set(personas) - set(identities.personas))
        if unknown:
            raise UnknownPersona(f"unknown personas: {', '.join(unknown)}; there are {', '.join(identities.personas)}")

        def open_steps(seat: Seat | None, prompt: str) -> JournalSteps:
            system: list[ChatMessage] = [{"role": "system", "content": prompt}, *conversation.system[1:]]
            talk = replace(conversation, system=system, history=list(conversation.history))
            return self._steps(talk, options, seat, PERSONA_TOOLS if seat else None)

        return await deliberate(
            personas,
            self._query.rounds or self._settings.rounds,
            identities,
            self._system_prompt(),
            question,
            self._settings.max_tool_iterations,
            open_steps,
            self._progress,
            partial(self._retrieve, conversation, options),
        )

    async def _progress(self, what: str, seat: Seat, data: dict[str, Any]) -> None:
        assert self._writer is not None
        kind = EntryType.PERSONA_WORKING if what == "working" else EntryType.PERSONA_DONE
        if (kind, seat.persona, seat.round) not in self.recall.progress:
            await self._writer.append(kind, {"persona": seat.persona, "round": seat.round, **data})

    async def _retrieve(self, conversation: Conversation, options: dict[str, Any]) -> str | None:
        """Memories for the question, when the model cannot ask for them itself."""
        assert self._ports is not None
        if "tools_unsupported" not in self.recall.notices or "search_memory" not in await self._parts.tools.schemas():
            return None
        steps = self._steps(conversation, options, Seat("context", 0), PERSONA_TOOLS)
        call = ToolCall("context", "search_memory", {"query": self._query.query})
        (record,) = await steps.tools(0, [(0, call)])
        return record.result

    async def _conversation(self) -> Conversation:
        system: list[ChatMessage] = [{"role": "system", "content": self._system_prompt()}]
        if self._query.messages is not None:
            given, turns = split_turns([message.model_dump(exclude_none=True) for message in self._query.messages])
            return Conversation([*system, *given], turns)
        query = self._query
        reading = self._parts.sessions.turns(query.session_id, self._caller.respondent_id)
        if self.recall.states < 2:  # START_GENERATION says that it was opened: it may have been deleted since
            owner, turns_kept = await asyncio.gather(self._owner(), reading)
            if owner != query.user_id:
                raise PermanentError(f"session {query.session_id} belongs to another user")
        else:
            turns_kept = await reading
        limit = self._settings.history_turns
        recent = turns_kept[-limit:] if limit else []
        conversation = Conversation(system, [list(turn.messages()) for turn in recent])
        if recent and recent[-1].ratio:
            conversation.ratio = recent[-1].ratio
        return conversation

    async def _owner(self) -> str:
        """Whose the query's session is. One that the gateway has opened (it gives a ticket then) may have been deleted
        since, and must not come back."""
        query, sessions = self._query, self._parts.sessions
        if query.lane_ticket is None:
            return await sessions.open(query.session_id, query.user_id, query.query)
        info = await sessions.info(query.session_id)
        return query.user_id if info is None else info.user_id

    def _system_prompt(self) -> str:
        return f"{self._settings.system_prompt}\n\nToday's date: {date.today().isoformat()}"

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────

    async def complete(self, finished: Finished) -> None:
        """Publishes, stores the turn, then tells the client: whoever has seen `completed` finds all of it done."""
        assert self._ports is not None
        assert self._writer is not None
        await show_transition(self._ports, "PUBLISH")
        query, caller, answer = self._query, self._caller, finished.answer
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
            options=finished.options,
            prompt_version=prompt_version(self._settings.system_prompt),
            usage=answer.usage,
            finish_reason=answer.finish_reason,
            deliberations=finished.deliberations,
            history=query.messages,
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
            commands += self._turn(answer.text, finished.ratio)
        await bus.link.pipe(commands)
        completed: dict[str, Any] = {
            "answer": answer.text,
            "thinking": answer.thinking,
            "tool_calls": [record.model_dump(mode="json") for record in answer.tool_calls],
            "usage": answer.usage.model_dump(),
            "finish_reason": answer.finish_reason,
            "model": answer.model,
        }
        if finished.deliberations is not None:
            completed["deliberations"] = [said.model_dump(mode="json") for said in finished.deliberations]
        await self._end(EntryType.COMPLETED, completed)

    def _turn(self, answer: str, ratio: float | None, *, interrupted: bool = False) -> list[Any]:
        turn = Turn(self._caller.query_id, self._query.query, answer, now_ms(), interrupted, ratio)
        return self._parts.sessions.appending(self._query.session_id, self._caller.respondent_id, turn)

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
        assert self._ports is not None
        if self._ports.machine.state != IDLE:
            await show_transition(self._ports, "RESET", journal=False)
