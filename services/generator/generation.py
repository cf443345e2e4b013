"""The answer of a response: build the model's input, and run the agent loop or the committee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.generator.attachments import Wanted, attached, history_with_files, image_placeholders
from services.generator.client_tool_calls import with_own_steps
from services.generator.committee import PERSONA_ARGUMENTS, PERSONA_TOOLS, Seat, Session, deliberate
from services.generator.compaction import Past
from services.generator.context import Conversation, split_turns
from services.generator.conversation import Instructions, of_session
from services.generator.earlier import Earlier, Loader, given_history, recorded_forms, with_files_of
from services.generator.ending import Finished
from services.generator.grades import last_low_grade, recorded_low_grade
from services.generator.identities import Identities, load_identities
from services.generator.loop import Answer, Message, run_agent
from services.generator.machine import IDLE
from services.generator.opening import check_owner
from services.generator.response_constraints import ResponseConstraints
from services.generator.response_run import ResponseRun, RunDeps
from services.generator.steps import JournalSteps
from shared.contracts import ChatTurnMessage, Deliberation, listed_tools
from shared.envelope import entry_ms
from shared.llm.port import ModelFacts, ToolCall
from shared.records.events import ModelMessage, PersonaDone, PersonaWorking
from shared.records.sessions import Turn
from shared.zones import date_line

# A program's own call is deferred no longer: a user may wait for the program.
_MAX_DEFERRAL_S = 30.0


async def generate(run: ResponseRun, past: Past) -> Finished:
    """Return the answer. past: the turns and the summary of the session. Raises ModelError."""
    query, settings = run.query, run.settings
    if run.message.deliveries > 1 and query.messages is None:
        # The earlier owner may have died before it opened the session.
        await check_owner(run.deps, query, run.caller.query_id)
    await _note_low_grade(run, past.turns)
    conversation = await _conversation(run, past)
    options = settings.sampling(query.options)
    if run.machine.state == IDLE:
        await run.transition("RECEIVE")
        await run.transition("START_GENERATION")
    question = await _question(run)
    identities = load_identities(settings.identities)
    deliberations: list[Deliberation] | None = None
    if query.mode == "committee" and (personas := _members(run, identities)):
        answer, deliberations = await _deliberate(run, conversation, options, question, identities, personas)
    else:
        constraints = ResponseConstraints(await _following(run), query.client_tools, query.answer_schema)
        steps = _steps(run, conversation, options, functions=constraints.functions)
        answer = await run_agent(steps, question, 0 if query.plain else settings.max_tool_iterations, constraints)
    return Finished(
        answer=answer,
        deliberations=deliberations,
        options=options,
        rates=conversation.rates,
        system=conversation.system[0]["content"],
        material=image_placeholders(question) + question["content"].removesuffix(query.query),
        past=past,
    )


# ── what the model reads ─────────────────────────────────────────────────────────────────────────────────────────


async def _note_low_grade(run: ResponseRun, turns: Sequence[Turn]) -> None:
    """Find a low grade of the last answer. The journal gets it first, so that a takeover has the same prompt."""
    query = run.query
    wanted = run.settings.tell_low_grade and run.settings.respondent_id == "A" and not query.plain
    # A client that returns tool results continues a turn whose prompt had the note.
    if not wanted or query.following or recorded_low_grade(run.state) or run.state.newest(ModelMessage):
        return
    found = await last_low_grade(run.deps.context.bus, await _client_turns(run) if query.kept else turns)
    if found is not None:
        await run.writer.append(found.event())


async def _conversation(run: ResponseRun, past: Past) -> Conversation:
    """Return the conversation before the question, from the session or from the client's history."""
    query, low_grade = run.query, recorded_low_grade(run.state)
    note = low_grade.note if low_grade is not None else ""
    instructions = Instructions(_date_line(run), query.system_prompt or "", note)
    prompt = "" if query.plain else instructions.prompt(run.settings.system_prompt)
    if query.messages is None:
        conversation, earlier = await of_session(run.settings, prompt, past, partial(_loader, run))
    else:
        history, earlier = await _given_history(run, query.messages)
        given, turns = split_turns(history)
        conversation = Conversation([{"role": "system", "content": prompt}, *given], turns)
    if earlier.forms and recorded_forms(run.state) is None:
        # Record first: a replica that takes the answer over must send the files in the same form.
        await run.writer.append(earlier.event())
    return conversation


async def _given_history(run: ResponseRun, messages: Sequence[ChatTurnMessage]) -> tuple[Sequence[Message], Earlier]:
    """Return the client's history in the model's form, and its files."""
    if run.query.kept and messages:
        messages = with_files_of(messages, await _client_turns(run))
    read = await with_own_steps(run.deps.context.bus, run.query.user_id, messages) if messages else []
    if not any(message.get("attachments") for message in read):
        return read, Earlier()
    return await given_history(await _loader(run), read)


async def _client_turns(run: ResponseRun) -> Sequence[Turn]:
    """Return the turns of the session that stores a client's history."""
    if run.client_turns is None:
        run.client_turns = await run.deps.sessions.turns(run.query.session_id, "A", run.caller.query_id)
    return run.client_turns


async def _question(run: ResponseRun) -> Message:
    """Return the user's message with the client's material before it, and with its files."""
    query = run.query
    text = (query.material or "") + query.query
    ids = [str(one["id"]) for one in query.attachments or ()]
    if not ids:
        return {"role": "user", "content": text}
    message, run.attachments = await attached(run.deps.files, await _wanted(run), text, ids)
    return message


async def _following(run: ResponseRun) -> list[Message]:
    """Return the client's messages behind the question in the model's form."""
    if not run.query.following:
        return []
    read = await with_own_steps(run.deps.context.bus, run.query.user_id, run.query.following)
    if not any(message.get("attachments") for message in read):
        return read
    return await history_with_files(run.deps.files, await _wanted(run), read)


async def _loader(run: ResponseRun) -> Loader:
    return Loader(run.deps.files, await _wanted(run), recorded_forms(run.state) or {})


async def _wanted(run: ResponseRun) -> Wanted:
    return await wanted_by(run.deps, run.caller.user_id, run.query.model or run.settings.model)


async def wanted_by(deps: RunDeps, user_id: str, model: str) -> Wanted:
    """Return the user and the model for which files are read."""
    settings = deps.context.settings
    # The demonstration model reads no images, although its server may say so.
    facts = ModelFacts(abilities=frozenset()) if settings.demo else await deps.model.facts(model)
    return Wanted(user_id, model, facts, settings.num_ctx)


def _date_line(run: ResponseRun) -> str:
    """Return the date line for the acceptance of the query: it is the same after a takeover."""
    return date_line(entry_ms(run.caller.query_id), run.caller.time_zone)


# ── who answers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(
    run: ResponseRun,
    conversation: Conversation,
    options: dict[str, Any],
    seat: Seat | None = None,
    among: frozenset[str] | None = None,
    functions: Sequence[dict[str, Any]] = (),
) -> JournalSteps:
    """Return the steps of the answer, or of one committee member. among: the only tools that may be offered."""
    query = run.query
    allowed = None if query.tools is None else listed_tools(query.tools)
    if among is not None:
        allowed = among if allowed is None else allowed & among
    return JournalSteps(
        run=run,
        conversation=conversation,
        model_name=query.model or run.settings.model,
        options=options,
        allowed=allowed,
        scope=seat.scope if seat else "",
        labels={"persona": seat.persona, "round": seat.round} if seat else {},
        functions=functions,
        think=run.settings.think if query.think is None else query.think,
        max_deferral_s=_MAX_DEFERRAL_S if query.plain else None,
    )


def _members(run: ResponseRun, identities: Identities) -> list[str]:
    """Return the personas that deliberate. Raises UnknownPersona."""
    named = run.query.personas
    return run.settings.members if named is None else identities.named(named)


async def _deliberate(
    run: ResponseRun,
    conversation: Conversation,
    options: dict[str, Any],
    question: Message,
    identities: Identities,
    personas: Sequence[str],
) -> tuple[Answer, list[Deliberation]]:
    settings = run.settings
    session = Session(
        personas,
        run.query.rounds or settings.rounds,
        settings.parallel,
        settings.persona_tool_iterations,
        settings.max_tool_iterations,
        _date_line(run),
    )

    def open_steps(seat: Seat | None, prompt: str) -> JournalSteps:
        system: list[Message] = [{"role": "system", "content": prompt}, *conversation.system[1:]]
        talk = replace(conversation, system=system, history=list(conversation.history))
        steps = _steps(run, talk, options, seat, PERSONA_TOOLS if seat else None)
        return replace(steps, arguments=PERSONA_ARGUMENTS, parallel=session.parallel) if seat else steps

    answer, deliberations = await deliberate(
        session,
        identities,
        conversation.system[0]["content"],
        question,
        open_steps,
        partial(_progress, run),
        partial(_retrieve, run, conversation, options),
    )
    answer.usage = answer.usage.model_copy(update=run.state.spent)
    return answer, deliberations


async def _progress(run: ResponseRun, what: str, seat: Seat, data: dict[str, Any]) -> None:
    """Write that a persona works or is done, unless the journal has it."""
    model = PersonaWorking if what == "working" else PersonaDone
    if all(event.speaker != (seat.persona, seat.round) for event in run.state.events(model)):
        await run.writer.append(model(persona=seat.persona, round=seat.round, **data))


async def _retrieve(run: ResponseRun, conversation: Conversation, options: dict[str, Any]) -> str | None:
    """Return memories for the question if the model cannot call tools."""
    if not run.has_notice("tools_unsupported") or "search_memory" not in await run.deps.tools.schemas():
        return None
    steps = _steps(run, conversation, options, Seat("context", 0), PERSONA_TOOLS)
    call = ToolCall("context", "search_memory", {"query": run.query.query})
    (record,) = await replace(steps, arguments=PERSONA_ARGUMENTS).tools(0, [(0, call)])
    return record.result
