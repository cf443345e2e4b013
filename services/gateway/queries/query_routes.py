"""Asking, and everything about a query that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import FAILURE_STATUS, ApiError
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import known_files
from services.gateway.http.schemas import SSE, QueryBody, Respondent, spec
from services.gateway.queries.accept import ONCE, Ask, Origin, accept
from services.gateway.queries.cancel import cancel_all
from services.gateway.queries.event_log import read_event_log
from services.gateway.queries.event_shapes import JournalEvent
from services.gateway.queries.query_list import listed
from services.gateway.queries.query_shapes import Accepted, QueryPage, QueryResult, Stopping
from services.gateway.queries.records import QueryRecord, checked_entry_id, forgotten, owned
from services.gateway.queries.sse import Ending, EventStream, ended, ended_at, gone, is_before, journal_events
from services.gateway.queries.view import result
from shared.bus import START
from shared.bus.keys import journal_key
from shared.contracts import FILES_ALONE
from shared.records.journal import TERMINAL, read_end, read_result
from shared.records.response_state import EMPTY, apply

router = APIRouter(route_class=JsonRoute, tags=["queries"])

# The generator writes the failure at the deadline; that entry is worth waiting for.
GRACE = 5.0
_IDS = {"query_id": "1700000000000-0", "session_id": "geography-1"}
_RESULT: dict[str, Any] = {
    **_IDS,
    "state": "completed",
    "query": "What is the capital of France?",
    "answer": "Paris.",
    "thinking": "The user asks for a capital.",
    "tool_calls": [],
    "usage": {"prompt_tokens": 412, "completion_tokens": 23},
    "model": "gemma4:e4b",
    "finish_reason": "stop",
    "notices": [],
    "critique": {"score": 5, "feedback": "Right, and to the point.", "rubric": "realistic"},
    "pairwise": {"winner": "A", "reason": "A is shorter.", "score_a": 5, "score_b": 4},
    "reward": {"reward": 1.0, "sentiment": "positive", "thumb": None, "stars": 5, "comment": None},
    "events": ["query.received", "agent.transition", "response.generation", "answer.dialog"],
    "event_log": [
        {"subject": "query.received", "t": 0.0, "stream": "local2:query.received", "id": "1700000000000-0"},
        {"subject": "agent.transition", "t": 0.004, "stream": "local2:agent.transition", "id": "1700000000004-0"},
        {"subject": "response.generation", "t": 0.9, "stream": "local2:response.generation", "id": "1700000000900-0"},
        {"subject": "answer.dialog", "t": 0.9, "stream": "local2:answer.dialog", "id": "1700000000900-0"},
    ],
}
_EVENTS = 'id: 1-3\nevent: answer\ndata: {"text":"Par"}\n\n'

WithEventLog = Annotated[
    bool, Query(description="true: with `events` and `event_log`, the messages of the query that are on the bus")
]
AskedRespondent = Annotated[Respondent, Query(description="A: the answer shown; B: the second respondent's")]


async def _origin(
    user: UserDep,
    idempotency_key: Annotated[str | None, Header(description=ONCE)] = None,
    traceparent: Annotated[str | None, Header(description="W3C trace context")] = None,
) -> Origin:
    return Origin(user, idempotency_key, traceparent)


OriginDep = Annotated[Origin, Depends(_origin)]


@router.post(
    "/query",
    summary="Ask: the answer as JSON, or as it is written with Accept: text/event-stream",
    responses={
        **spec("The finished answer; as events, the journal's entries", QueryResult, _RESULT,
               400, 404, 409, 410, 413, 415, 422, 429, 502, 503, 504, events=JournalEvent),
        **spec("Accepted (`?wait=false`)", Accepted, {**_IDS, "state": "queued"}, status=202),
    },
)  # fmt: skip
async def ask(
    request: Request,
    body: QueryBody,
    gateway: GatewayDep,
    user: UserDep,
    origin: OriginDep,
    wait: Annotated[bool, Query(description="false: 202 as soon as the query cannot be lost any more")] = True,
    follow: Annotated[bool, Query(description="Events go on after the answer until the critique")] = False,
    event_log: WithEventLog = True,
    accepts: Annotated[str, Header(alias="accept", include_in_schema=False)] = "",
) -> Response:
    given: dict[str, Any] = {
        **dict(body),
        "query": body.query if body.query.strip() else FILES_ALONE,
        "options": body.options.model_dump(exclude_none=True) if body.options else None,
        "attachments": await known_files(gateway, user.user_id, body.attachments),
    }
    record = await accept(gateway, origin, Ask(**given))
    if not wait:
        accepted = {"query_id": record.query_id, "session_id": record.session_id, "state": "queued"}
        return reply(accepted, 202, {"Location": f"/queries/{record.query_id}", **_ids(record)})
    if SSE in accepts:
        return _streaming(gateway, record, "A", START, follow=follow, new=True)
    shown = await finished(request, gateway, record)
    if event_log:
        async with gateway.reachable():
            shown |= await _logged(gateway, record)
    return reply(shown, headers=_ids(record))


def _ids(record: QueryRecord) -> dict[str, str]:
    return {"X-Query-Id": record.query_id, "X-Session-Id": record.session_id}


def loop_time_of(gateway: Gateway, record: QueryRecord) -> float:
    """When the query must have ended, on this process's loop clock."""
    return asyncio.get_running_loop().time() + gateway.bus.left(record.deadline, record.query_id) + GRACE


def _streaming(
    gateway: Gateway,
    record: QueryRecord,
    respondent: str,
    after: str,
    *,
    follow: bool,
    answered: bool = False,
    new: bool = False,
) -> EventStream:
    settings = gateway.settings
    follower = gateway.journals.follow(journal_key(record.query_id, respondent), after, new=new)
    ending = Ending(loop_time_of(gateway, record), follow, settings.follow_seconds, answered)
    lost = partial(forgotten, gateway, record.query_id)
    return EventStream(gateway, journal_events(follower, ending, settings.keepalive, lost), _ids(record))


async def finished(
    request: Request, gateway: Gateway, record: QueryRecord, left: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The result, once it is there. `left` is told of a client that went before.

    Raises ApiError 504 at the deadline, 503 when the gateway stops, 404 when the query was deleted meanwhile, and what
    a failed query failed with.
    """
    follower = gateway.journals.follow(journal_key(record.query_id, "A"), new=True)
    lost = partial(forgotten, gateway, record.query_id)
    waiting = ended(follower, loop_time_of(gateway, record), gateway.settings.keepalive, lost)
    found = await gateway.race(waiting, gone(request.receive))
    extra = {"query_id": record.query_id, "session_id": record.session_id}
    if found is None:
        if left is not None and not gateway.stopping:
            left()
        raise ApiError(
            503, "stopping", "this gateway stops; the query goes on: ask for it by its id", _ids(record), **extra
        )
    if found:
        async with gateway.reachable():
            shown = await shown_result(gateway, record, "A")
        if shown["state"] == "failed":
            raise failure(record, shown["error"])
        if shown["state"] in TERMINAL:
            return shown
    # what had ended and is not there any more was deleted a moment ago
    if found or await lost():
        raise ApiError(404, "not_found", "the query was deleted before it was answered", _ids(record), **extra)
    raise ApiError(504, "deadline", "the query was not answered by its deadline", _ids(record), **extra)


async def shown_result(gateway: Gateway, record: QueryRecord, respondent: str) -> dict[str, Any]:
    """The result so far."""
    state = EMPTY
    async for entries in read_result(gateway.bus, journal_key(record.query_id, respondent)):
        for entry in entries:
            state = apply(state, entry.typed())
    return result(record, state)


async def _logged(gateway: Gateway, record: QueryRecord) -> dict[str, Any]:
    """The messages of a query on the bus, and their subjects."""
    found = await read_event_log(gateway.bus, record.query_id)
    return {"events": [message["subject"] for message in found], "event_log": found}


def failure(record: QueryRecord, error: dict[str, Any]) -> ApiError:
    """A failed query as an HTTP error."""
    code = error["code"]
    return ApiError(
        FAILURE_STATUS.get(code, 500),
        code,
        error["message"],
        _ids(record),
        query_id=record.query_id,
        session_id=record.session_id,
    )


_LISTED = {**_IDS, "state": "running", "query": "What is the capital of France?", "mode": "chat", "accepted": 1}


@router.get(
    "/queries",
    summary="Your queries of a session of which something is kept, or what runs now in any of your newest sessions",
    responses=spec("The newest of them, the oldest first", QueryPage, {"queries": [_LISTED]}, 400, 422, 503),
)
async def list_queries(
    gateway: GatewayDep,
    user: UserDep,
    session_id: Annotated[str | None, Query(max_length=200, description="Left out: the sessions used last")] = None,
    state: Annotated[
        Literal["running", "completed", "failed", "cancelled"] | None,
        Query(description="running: waiting or being answered. Left out: all, which needs a session_id"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    if session_id is None and state != "running":
        raise ApiError(400, "invalid_request", "session_id: must be given unless state is running")
    async with gateway.reachable():
        found = await listed(gateway, user, session_id, state, limit)
    return reply({"queries": found})


@router.get("/queries/{query_id}", summary="State and result of a query, also while it runs",
            responses=spec("The result so far", QueryResult, _RESULT, 404, 503))  # fmt: skip
async def show_query(
    query_id: str,
    gateway: GatewayDep,
    user: UserDep,
    respondent: AskedRespondent = "A",
    event_log: WithEventLog = False,
) -> Response:
    async with gateway.reachable():
        record = await owned(gateway, user, query_id)
        shown = await shown_result(gateway, record, respondent)
        if event_log:
            shown |= await _logged(gateway, record)
    return reply(shown, headers=_ids(record))


@router.get(
    "/queries/{query_id}/events",
    summary="The journal as server-sent events, from the start or from Last-Event-ID",
    responses={
        **spec("One event per journal entry", JournalEvent, _EVENTS, 400, 404, 503, media=SSE),
        204: {"description": "The stream had already ended at Last-Event-ID: do not reconnect"},
    },
)
async def query_events(
    query_id: str,
    gateway: GatewayDep,
    user: UserDep,
    respondent: AskedRespondent = "A",
    follow: Annotated[bool, Query(description="Go on after the answer until the critique")] = False,
    last_event_id: Annotated[str | None, Header(description="The last event that was seen")] = None,
    after: Annotated[str | None, Query(alias="last_event_id", description="The same, where headers cannot be set")]
    = None,
) -> Response:  # fmt: skip
    start = checked_entry_id(last_event_id or after, "Last-Event-ID") or START
    async with gateway.reachable():
        record = await owned(gateway, user, query_id)
        newest, terminal = await ended_at(gateway, journal_key(query_id, respondent))
    if newest == START and gateway.bus.left(record.deadline, query_id) < -GRACE:
        raise ApiError(404, "not_found", "there is no journal of this query any more")
    # a follower that starts beyond the end would wait for entries that never come
    if is_before(newest, start):
        raise ApiError(400, "bad_event_id", "Last-Event-ID is not the id of an event of this query")
    answered = terminal is not None and not is_before(start, terminal)
    if answered and not follow:
        return Response(status_code=204, headers=_ids(record))
    return _streaming(gateway, record, respondent, start, follow=follow, answered=answered)


@router.post(
    "/queries/{query_id}/cancel",
    summary="Stop a query; repeating it changes nothing",
    responses=spec("Being stopped, or the state in which it ended", Stopping, {**_IDS, "state": "cancelling"},
                   404, 503),
)  # fmt: skip
async def cancel_query(query_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable():
        record = await owned(gateway, user, query_id)
        end = await read_end(gateway.bus, journal_key(query_id, "A"))
        if end and end[0].type in TERMINAL:
            state = str(end[0].type)
        else:
            await cancel_all(gateway, [query_id])
            state = "cancelling"
    return reply({"query_id": query_id, "session_id": record.session_id, "state": state}, headers=_ids(record))
