"""The session of a client that keeps the history itself: which one it is, and that it holds what the client sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal, digest
from services.gateway.http.session_ids import is_session_id
from services.gateway.queries.accept import Ask
from services.gateway.queries.deletion import STEP, forget_queries
from services.gateway.queries.history import Said, begins, change, queries_of, same, turns_of
from services.gateway.queries.records import open_session, own_session
from shared.bus.keys import queries_key
from shared.records import lanes
from shared.records.sessions import Turn, shown, title_of
from shared.records.steps import read_unanswered

# Among so many sessions, those that their user used last, a history is looked for.
_RECENT = 50


async def placed(gateway: Gateway, user: Principal, ask: Ask, behind: str | None = None) -> Ask:
    """The query in its session, which holds the client's history and nothing else from then on.

    Where the client does not name the conversation, its history tells which one it is; one that is nowhere is the
    client's alone, and one that is empty begins a session. `behind`: the session of the response that the query goes on
    from; it keeps the turn when that response ends it, and nothing leaves it. A chore is in none, and goes with the one
    that it is about. Raises BusUnavailable.
    """
    if ask.messages is None or (ask.plain and ask.chat is None):
        return ask
    sent = turns_of(ask.messages)
    async with gateway.reachable(extra=STEP):
        if ask.chat is not None:
            name = ask.chat if is_session_id(ask.chat) else f"chat-{digest(ask.chat)[:40]}"
            if ask.plain:
                info = await own_session(gateway, user, name)
                return ask.model_copy(update={"about": info.session_id if info else None})
            found: str | None = await open_session(gateway, user, name, title_of(ask.query, ask.attachments))
        elif behind is not None:
            return ask.model_copy(update={"kept": await _ending(gateway, user, behind, sent)})
        elif sent:
            found = await _of(gateway, user, sent)
        else:
            # of a name that nobody has yet; it is made with its first turn
            return ask.model_copy(update={"kept": ""})
        if found is None:
            return ask
        await _bring(gateway, user, found, sent, queries_of([*ask.messages, *(ask.following or ())]))
    return ask.model_copy(update={"kept": found})


async def _of(gateway: Gateway, user: Principal, sent: Sequence[Said]) -> str | None:
    """The session that begins with a history: one that ends with it, else the one used last."""
    longer = None
    for session_id, first in await gateway.sessions.beginnings(user.user_id, _RECENT):
        if not same(first, sent[0]):
            continue
        held = shown(await gateway.sessions.every_turn(session_id))
        if begins(held, sent):
            if len(held) == len(sent):
                return session_id
            longer = longer or session_id
    return longer


async def _ending(gateway: Gateway, user: Principal, session_id: str, sent: Sequence[Said]) -> str | None:
    """The user's session when it holds just what was sent: from a response before its last one, people go on aside."""
    info = await gateway.sessions.info(session_id)
    if info is None or info.user_id != user.user_id:
        return None
    held = shown(await gateway.sessions.every_turn(session_id))
    return session_id if len(held) == len(sent) and begins(held, sent) else None


def aside(whole: Sequence[Turn], held: Sequence[Turn]) -> list[str]:
    """The turns of a session that are in no place of one of its conversations."""
    there = {turn.query_id for turn in held}
    return [turn.query_id for turn in whole if turn.query_id not in there]


async def _bring(gateway: Gateway, user: Principal, session_id: str, sent: Sequence[Said], used: set[str]) -> None:
    """Turns that the client does not have any more leave the session, and everything that came of them; so do queries
    that left no turn. The turns go last: until then an interrupted change can be repeated. `used`: queries that the
    history refers to."""
    bus = gateway.bus
    whole = await gateway.sessions.every_turn(session_id)
    held = shown(whole)
    needed = change(held, sent, bus.now_ms())
    # the client knows one conversation only
    needed = replace(needed, gone=[*needed.gone, *aside(whole, held)])
    listed = await bus.link.call("ZRANGE", queries_key(session_id), 0, -1)
    loose = {raw.decode() for raw in listed} | (await read_unanswered(bus, session_id)).keys()
    loose -= {turn.query_id for turn in whole} | used
    # somebody may be waiting for those that are not finished
    loose -= await lanes.awaited(bus, sorted(loose))
    if gone := [*needed.gone, *sorted(loose)]:
        await forget_queries(gateway, user.user_id, session_id, gone)
    if gone or needed.added:
        await gateway.sessions.bring(session_id, gone, needed.added)
