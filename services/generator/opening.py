"""How a replica comes to answer a query: its turn in the session, the journal it writes, and what came before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.generator.compaction import Past
from services.generator.machine import IDLE, TABLE
from services.generator.recall import recall
from services.generator.run import Parts, Response, check_known
from services.generator.steps import Ports, shown, told
from shared.bus import Command
from shared.bus.keys import cancel_key, journal_key
from shared.bus.replies import Reply, checked
from shared.contracts import QueryReceived
from shared.envelope import Message
from shared.participant.machine import Machine
from shared.participant.tool_client import Caller
from shared.records.folding import Folding
from shared.records.journal import JournalEnded, JournalEntry, JournalWriter, response_id
from shared.records.sessions import title_of
from shared.records.steps import keep_ended
from shared.records.summaries import reading, summary_of

_FIRST_STEPS = ("RECEIVE", "START_GENERATION")


async def open_response(
    parts: Parts, message: Message[QueryReceived], caller: Caller, left: float, *, answering: bool = False
) -> Response | None:
    """Becomes the writer of the response's journal; None when that has ended: its owner died between the last entry and
    the acknowledgement. `left`: seconds until the query's deadline. answering: of one whose answer begins now, the
    first steps are written with the claim."""
    context, query = parts.context, message.payload
    name = response_id(caller.query_id, caller.respondent_id)
    data = {
        "query_id": caller.query_id,
        "response_id": name,
        "session_id": query.session_id,
        "respondent_id": caller.respondent_id,
        "replica": context.replica,
        "model": query.model or context.settings.model,
        "attempt": message.deliveries,
    } | ({"attachments": query.attachments} if query.attachments else {})
    ttl = max(0, int(left)) + context.settings.retention
    key = journal_key(caller.query_id, caller.respondent_id)

    async def made(writer: JournalWriter, machine: Machine, before: Sequence[JournalEntry] = ()) -> Response | None:
        known = recall(before)
        if known.terminal is not None:
            return None
        folding = Folding(before)
        for entry in writer.begun:
            folding.add(*entry)
        writer.on_entry = folding.add
        model = parts.behind(message.suspended) if query.plain else parts.model
        ports = Ports(context, model, parts.tools, writer, known, machine, caller, name, message.deliveries, parts.beat)
        return Response(parts, message, ports, folding)

    if message.deliveries == 1:
        machine = Machine(TABLE, IDLE)
        steps = [machine.step(action) for action in _FIRST_STEPS] if answering else []
        states, messages = [shown(step) for step in steps], [told(context, caller, step) for step in steps]
        writer = JournalWriter.begin(context.bus, key, data, ttl, states, messages)
        # while the claim is under way
        response = await made(writer, machine)
        if await writer.owned():
            return response
    try:
        writer, before = await JournalWriter.claim(context.bus, key, data, ttl)
    except JournalEnded:
        if not query.plain and context.settings.respondent_id == "A":
            await keep_ended(context.bus, query, caller.query_id)
        return None
    # a journal that was there already tells how far its answer has come
    return await made(writer, Machine(TABLE, IDLE), before)


async def open_turn(
    parts: Parts, message: Message[QueryReceived], caller: Caller, opening: Callable[[], Awaitable[Response | None]]
) -> tuple[Response | None, Past, bool]:
    """What `opening` gives, what the query's session holds, and whether the query was cancelled, when the turn is the
    query's.

    Raises PermanentError when the session is not the user's.
    """
    query, sessions = message.payload, parts.sessions
    session_id, respondent_id = query.session_id, caller.respondent_id
    commands: list[Command] = [("EXISTS", cancel_key(caller.query_id))]
    # who takes it over does not know what has happened since
    nothing_before = query.messages is not None or (query.first and message.deliveries == 1)
    if not nothing_before:
        commands += [*sessions.newest(session_id, respondent_id), reading(session_id)]
        if message.deliveries == 1:
            commands += sessions.opening(
                session_id, query.user_id, title_of(query.query, query.attachments), caller.query_id
            )
    # it leaves with what `opening` writes first, and nobody waits for it before
    asking = asyncio.ensure_future(parts.context.bus.link.submit(commands, True))
    try:
        response = await opening()
        stopped, *found = map(checked, await asking)
    finally:
        if not asking.cancel() and not asking.cancelled():
            # where it failed, so has the opening
            asking.exception()
    if nothing_before:
        return response, Past(), bool(stopped)
    members, total, raw, *owner = found
    if owner:
        check_known(query, await sessions.owner(owner[0], session_id, query.user_id))
    return response, await past_of(parts, session_id, query.after, (members, total, raw)), bool(stopped)


async def past_of(parts: Parts, session_id: str, after: str | None, found: Sequence[Reply]) -> Past:
    """Return the turns and the summary of a session. found: the replies to `Sessions.newest` and `reading`. after: the
    last turn of the conversation, in a session with versions."""
    settings = parts.context.settings
    members, total, raw = found
    turns = await parts.sessions.turns(session_id, settings.respondent_id, after=after, asked=(members, total))
    summary = summary_of(session_id, raw)
    if summary is not None and not (settings.compacts and summary.tells_of(turns, after)):
        summary = None
    return Past(turns, summary)


def has_turn(message: Message[QueryReceived], respondent_id: str) -> bool:
    """Whether a query may be answered as soon as it is read: it is in no lane, or was accepted into an empty one. Who
    takes it over does not know what has happened since."""
    given = message.deliveries == 1 and respondent_id in message.envelope.turn
    return given or message.payload.messages is not None


async def wait_for_turn(parts: Parts, message: Message[QueryReceived], caller: Caller) -> bool:
    """True when the query may be answered now, False when it was cancelled before."""
    place = (message.payload.session_id, caller.query_id)
    flagged = parts.context.bus.link.call("EXISTS", cancel_key(caller.query_id))
    stopped, mine = await asyncio.gather(flagged, parts.lanes.mine(*place))
    if not stopped and not mine:
        async with message.suspended():
            await parts.lanes.wait(*place)
    return not stopped
