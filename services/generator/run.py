"""The life of one response at one replica: its turn, its journal, its answer, and what is published of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from services.generator.attachments import Wanted, attached, history_with_files, told_of_images
from services.generator.committee import PERSONA_ARGUMENTS, PERSONA_TOOLS, Seat, Session, deliberate
from services.generator.compaction import Past, due
from services.generator.context import IMAGE_TOKENS, Conversation, Rates, split_turns
from services.generator.conversation import Instructions, of_session
from services.generator.deltas import Beat
from services.generator.earlier import Earlier, Loader, given_history, with_files_of
from services.generator.grades import last_low_grade
from services.generator.handed import as_the_model_reads, handed_id
from services.generator.identities import Identities, load_identities
from services.generator.lane import Lanes
from services.generator.loop import Answer, run_agent
from services.generator.loop import Message as ChatMessage
from services.generator.machine import IDLE
from services.generator.recall import partial_text
from services.generator.results import as_observed, as_told
from services.generator.settings import GeneratorSettings
from services.generator.steps import JournalSteps, Ports, show_transition, stepped
from services.generator.terms import Terms
from shared.bus import Command
from shared.contracts import (
    ANSWER_DIALOG,
    MOST_MATERIAL,
    RESPONSE_GENERATION,
    SESSION_SUMMARISE,
    AnswerDialog,
    ChatTurnMessage,
    Deliberation,
    Outgoing,
    QueryReceived,
    ResponseGeneration,
    SessionSummarise,
    listed_tools,
    prompt_version,
)
from shared.envelope import Message, entry_ms, now_ms
from shared.errors import PermanentError
from shared.llm.port import (
    ChatModel,
    ModelFacts,
    ToolCall,
)
from shared.participant.files import Files
from shared.participant.service import Context
from shared.participant.tool_client import ToolClient
from shared.records.folding import Folding
from shared.records.journal import EntryType, closing, read_journal
from shared.records.sessions import Sessions, Turn, title_of
from shared.records.steps import keeping, unanswered
from shared.telemetry.logging import get_logger
from shared.zones import date_line

log = get_logger()

# A program that asks something of its own may keep a person waiting for it.
_CHORE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What every run of this replica shares. behind: a model for what comes after all people's queries, given what to
    be in while it waits."""

    context: Context[GeneratorSettings]
    model: ChatModel
    tools: ToolClient
    sessions: Sessions
    lanes: Lanes
    behind: Callable[[Callable[[], AbstractAsyncContextManager[None]]], ChatModel]
    files: Files
    beat: Beat = field(default_factory=Beat)


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is ready to be published, and what the model was given for it. material: what it read before the
    question. past: what the session held."""

    answer: Answer
    deliberations: list[Deliberation] | None
    options: dict[str, Any]
    rates: Rates
    system: str
    material: str
    past: Past


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The user wants no answer any more."""


Ending = Finished | Failure | Cancelled


async def check_owner(parts: Parts, query: QueryReceived, query_id: str) -> None:
    """Raises PermanentError when the session is not the user's; makes it where it is not there, for an answer that is
    shown. One that was deleted after the query was accepted does not come back."""
    if parts.context.settings.respondent_id == "A":
        title = title_of(query.query, query.attachments)
        check_known(query, await parts.sessions.open(query.session_id, query.user_id, title, query_id))
    elif (info := await parts.sessions.info(query.session_id)) is not None:
        check_known(query, info.user_id)


def check_known(query: QueryReceived, owner: str | None) -> None:
    """The same, when it is known whose session it is."""
    if owner not in (None, query.user_id):
        raise PermanentError(f"session {query.session_id} belongs to another user")


async def wanted_by(parts: Parts, user_id: str, model: str) -> Wanted:
    """Return the user and the model for which files are read."""
    settings = parts.context.settings
    # the demonstration model sees nothing, whatever its server says
    facts = ModelFacts(abilities=frozenset()) if settings.demo else await parts.model.facts(model)
    return Wanted(user_id, model, facts, settings.num_ctx)


class Response:
    """One response whose journal is ours to write: its answer, and how it ends."""

    def __init__(self, parts: Parts, message: Message[QueryReceived], ports: Ports, folding: Folding) -> None:
        self._parts = parts
        self._folding = folding
        # the text of the turn that was kept
        self._turned: str | None = None
        self._message = message
        self._query = message.payload
        self._ports = ports
        self._settings = ports.context.settings
        self._of_client: Sequence[Turn] | None = None
        self._attachments: Sequence[Mapping[str, Any]] = self._query.attachments or ()

    @property
    def waits(self) -> str:
        """Why the model cannot be asked, while it is waited for."""
        return self._ports.waits

    # ── the answer ───────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, past: Past) -> Finished:
        """The answer. `past`: what the session holds."""
        if self._message.deliveries > 1 and self._query.messages is None:
            # whoever had it before may have died before the session was opened
            await check_owner(self._parts, self._query, self._message.entry_id)
        await self._look_at_grade(past.turns)
        conversation = await self._conversation(past)
        options = self._settings.sampling(self._query.options)
        if self._ports.machine.state == IDLE:
            await show_transition(self._ports, "RECEIVE")
            await show_transition(self._ports, "START_GENERATION")
        question = await self._question()
        answer, deliberations = await self._answer(conversation, question, options)
        material = told_of_images(question) + question["content"].removesuffix(self._query.query)
        return Finished(
            answer, deliberations, options, conversation.rates, conversation.system[0]["content"], material, past
        )

    async def _look_at_grade(self, turns: Sequence[Turn]) -> None:
        """What the model is to know of its last grade; written down first, so that a takeover tells the same."""
        query, ports = self._query, self._ports
        asked = self._settings.tell_low_grade and self._settings.respondent_id == "A" and not query.plain
        # in the middle of a turn, when a client brings its tools' results, it was told before
        if not asked or query.following or ports.recall.low_grade is not None or ports.recall.replies:
            return
        if query.kept:
            turns = await self._turns_kept()
        found = await last_low_grade(ports.context.bus, turns)
        if found is not None:
            await ports.writer.append(EntryType.NOTICE, found.entry())
            ports.recall.low_grade = found

    async def _answer(
        self, conversation: Conversation, question: ChatMessage, options: dict[str, Any]
    ) -> tuple[Answer, list[Deliberation] | None]:
        identities = load_identities(self._settings.identities)
        if self._query.mode == "committee" and (personas := self._members(identities)):
            return await self._committee(conversation, options, question, identities, personas)
        query = self._query
        following = await self._following(query.following or ())
        terms = Terms(following, query.client_tools, query.answer_schema)
        steps = self._steps(conversation, options, functions=terms.functions)
        rounds = 0 if query.plain else self._settings.max_tool_iterations
        return await run_agent(steps, question, rounds, terms), None

    async def _question(self) -> ChatMessage:
        """What the user says, with what the client put before it and the files that belong to it."""
        query = self._query
        said = (query.material or "") + query.query
        ids = [str(one["id"]) for one in query.attachments or ()]
        if not ids:
            return {"role": "user", "content": said}
        message, self._attachments = await attached(self._parts.files, await self._wanted(), said, ids)
        return message

    async def _wanted(self) -> Wanted:
        return await wanted_by(self._parts, self._ports.caller.user_id, self._query.model or self._settings.model)

    async def _following(self, messages: Sequence[ChatTurnMessage]) -> list[ChatMessage]:
        """Return the client's messages behind the question in the model's form."""
        if not messages:
            return []
        read = await as_the_model_reads(self._ports.context.bus, self._query.user_id, messages)
        if not any(message.get("attachments") for message in read):
            return read
        return await history_with_files(self._parts.files, await self._wanted(), read)

    def _steps(
        self,
        conversation: Conversation,
        options: dict[str, Any],
        seat: Seat | None = None,
        among: frozenset[str] | None = None,
        functions: Sequence[dict[str, Any]] = (),
    ) -> JournalSteps:
        """The steps of the answer, or of one committee member; `among` bounds the tools further."""
        allowed = None if self._query.tools is None else listed_tools(self._query.tools)
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
            functions=functions,
            think=self._settings.think if self._query.think is None else self._query.think,
            put_off=_CHORE_SECONDS if self._query.plain else None,
        )

    def _members(self, identities: Identities) -> list[str]:
        """Who deliberates. Raises UnknownPersona."""
        named = self._query.personas
        return self._settings.members if named is None else identities.named(named)

    async def _committee(
        self,
        conversation: Conversation,
        options: dict[str, Any],
        question: ChatMessage,
        identities: Identities,
        personas: Sequence[str],
    ) -> tuple[Answer, list[Deliberation]]:
        settings = self._settings
        session = Session(
            personas,
            self._query.rounds or settings.rounds,
            settings.parallel,
            settings.persona_tool_iterations,
            settings.max_tool_iterations,
            self._date_line(),
        )

        def open_steps(seat: Seat | None, prompt: str) -> JournalSteps:
            system: list[ChatMessage] = [{"role": "system", "content": prompt}, *conversation.system[1:]]
            talk = replace(conversation, system=system, history=list(conversation.history))
            steps = self._steps(talk, options, seat, PERSONA_TOOLS if seat else None)
            return replace(steps, arguments=PERSONA_ARGUMENTS, aside=session.parallel) if seat else steps

        answer, said = await deliberate(
            session,
            identities,
            conversation.system[0]["content"],
            question,
            open_steps,
            self._progress,
            partial(self._retrieve, conversation, options),
        )
        answer.usage = answer.usage.model_copy(update=self._ports.recall.spent())
        return answer, said

    async def _progress(self, what: str, seat: Seat, data: dict[str, Any]) -> None:
        kind = EntryType.PERSONA_WORKING if what == "working" else EntryType.PERSONA_DONE
        if (kind, seat.persona, seat.round) not in self._ports.recall.progress:
            await self._ports.writer.append(kind, {"persona": seat.persona, "round": seat.round, **data})

    async def _retrieve(self, conversation: Conversation, options: dict[str, Any]) -> str | None:
        """Memories for the question, when the model cannot ask for them itself."""
        unsupported = "tools_unsupported" in self._ports.recall.notices
        if not unsupported or "search_memory" not in await self._parts.tools.schemas():
            return None
        steps = self._steps(conversation, options, Seat("context", 0), PERSONA_TOOLS)
        call = ToolCall("context", "search_memory", {"query": self._query.query})
        (record,) = await replace(steps, arguments=PERSONA_ARGUMENTS).tools(0, [(0, call)])
        return record.result

    async def _conversation(self, past: Past) -> Conversation:
        query, ports = self._query, self._ports
        prompt = "" if query.plain else self._instructions().prompt(self._settings.system_prompt)
        if query.messages is None:
            conversation, earlier = await of_session(self._settings, prompt, past, self._loader)
        else:
            history, earlier = await self._given_history(query.messages)
            given, turns = split_turns(history)
            conversation = Conversation([{"role": "system", "content": prompt}, *given], turns)
        if earlier.forms and ports.recall.earlier is None:
            # Record first: a replica that takes the answer over must send the files in the same form.
            await ports.writer.append(EntryType.ATTACHMENTS, earlier.entry())
            ports.recall.earlier = dict(earlier.forms)
        return conversation

    async def _given_history(self, messages: Sequence[ChatTurnMessage]) -> tuple[Sequence[ChatMessage], Earlier]:
        """Return the client's history in the model's form, and its files."""
        if self._query.kept and messages:
            messages = with_files_of(messages, await self._turns_kept())
        read = await as_the_model_reads(self._ports.context.bus, self._query.user_id, messages) if messages else []
        if not any(message.get("attachments") for message in read):
            return read, Earlier()
        return await given_history(await self._loader(), read)

    async def _turns_kept(self) -> Sequence[Turn]:
        """Return the turns of the session that stores a client's history."""
        if self._of_client is None:
            caller = self._ports.caller
            self._of_client = await self._parts.sessions.turns(self._query.session_id, "A", caller.query_id)
        return self._of_client

    async def _loader(self) -> Loader:
        return Loader(self._parts.files, await self._wanted(), self._ports.recall.earlier or {})

    def _instructions(self) -> Instructions:
        told = self._ports.recall.low_grade
        return Instructions(self._date_line(), self._query.system_prompt or "", told.note if told is not None else "")

    def _date_line(self) -> str:
        """Return the date line for the acceptance of the query: it is the same after a takeover."""
        caller = self._ports.caller
        return date_line(entry_ms(caller.query_id), caller.time_zone)

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────

    async def end(self, ending: Ending) -> None:
        """Raises Fenced when somebody else has taken over."""
        if self._query.first:
            # whoever accepted it may have died before the session was made
            await check_owner(self._parts, self._query, self._ports.caller.query_id)
        match ending:
            case Finished():
                await self._complete(ending)
            case Failure(code, text):
                log.warning("query.failed", code=code, reason=text)
                await self._fail_state()
                await self._end(EntryType.FAILED, {"code": code, "message": text, "usage": self._ports.recall.spent()})
            case Cancelled():
                await self._cancelled()

    async def _complete(self, finished: Finished) -> None:
        """Publishes, stores the turn, then tells the client: whoever has seen `completed` finds all of it done.

        Calls that are handed to the client are no answer yet, and a plain call of the model is none of the agent's:
        neither is published, so that nothing of them is remembered or judged.
        """
        await show_transition(self._ports, "PUBLISH")
        query, caller, answer = self._query, self._ports.caller, finished.answer
        if not answer.handed and not query.plain:
            await self._publish(finished)
        large = self._ports.writer.large
        completed: dict[str, Any] = {
            "answer": answer.text,
            "said_before": answer.said_before,
            "thinking": answer.thinking,
            "tool_calls": [as_told(record, large) for record in answer.tool_calls],
            "usage": answer.usage.model_dump(),
            "finish_reason": answer.finish_reason,
            "model": answer.model,
        }
        if answer.handed:
            completed["client_calls"] = [
                {"id": handed_id(caller.query_id, handed), "name": handed.call.name, "args": handed.call.args}
                for handed in answer.handed
            ]
        if finished.deliberations is not None:
            completed["deliberations"] = [said.model_dump(mode="json") for said in finished.deliberations]
        await self._end(EntryType.COMPLETED, completed)

    async def _publish(self, finished: Finished) -> None:
        query, caller, answer = self._query, self._ports.caller, finished.answer
        generation = ResponseGeneration(
            query_id=caller.query_id,
            response_id=self._ports.response_id,
            session_id=query.session_id,
            user_id=query.user_id,
            respondent_id=self._settings.respondent_id,
            generator_id=self._settings.name,
            query=query.query,
            answer=self._begun() + answer.text,
            thinking=answer.thinking,
            tool_calls=[as_observed(record) for record in answer.tool_calls],
            model=answer.model,
            options=finished.options,
            own_options=self._settings.own_options,
            prompt_version=prompt_version(self._settings.system_prompt),
            usage=answer.usage,
            finish_reason=answer.finish_reason,
            deliberations=finished.deliberations,
            material=finished.material[:MOST_MATERIAL] or None,
            history=query.messages,
            system=finished.system,
            time_zone=caller.time_zone,
        )
        dialog = AnswerDialog(
            session_id=query.session_id,
            query_id=caller.query_id,
            query=query.query,
            answer=answer.text,
            respondent_id=self._settings.respondent_id,
        )
        headers = {**caller.headers(), "causation_id": self._message.envelope.id}
        messages = [
            RESPONSE_GENERATION.of(generation, once=self._ports.response_id, **headers),
            ANSWER_DIALOG.of(dialog, once=self._ports.response_id, **headers),
        ]
        turn: list[Command] = []
        if query.messages is None:
            turn = [*self._turn(answer.text, finished.rates), *self._to_be_summarised(finished)]
        elif query.kept:
            # a session that is new begins with its first answer
            await check_owner(self._parts, query, caller.query_id)
            turn = self._turn(self._told(answer), finished.rates)
        await self._ports.writer.publish(messages, turn)

    def _to_be_summarised(self, finished: Finished) -> list[Command]:
        """Asks for a summary of the older turns when the history nears the context."""
        query, caller, settings, usage = self._query, self._ports.caller, self._settings, finished.answer.usage
        if not settings.compacts or settings.respondent_id != "A" or not settings.history_turns:
            return []
        answered = Turn(caller.query_id, query.query, finished.answer.text, 0)
        until = due(
            finished.past.after,
            answered,
            usage.context_tokens,
            usage.context_window,
            settings.history_turns,
            finished.rates.ratio,
        )
        if until is None:
            return []
        wish = SessionSummarise(session_id=query.session_id, user_id=query.user_id, until=until)
        headers = {"session_id": query.session_id, "user_id": query.user_id, "causation_id": self._message.envelope.id}
        # asked twice it makes one summary: no key says that it was
        return [self._ports.context.bus.publishing(SESSION_SUMMARISE.of(wish, **headers))]

    def _told(self, answer: Answer) -> str:
        """The answer as a client has it that keeps the history itself: behind what it gave as its beginning, and with
        what was said before calls of our tools."""
        said = [answer.text] if self._query.answer_schema else [*answer.said_before, answer.text]
        return self._begun() + "\n\n".join(part for part in said if part)

    def _begun(self) -> str:
        """The beginning of the answer that the client gave."""
        last = self._query.following[-1] if self._query.following else None
        return last.content if last and last.role == "assistant" and not last.tool_calls else ""

    def _turn(self, answer: str, rates: Rates | None, *, interrupted: bool = False) -> list[Any]:
        caller = self._ports.caller
        told = self._ports.recall.low_grade
        noted = told.about if told is not None else None
        turn = Turn(
            caller.query_id,
            self._query.query,
            answer,
            now_ms(),
            interrupted,
            ratio=rates.ratio if rates is not None else None,
            noted=noted,
            after=self._query.after,
            attachments=self._attachments,
            image_tokens=rates.image if rates is not None and rates.image != IMAGE_TOKENS else None,
        )
        self._turned = answer
        return self._parts.sessions.appending(self._query.session_id, caller.respondent_id, turn)

    async def _cancelled(self) -> None:
        """What had been written of the answer is kept in the session, marked as interrupted."""
        bus = self._ports.context.bus
        answer, thinking = partial_text(await read_journal(bus, self._ports.writer.key))
        await self._fail_state()
        if self._query.messages is None and answer.strip():
            await bus.link.pipe(self._turn(answer, None, interrupted=True))
        spent = self._ports.recall.spent()
        await self._end(EntryType.CANCELLED, {"answer": answer, "thinking": thinking, "usage": spent})

    async def _fail_state(self) -> None:
        if self._ports.machine.state != IDLE:
            self._ports.recall.states = 0
            await show_transition(self._ports, "FAIL")

    async def _end(self, kind: EntryType, data: dict[str, Any]) -> None:
        writer = self._ports.writer
        self._folding.add(writer.next_position, kind, data)
        last: list[Outgoing] = []
        if self._ports.machine.state != IDLE:
            # the journal ends before it
            _, last = stepped(self._ports, "RESET")
        also = [closing(writer.key, self._settings.retention), *self._kept(kind, data)]
        await writer.append(kind, data, also, messages=last)

    def _kept(self, kind: EntryType, data: dict[str, Any]) -> list[Command]:
        """Keeps what happened with the session, for people: of its turns, and of questions that have no answer."""
        query, caller = self._query, self._ports.caller
        why = unanswered(query, kind, data) if self._turned is None else None
        if query.plain or caller.respondent_id != "A" or (self._turned is None and why is None):
            return []
        events = self._folding.events(self._turned)
        return [keeping(query.session_id, caller.query_id, events, why)]
