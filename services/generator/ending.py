"""The end of a response: publish and store its result, and write the journal's terminal entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.generator.attachments import AttachmentMissing, AttachmentsUnavailable
from services.generator.client_tool_calls import client_call_id
from services.generator.compaction import Past, due
from services.generator.context import IMAGE_TOKENS, Rates
from services.generator.grades import recorded_low_grade
from services.generator.identities import UnknownPersona
from services.generator.loop import Answer
from services.generator.machine import IDLE
from services.generator.opening import check_owner
from services.generator.response_constraints import UnusableForm
from services.generator.response_run import ResponseRun
from services.generator.results import ended_call, published_call
from shared.bus import Command
from shared.contracts import (
    ANSWER_DIALOG,
    MOST_MATERIAL,
    RESPONSE_GENERATION,
    SESSION_SUMMARISE,
    AnswerDialog,
    Deliberation,
    Outgoing,
    ResponseGeneration,
    SessionSummarise,
    Usage,
    prompt_version,
)
from shared.envelope import now_ms
from shared.llm.port import ContextOverflow, ModelError, ModelMissing, ModelRejected, ModelUnavailable
from shared.records import events
from shared.records.compaction import compacted
from shared.records.events import Entry, KnownEvent
from shared.records.journal import closing, read_journal
from shared.records.response_state import ResponseState, apply, replay
from shared.records.sessions import Turn
from shared.records.steps import keeping, unanswered
from shared.telemetry.logging import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete answer, and the model's input. material: the text before the question. past: the session's past."""

    answer: Answer
    deliberations: list[Deliberation] | None
    options: dict[str, Any]
    rates: Rates
    system: str
    material: str
    past: Past


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why there is no answer."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The user has cancelled the query."""


Ending = Finished | Failure | Cancelled

_FAILURE_CODES: tuple[tuple[type[ModelError], str], ...] = (
    (UnknownPersona, "unknown_persona"),
    (UnusableForm, "bad_request"),
    (AttachmentMissing, "attachment_missing"),
    (AttachmentsUnavailable, "memory_unavailable"),
    (ModelMissing, "model_missing"),
    (ModelRejected, "model_rejected"),
    (ContextOverflow, "context_overflow"),
    (ModelUnavailable, "model_unavailable"),
)


def failure_of(error: ModelError) -> Failure:
    """Return the failure that an error of the generation is for the client."""
    code = next((code for kind, code in _FAILURE_CODES if isinstance(error, kind)), "model_error")
    return Failure(code, str(error))


async def end(run: ResponseRun, ending: Ending) -> None:
    """Publish and store the result, and write the terminal entry. Raises Fenced if another replica owns the journal."""
    if run.query.first:
        # The gateway may have died before it made the session.
        await check_owner(run.deps, run.query, run.caller.query_id)
    match ending:
        case Finished():
            await _complete(run, ending)
        case Failure(code, text):
            log.warning("query.failed", code=code, reason=text)
            await _fail_state(run)
            await _close(run, events.Failed(code=code, message=text, usage=Usage(**run.state.spent)))
        case Cancelled():
            await _cancel(run)


async def _complete(run: ResponseRun, finished: Finished) -> None:
    """Publish, store the turn, then write `completed`: a client that reads `completed` finds all of it done.

    Client tool calls are not an answer yet, and a plain call is not the agent's. Neither is published: memory and
    critic must not store or judge them.
    """
    await run.transition("PUBLISH")
    answer = finished.answer
    if not answer.client_calls and not run.query.plain:
        await _publish(run, finished)
    completed: dict[str, Any] = {
        "answer": answer.text,
        "said_before": answer.said_before,
        "thinking": answer.thinking,
        "tool_calls": [ended_call(record, run.writer.large) for record in answer.tool_calls],
        "usage": answer.usage.model_dump(),
        "finish_reason": answer.finish_reason,
        "model": answer.model,
    }
    if answer.client_calls:
        completed["client_calls"] = [
            {"id": client_call_id(run.caller.query_id, one), "name": one.call.name, "args": one.call.args}
            for one in answer.client_calls
        ]
    if finished.deliberations is not None:
        completed["deliberations"] = [one.model_dump(mode="json") for one in finished.deliberations]
    await _close(run, events.Completed(**completed))


async def _publish(run: ResponseRun, finished: Finished) -> None:
    """Publish the answer, and store its turn in the same write."""
    query, caller, answer = run.query, run.caller, finished.answer
    generation = ResponseGeneration(
        query_id=caller.query_id,
        response_id=run.response_id,
        session_id=query.session_id,
        user_id=query.user_id,
        respondent_id=run.settings.respondent_id,
        generator_id=run.settings.name,
        query=query.query,
        answer=_prefill(run) + answer.text,
        thinking=answer.thinking,
        tool_calls=[published_call(record) for record in answer.tool_calls],
        model=answer.model,
        options=finished.options,
        own_options=run.settings.own_options,
        prompt_version=prompt_version(run.settings.system_prompt),
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
        respondent_id=run.settings.respondent_id,
    )
    headers = {**caller.headers(), "causation_id": run.message.envelope.id}
    messages = [
        RESPONSE_GENERATION.of(generation, once=run.response_id, **headers),
        ANSWER_DIALOG.of(dialog, once=run.response_id, **headers),
    ]
    turn: list[Command] = []
    if query.messages is None:
        turn = [*_store_turn(run, run.state, answer.text, finished.rates), *_request_summary(run, finished)]
    elif query.kept:
        # A new session is made with its first answer.
        await check_owner(run.deps, query, caller.query_id)
        turn = _store_turn(run, run.state, _final_text(run, answer), finished.rates)
    await run.writer.publish(messages, turn)


def _request_summary(run: ResponseRun, finished: Finished) -> list[Command]:
    """Return the request for a summary of the older turns if the history nears the context; else nothing."""
    query, caller, settings, usage = run.query, run.caller, run.settings, finished.answer.usage
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
    request = SessionSummarise(session_id=query.session_id, user_id=query.user_id, until=until)
    headers = {"session_id": query.session_id, "user_id": query.user_id, "causation_id": run.message.envelope.id}
    # No idempotency key: a repeated request makes one summary.
    return [run.deps.context.bus.publishing(SESSION_SUMMARISE.of(request, **headers))]


def _final_text(run: ResponseRun, answer: Answer) -> str:
    """Return the answer as a client that sends the history has it: with its own beginning, and with the texts before
    calls of our tools."""
    texts = [answer.text] if run.query.answer_schema else [*answer.said_before, answer.text]
    return _prefill(run) + "\n\n".join(text for text in texts if text)


def _prefill(run: ResponseRun) -> str:
    """Return the beginning of the answer that the client gave."""
    last = run.query.following[-1] if run.query.following else None
    return last.content if last and last.role == "assistant" and not last.tool_calls else ""


def _store_turn(
    run: ResponseRun, state: ResponseState, answer: str, rates: Rates | None, *, interrupted: bool = False
) -> list[Command]:
    """Return the commands that store the turn."""
    low_grade = recorded_low_grade(state)
    turn = Turn(
        run.caller.query_id,
        run.query.query,
        answer,
        now_ms(),
        interrupted,
        ratio=rates.ratio if rates is not None else None,
        noted=low_grade.about if low_grade is not None else None,
        after=run.query.after,
        attachments=run.attachments,
        image_tokens=rates.image if rates is not None and rates.image != IMAGE_TOKENS else None,
    )
    run.saved_text = answer
    return run.deps.sessions.appending(run.query.session_id, run.caller.respondent_id, turn)


async def _cancel(run: ResponseRun) -> None:
    """Store the partial answer in the session as an interrupted turn, and end the journal."""
    bus = run.deps.context.bus
    # Entries on their way when the query was cancelled may be missing in the journal: read it again.
    state = replay(entry.typed() for entry in await read_journal(bus, run.writer.key))
    answer, thinking = state.answer, state.thinking
    await _fail_state(run)
    if run.query.messages is None and answer.strip():
        await bus.link.pipe(_store_turn(run, state, answer, None, interrupted=True))
    await _close(run, events.Cancelled(answer=answer, thinking=thinking, usage=Usage(**state.spent)))


async def _fail_state(run: ResponseRun) -> None:
    if run.machine.state != IDLE:
        # The journal does not have this transition, wherever the replay stands.
        run.transitions_left = 0
        await run.transition("FAIL")


async def _close(run: ResponseRun, end: KnownEvent) -> None:
    """Write the terminal entry, the session's record and the last transition."""
    last: list[Outgoing] = []
    if run.machine.state != IDLE:
        # Only a message: the journal ends before this transition.
        _, last = run.step("RESET")
    also = [closing(run.writer.key, run.settings.retention), *_store_record(run, end)]
    await run.writer.append(end, also, messages=last)


def _store_record(run: ResponseRun, end: KnownEvent) -> list[Command]:
    """Return the command that stores the query's record in its session; none for queries without a record."""
    query, caller = run.query, run.caller
    why = unanswered(query, end) if run.saved_text is None else None
    if query.plain or caller.respondent_id != "A" or (run.saved_text is None and why is None):
        return []
    ended = apply(run.writer.state, Entry(run.writer.next_position, now_ms(), end))
    return [keeping(query.session_id, caller.query_id, compacted(ended, run.saved_text), why)]
