"""The beginning of a response: the query's place in its session's queue, the journal's claim, the session's history."""

from __future__ import annotations

from collections.abc import Sequence

from services.generator.compaction import Past
from services.generator.machine import IDLE, TABLE
from services.generator.response_run import ResponseRun, RunDeps, transition_event, transition_message
from shared.bus import Command
from shared.bus.keys import cancel_key, journal_key
from shared.bus.replies import Reply
from shared.contracts import QueryReceived
from shared.envelope import Message, entry_ms
from shared.errors import PermanentError
from shared.participant.machine import Machine
from shared.participant.tool_client import Caller
from shared.records.events import Attached, Claimed, Transition
from shared.records.journal import JournalEnded, JournalWriter, response_id
from shared.records.sessions import title_of
from shared.records.steps import keep_ended
from shared.records.summaries import reading, summary_of

_FIRST_ACTIONS = ("RECEIVE", "START_GENERATION")


def deadline_of(deps: RunDeps, message: Message[QueryReceived]) -> int:
    """Return the query's deadline in ms, by the clock of the bus, which made the entry's id as well."""
    seconds = deps.context.settings.deadline_seconds
    return message.envelope.deadline or entry_ms(message.entry_id) + int(seconds * 1000)


def seconds_left(deps: RunDeps, message: Message[QueryReceived]) -> float:
    """Return the seconds until the query's deadline."""
    return deps.context.bus.left(deadline_of(deps, message), message.entry_id)


async def wait_for_turn(deps: RunDeps, message: Message[QueryReceived], caller: Caller) -> bool:
    """Wait until the query is first in its session's queue; return False if it was cancelled before."""
    # Later deliveries must check: the queue may have changed since the query was accepted.
    accepted_as_first = message.deliveries == 1 and caller.respondent_id in message.envelope.turn
    if accepted_as_first or message.payload.messages is not None:
        return True
    if await deps.context.bus.link.call("EXISTS", cancel_key(caller.query_id)):
        return False
    place = (message.payload.session_id, caller.query_id)
    if not await deps.session_queues.is_head(*place):
        async with message.suspended():
            await deps.session_queues.wait(*place)
    return True


async def claim_response(
    deps: RunDeps, message: Message[QueryReceived], caller: Caller, *, starts: bool = False
) -> ResponseRun | None:
    """Claim the response's journal and return its run; None if the journal has its terminal entry.

    starts: write the first transitions of a new journal together with the claim.
    """
    context, query = deps.context, message.payload
    # A gateway of another release may send more fields.
    files = [Attached.model_validate(file, extra="ignore") for file in query.attachments or ()]
    claimed = Claimed(
        query_id=caller.query_id,
        response_id=response_id(caller.query_id, caller.respondent_id),
        session_id=query.session_id,
        respondent_id=caller.respondent_id,
        replica=context.replica,
        model=query.model or context.settings.model,
        attempt=message.deliveries,
        **({"attachments": files} if files else {}),
    )
    ttl = max(0, int(seconds_left(deps, message))) + context.settings.retention
    journal = (journal_key(caller.query_id, caller.respondent_id), claimed, ttl)
    if message.deliveries == 1:
        machine = Machine(TABLE, IDLE)
        steps = [machine.step(action) for action in _FIRST_ACTIONS] if starts else []
        states = [transition_event(step) for step in steps]
        messages = [transition_message(context, caller, step) for step in steps]
        new = await JournalWriter.begin(context.bus, *journal, states, messages)
        if new is not None:
            return build_run(deps, message, caller, new, machine)
    try:
        writer, _ = await JournalWriter.claim(context.bus, *journal)
    except JournalEnded:
        if not query.plain and caller.respondent_id == "A":
            # The earlier owner may have died before it stored the session's record.
            await keep_ended(context.bus, query, caller.query_id)
        return None
    if writer.state.end is not None:
        return None
    transitions = sum(1 for _ in writer.state.events(Transition))
    return build_run(deps, message, caller, writer, Machine(TABLE, IDLE), transitions)


def build_run(
    deps: RunDeps,
    message: Message[QueryReceived],
    caller: Caller,
    writer: JournalWriter,
    machine: Machine,
    transitions_left: int = 0,
) -> ResponseRun:
    """Return the run of a claimed journal. transitions_left: the transitions of earlier owners."""
    model = deps.background_model(message.suspended) if message.payload.plain else deps.model
    return ResponseRun(deps, message, caller, model, writer, machine, transitions_left)


async def load_past(run: ResponseRun) -> Past | None:
    """Return the turns and the summary of the query's session; None if the query was cancelled.

    Raises PermanentError if the session belongs to another user.
    """
    query, caller, sessions = run.query, run.caller, run.deps.sessions
    first_delivery = run.message.deliveries == 1
    commands: list[Command] = [("EXISTS", cancel_key(caller.query_id))]
    # At a later delivery the session may have turns already.
    has_past = query.messages is None and not (query.first and first_delivery)
    if has_past:
        commands += [*sessions.newest(query.session_id, caller.respondent_id), reading(query.session_id)]
        if first_delivery:
            title = title_of(query.query, query.attachments)
            commands += sessions.opening(query.session_id, query.user_id, title, caller.query_id)
    cancelled, *found = await run.deps.context.bus.link.pipe(commands)
    history, opened = found[:3], found[3:]
    if opened:
        check_known(query, await sessions.owner(opened[0], query.session_id, query.user_id))
    if cancelled:
        return None
    return await past_of(run.deps, query.session_id, query.after, history) if has_past else Past()


async def past_of(deps: RunDeps, session_id: str, after: str | None, found: Sequence[Reply]) -> Past:
    """Return the turns and the summary of a session. found: the replies to `Sessions.newest` and `reading`. after: the
    last turn of the conversation, in a session with versions."""
    settings = deps.context.settings
    members, total, raw = found
    turns = await deps.sessions.turns(session_id, settings.respondent_id, after=after, asked=(members, total))
    summary = summary_of(session_id, raw)
    if summary is not None and not (settings.compacts and summary.tells_of(turns, after)):
        summary = None
    return Past(turns, summary)


async def check_owner(deps: RunDeps, query: QueryReceived, query_id: str) -> None:
    """Raise PermanentError if the session belongs to another user.

    For respondent A, create a missing session, except one that was deleted after the query was accepted.
    """
    if deps.context.settings.respondent_id == "A":
        title = title_of(query.query, query.attachments)
        check_known(query, await deps.sessions.open(query.session_id, query.user_id, title, query_id))
    elif (info := await deps.sessions.info(query.session_id)) is not None:
        check_known(query, info.user_id)


def check_known(query: QueryReceived, owner: str | None) -> None:
    """Raise PermanentError if the owner of the query's session is another user."""
    if owner not in (None, query.user_id):
        raise PermanentError(f"session {query.session_id} belongs to another user")
