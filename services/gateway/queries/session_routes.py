"""A user's sessions."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.keys import Principal
from services.gateway.http.participant_rpc import files_now, new_call, operate_for
from services.gateway.http.schemas import ChatSettings, SessionBody, TimeZone, spec
from services.gateway.http.session_ids import is_session_id
from services.gateway.queries.deletion import STEP, end_session
from services.gateway.queries.event_log import happened, read_event_log
from services.gateway.queries.incoming import IncomingSessions, take_in
from services.gateway.queries.records import is_query_id, own_session
from services.gateway.queries.session_search import find
from services.gateway.queries.session_shapes import (
    SessionChanged,
    SessionDeleted,
    SessionPage,
    SessionShown,
    SessionsTaken,
    SessionTitle,
    TurnTold,
)
from services.gateway.queries.titles import title
from services.gateway.queries.versions import tip_of
from shared.errors import TransientError
from shared.participant.tool_client import Caller
from shared.records.erasing import erase_answer
from shared.records.sessions import MAX_TURNS, SessionInfo, words_of

router = APIRouter(route_class=JsonRoute, tags=["sessions"])

# Timeout for the messages of a session, which a generator builds; after it the response has no messages.
_MESSAGES_SECONDS = 10.0
_INFO = {"session_id": "geography-1", "title": "Capitals", "created": 1, "updated": 2, "pinned": False}
_USUAL = ChatSettings().model_dump()
_ATTACHED = {"id": "file-0123456789abcdef0123456789abcdef", "name": "manual.pdf", "type": "application/pdf",
             "size": 120_000, "pages": 12, "deleted": False}  # fmt: skip
_TURN = {"query_id": "1-0", "after": None, "query": "Hello", "answer": "Hello!", "time": 1, "interrupted": False,
         "attachments": [_ATTACHED]}  # fmt: skip


def _shown(info: SessionInfo) -> dict[str, Any]:
    return {
        "session_id": info.session_id,
        "title": info.title,
        "created": info.created,
        "updated": info.updated,
        "pinned": info.pinned,
    }


def _changed(info: SessionInfo) -> dict[str, Any]:
    return {**_shown(info), "settings": ChatSettings.of(info.settings).model_dump()}


async def _owned(gateway: Gateway, user: Principal, session_id: str) -> SessionInfo:
    info = await own_session(gateway, user, session_id) if is_session_id(session_id) else None
    if info is None:
        raise not_found("session")
    return info


@router.get(
    "/sessions",
    summary="Your sessions, pinned ones first, then the one used last; or those with certain words",
    responses=spec("A page of sessions", SessionPage,
                   {"sessions": [_INFO], "limit": 50, "offset": 0, "complete": True}, 400, 422, 503),
)  # fmt: skip
async def list_sessions(
    gateway: GatewayDep,
    user: UserDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    search: Annotated[
        str | None,
        Query(max_length=200, description="Words that the title or a turn must all have, in any order and case"),
    ] = None,
) -> Response:
    if search is not None and search.strip():
        if offset:
            raise ApiError(400, "invalid_request", "offset: a search has one page; look for more words instead")
        async with gateway.reachable(extra=STEP):
            found = await find(gateway, user.user_id, search, limit)
        shown = [{**_shown(m.info), "query_id": m.query_id, "excerpt": m.excerpt} for m in found.matches]
        return reply({"sessions": shown, "limit": limit, "offset": 0, "complete": found.complete})
    async with gateway.reachable():
        page = await gateway.sessions.of_user(user.user_id, limit, offset)
    return reply({"sessions": [_shown(info) for info in page], "limit": limit, "offset": offset, "complete": True})


_TAKEN = {"session_id": "openwebui-1", "state": "added", "turns_added": 2, "turns": 2}


@router.post(
    "/sessions/import",
    summary="Take in conversations of another product as your sessions; what is there already stays as it is",
    responses=spec("What became of each: added, there, or different from the one that is there",
                   SessionsTaken, {"sessions": [_TAKEN]}, 400, 413, 415, 422, 503),
)  # fmt: skip
async def import_sessions(body: IncomingSessions, gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable(extra=STEP):
        return reply({"sessions": await take_in(gateway, user, body.sessions)})


@router.get(
    "/sessions/{session_id}",
    summary="A page of its turns, and the messages as the model will see them before the next query; "
    "the operator's system prompt is shown to administrators",
    responses=spec("The session", SessionShown, {**_INFO, "settings": _USUAL, "tip": "1-0", "turns": [_TURN],
                                   "total": 1, "earlier": None, "messages_missing": None,
                                   "messages": [{"role": "user", "content": "Hello"}]},
                   400, 404, 422, 503),
)  # fmt: skip
async def show_session(
    session_id: str,
    gateway: GatewayDep,
    user: UserDep,
    limit: Annotated[int, Query(ge=1, le=200, description="The newest so many turns")] = MAX_TURNS,
    before: Annotated[str | None, Query(description="The newest before this query: `earlier` of the last page")] = None,
    messages: Annotated[bool, Query(description="false: without the messages, which a generator builds")] = True,
    time_zone: Annotated[
        TimeZone | None, Query(description="IANA time zone of the date in the messages, as for `POST /query`")
    ] = None,
) -> Response:
    if before is not None and not is_query_id(before):
        raise ApiError(400, "bad_query_id", "before must be the id of a query, like 1700000000000-0")
    async with gateway.reachable():
        info = await _owned(gateway, user, session_id)
        page = await gateway.sessions.page(info.session_id, "A", limit, before)
        newest = await gateway.sessions.turns(info.session_id, "A", limit=1)
    files = await files_now(gateway, user.user_id, [file for turn in page.turns for file in turn.attachments])
    read, missing = await _messages(gateway, user, info, time_zone) if messages else (None, "not asked for")
    listed = [
        {
            "query_id": turn.query_id,
            "after": turn.after,
            "query": words_of(turn.query),
            "answer": turn.answer,
            "time": turn.time,
            "interrupted": turn.interrupted,
            "attachments": [files[str(file["id"])] for file in turn.attachments],
        }
        for turn in page.turns
    ]
    earlier = page.turns[0].query_id if page.earlier else None
    shown = {
        **_changed(info),
        "tip": info.tip or (newest[-1].query_id if newest else None),
        "turns": listed,
        "total": page.total,
        "earlier": earlier,
        "messages": read,
        "messages_missing": missing,
    }
    return reply(shown)


async def _messages(
    gateway: Gateway, user: Principal, info: SessionInfo, time_zone: str | None
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Return the messages array, which a generator builds as for an answer, or None with the reason."""
    settings = ChatSettings.of(info.settings)
    caller = Caller(new_call(), user_id=user.user_id, time_zone=time_zone or user.time_zone or gateway.settings.zone)
    args = {
        "op": "messages",
        "session_id": info.session_id,
        "after": info.tip or None,
        "model": settings.model,
        "system_prompt": settings.system_prompt,
        "hide_prompt": user.role != "admin",
    }
    try:
        found = await operate_for(gateway, "generator", caller, args, _MESSAGES_SECONDS)
    except ApiError as exc:
        return None, exc.message
    except TransientError as exc:
        # A request to the generator needs a write, which the bus refuses; the turns stay readable.
        return None, str(exc)
    finally:
        # The answer contains the conversation: a deleted session must leave no copy of it.
        with contextlib.suppress(TransientError):
            await erase_answer(gateway.bus, gateway.context.inbox, "generator_manage", caller.query_id)
    # An empty list if the session was deleted meanwhile.
    return (found["messages"], None) if found["found"] else ([], None)


_TOLD = {
    "query_id": "1700000000000-0",
    "session_id": "geography-1",
    "open_to_votes": True,
    "journal": [
        {"id": "1-4", "event": "thinking", "data": {"text": "The user asks for a capital."}},
        {"id": "1-9", "event": "completed", "data": {"answer": "Paris.", "model": "gemma4:e4b"}},
    ],
    "event_log": [
        {"subject": "query.received", "t": 0.0, "stream": "local2:query.received", "id": "1700000000000-0"}
    ],
}  # fmt: skip


@router.get(
    "/sessions/{session_id}/turns/{query_id}",
    summary="What happened in a turn: thinking, tools, what was said of it later; as long as the session is kept",
    responses=spec("Its journal, shortened, also when the journal itself has expired", TurnTold, _TOLD, 400, 404, 503),
)
async def show_turn(
    session_id: str,
    query_id: str,
    gateway: GatewayDep,
    user: UserDep,
    event_log: Annotated[
        bool, Query(description="true: with `event_log`, the messages of the query that are on the bus")
    ] = False,
) -> Response:
    if not is_query_id(query_id):
        raise ApiError(400, "bad_query_id", "a turn has the id of its query, like 1700000000000-0")
    async with gateway.reachable():
        info = await _owned(gateway, user, session_id)
        found = await happened(gateway, info, query_id)
        if found is None:
            raise not_found("turn in this session")
        if event_log:
            # Only the query's record says whose query it is.
            found["event_log"] = await read_event_log(gateway.bus, query_id) if found["open_to_votes"] else []
    return reply(found)


@router.patch(
    "/sessions/{session_id}",
    summary="Give a session another title, pin it, say how it is asked, or go on from another version of an answer",
    responses=spec("As it is now", SessionChanged, {**_INFO, "settings": _USUAL}, 400, 404, 413, 415, 422, 503),
)
async def change_session(session_id: str, body: SessionBody, gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable():
        info = await _owned(gateway, user, session_id)
        try:
            tip = None if body.version is None else await _tip(gateway, info, body.version)
            settings = body.settings.model_dump(exclude_none=True) if body.settings else None
            changed = await gateway.sessions.change(
                info, title=body.title, pinned=body.pinned, settings=settings, tip=tip
            )
        except KeyError:
            raise not_found("session") from None
    return reply(_changed(changed))


async def _tip(gateway: Gateway, info: SessionInfo, query_id: str) -> str:
    tip = tip_of(await gateway.sessions.every_turn(info.session_id), query_id)
    if tip is None:
        raise not_found("turn in this session")
    return tip


@router.post(
    "/sessions/{session_id}/title",
    summary="Let the model name a session of what was said in it; once, and never one that you have named",
    responses=spec("Its title", SessionTitle, {"session_id": "geography-1", "title": "Capitals", "made": True},
                   404, 409, 429, 502, 503, 504),
)  # fmt: skip
async def title_session(session_id: str, request: Request, gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable():
        info = await _owned(gateway, user, session_id)
    name, made = await title(request, gateway, user, info)
    return reply({"session_id": info.session_id, "title": name, "made": made})


@router.delete(
    "/sessions/{session_id}",
    summary="Delete a session and every trace of its queries; stop the open ones",
    responses=spec(
        "Deleted", SessionDeleted, {"session_id": "geography-1", "deleted": True, "cancelled": []}, 404, 503
    ),
)
async def forget_session(session_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable(extra=STEP):
        info = await _owned(gateway, user, session_id)
        cancelled = await end_session(gateway, info)
    return reply({"session_id": info.session_id, "deleted": True, "cancelled": cancelled})
