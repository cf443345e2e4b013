"""OpenAI's routes: the whole agent behind one stock call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol

import orjson
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from services.gateway.http.auth import CHAT_HEADER, USER_HEADER, UserDep
from services.gateway.http.body import ImageRoute, JsonRoute
from services.gateway.http.errors import not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.keys import Principal
from services.gateway.http.schemas import spec
from services.gateway.openai.append_only_stream import AppendOnlyStream, TextDelta
from services.gateway.openai.chat_body import DEFAULT_MODEL, UTILITY_MODEL, ChatBody, asked, backend_model, bad
from services.gateway.openai.completions import Chunks, completion
from services.gateway.openai.conversation import placed
from services.gateway.openai.images import in_chat, in_response
from services.gateway.openai.orphans import Orphans, OrphansDep
from services.gateway.openai.responses import Answering, ResponseBody, query_of
from services.gateway.openai.responses import asked as asked_of_items
from services.gateway.openai.shapes import (
    ChatChunkEvent,
    ChatCompletion,
    Model,
    Models,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from services.gateway.queries.accept import Ask, Origin, accept, asked_before
from services.gateway.queries.cancel import cancel_all
from services.gateway.queries.deletion import STEP, forget_queries
from services.gateway.queries.query_routes import OriginDep, finished, loop_time_of
from services.gateway.queries.records import QueryRecord, forgotten, owned
from services.gateway.queries.sse import KEEP_ALIVE, EventStream, heard
from shared.bus.keys import journal_key
from shared.records.events import Entry
from shared.records.journal import JournalEntry, pages

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"])
# Questions, in which images may stand.
asking_router = APIRouter(route_class=ImageRoute, prefix="/v1", tags=["openai"])

# What a client of several chores calls this one; Open WebUI sends it where it is told to.
TASK_HEADER = "X-OpenWebUI-Task"
# Bytes of a request that is read beside the loop.
_LARGE = 262_144
# With `status`: a stream also has events that are none of OpenAI's, for clients that show them.
EVENTS_HEADER = "X-LoCAL2-Events"
_MODEL = {"id": DEFAULT_MODEL, "object": "model", "created": 1700000000, "owned_by": "local2"}
_COMPLETION: dict[str, Any] = completion(
    "1700000000000-0",
    DEFAULT_MODEL,
    {
        "model": "gemma4:e4b",
        "answer": "Paris.",
        "thinking": "A capital.",
        "finish_reason": "stop",
        "tool_calls": [],
        "usage": {"prompt_tokens": 412, "completion_tokens": 23},
    },
    1_700_000_000,
)
_DELETED = {"id": "resp_1700000000000_0", "object": "response", "deleted": True}
_RESPONSE: dict[str, Any] = {
    "id": "resp_1700000000000_0",
    "object": "response",
    "status": "completed",
    "output": [
        {"id": "msg_1700000000000_0_0", "type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}]}
    ],
    "usage": {"input_tokens": 412, "output_tokens": 23, "total_tokens": 435},
}  # fmt: skip


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _models(gateway: Gateway) -> list[str]:
    """The models that live generators answer with."""
    async with gateway.reachable():
        live = await gateway.context.registry.live("generator")
    return sorted({str(info.facts["model"]) for info in live if "model" in info.facts})


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {**_MODEL, "id": name, "created": gateway.context.started // 1000}


@router.get("/models", summary="The assistant, and the models behind it",
            responses=spec("Models", Models, {"object": "list", "data": [_MODEL]}, 503))  # fmt: skip
async def list_models(gateway: GatewayDep, _user: UserDep) -> Response:
    names = [DEFAULT_MODEL, UTILITY_MODEL, *await _models(gateway)]
    return reply({"object": "list", "data": [_model(gateway, name) for name in names]})


@router.get("/models/{name:path}", summary="One of them", responses=spec("A model", Model, _MODEL, 404, 503))
async def show_model(name: str, gateway: GatewayDep, _user: UserDep) -> Response:
    backend_model(name, await _models(gateway))
    return reply(_model(gateway, name))


# ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Teller(Protocol):
    """A journal as a stream of OpenAI's events."""

    done: bool

    def opening(self) -> bytes: ...

    def feed(self, entries: Sequence[Entry]) -> bytes: ...

    def broken(self, code: str, message: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Client:
    """Headers of chat programs. user, chat: names that a trusted key gives. task: the background task of the client.

    events: `status` for a stream with events that are not OpenAI's.
    """

    user: str
    chat: str
    task: str
    events: str

    def named(self, origin: Origin, body: ChatBody | ResponseBody) -> tuple[Origin, str | None]:
        """Return the origin and the conversation that a trusted key names, in headers or else in the body."""
        if not origin.principal.trusted:
            return origin, None
        given = body.metadata or {}
        user = body.user or given.get("user_id")
        if not self.user and isinstance(user, str) and user:
            origin = replace(origin, principal=origin.principal.named(user))
        names = (self.chat, given.get("chat_id"), given.get("session_id"))
        return origin, next((name for name in names if isinstance(name, str) and name), None)


async def _client(
    user: Annotated[str, Header(alias=USER_HEADER, include_in_schema=False)] = "",
    chat: Annotated[str, Header(alias=CHAT_HEADER, include_in_schema=False)] = "",
    task: Annotated[str, Header(alias=TASK_HEADER, include_in_schema=False)] = "",
    events: Annotated[str, Header(alias=EVENTS_HEADER, include_in_schema=False)] = "",
) -> _Client:
    return _Client(user, chat, task, events)


ClientDep = Annotated[_Client, Depends(_client)]


async def _asked(reading: Callable[[], Ask], size: int, *schemas: object) -> Ask:
    """The query in a request. Large schemas take seconds to look at, many messages a part of one, and would hold up
    everybody. size: bytes of the body."""
    return await asyncio.to_thread(reading) if size > _LARGE or any(schemas) else reading()


async def _taken(
    gateway: Gateway, orphans: Orphans, origin: Origin, ask: Ask, behind: str | None = None
) -> QueryRecord:
    """The run of a request: a new one, or that of the same request whose client has just gone. `behind` as for
    `placed`."""
    if origin.idempotency_key is None:
        known = orphans.take(origin.principal.user_id, ask)
    else:
        known = await asked_before(gateway, origin, ask)
    if known is not None:
        return known
    record = await accept(gateway, origin, await placed(gateway, origin.principal, ask, behind))
    # who asks on in a conversation does not come back for what was left in it
    orphans.stop(record.session_id)
    return record


def _named(record: QueryRecord) -> dict[str, str]:
    ids = {"X-Query-Id": record.query_id, "X-Session-Id": record.session_id}
    return {**ids, "X-Request-Id": record.query_id}


def _stream(gateway: Gateway, record: QueryRecord, teller: Teller, left: Callable[[], None] | None = None) -> Response:
    """`left`: what happens when the client goes; None: the run goes on."""
    return EventStream(gateway, _events(gateway, record, teller), _named(record), left)


async def _events(gateway: Gateway, record: QueryRecord, teller: Teller) -> AsyncGenerator[bytes, None]:
    until = loop_time_of(gateway, record)
    follower = gateway.journals.follow(journal_key(record.query_id, "A"), new=True)
    try:
        yield teller.opening()
        while (found := await heard(follower, until, gateway.settings.keepalive)) is not None:
            if not found:
                if await forgotten(gateway, record.query_id):
                    yield teller.broken("not_found", "the query was deleted before it was answered")
                    return
                yield KEEP_ALIVE
                continue
            text = teller.feed([JournalEntry.parse(entry).typed() for entry in found])
            if text:
                yield text
            if teller.done:
                return
        yield teller.broken("deadline", "the query was not answered by its deadline")
    finally:
        follower.close()


@asking_router.post(
    "/chat/completions",
    summary="A chat completion by the whole agent; its tools run on this side, the client's own on the client's",
    responses=spec("The completion; with `stream` its chunks as events", ChatCompletion, _COMPLETION,
                   400, 404, 409, 410, 413, 415, 429, 502, 503, 504, events=ChatChunkEvent),
)  # fmt: skip
async def create_chat_completion(
    request: Request, body: ChatBody, gateway: GatewayDep, orphans: OrphansDep, origin: OriginDep, client: ClientDep
) -> Response:
    origin, chat = client.named(origin, body)
    size = len(await request.body())
    body = await in_chat(gateway, origin.principal.user_id, body, size)
    reading = partial(asked, body, await _models(gateway), client.task)
    read = await _asked(reading, size, body.tools, body.functions, body.response_format)
    ask = read.model_copy(update={"chat": chat})
    record = await _taken(gateway, orphans, origin, ask)
    left = partial(orphans.leave, record, ask.model)
    name = body.model or DEFAULT_MODEL
    custom = [tool for tool, (_, form) in body.offered().items() if form.custom]
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        status = client.events == "status"
        chunks = Chunks(
            record.query_id, name, include_usage, whole=ask.whole, legacy=body.legacy, custom=custom, status=status
        )
        return _stream(gateway, record, chunks, left)
    shown = await finished(request, gateway, record, left)
    thinking = await _thought(gateway, record) if shown["tool_calls"] else None
    answer = completion(
        record.query_id,
        name,
        shown,
        int(time.time()),
        whole=ask.whole,
        legacy=body.legacy,
        custom=custom,
        thinking=thinking,
    )
    return reply(answer, headers=_named(record))


async def _thought(gateway: Gateway, record: QueryRecord) -> str:
    """What a stream tells of the agent's thoughts and steps."""
    telling, thought = AppendOnlyStream(steps=True), []
    async with gateway.reachable():
        async for entries in pages(gateway.bus, journal_key(record.query_id, "A")):
            for entry in entries:
                told = telling.take(entry.typed())
                thought += [one.text for one in told if isinstance(one, TextDelta) and one.kind == "thinking"]
    return "".join(thought)


# ── responses ────────────────────────────────────────────────────────────────────────────────────────────────────


@asking_router.post(
    "/responses",
    summary="A response by the whole agent",
    responses=spec("The response; with `stream` its events", ResponseObject, _RESPONSE,
                   400, 404, 409, 410, 413, 415, 429, 502, 503, 504, events=ResponseEvent),
)  # fmt: skip
async def create_response(
    request: Request, body: ResponseBody, gateway: GatewayDep, orphans: OrphansDep, origin: OriginDep, client: ClientDep
) -> Response:
    origin, chat = client.named(origin, body)
    size = len(await request.body())
    body = await in_response(gateway, origin.principal.user_id, body, size)
    items, behind = await _conversation(gateway, origin.principal, body)
    reading = partial(asked_of_items, body, items, await _models(gateway), client.task)
    ask = (await _asked(reading, size, body.tools, body.text)).model_copy(update={"chat": chat})
    kept = {"items": items, "repeated": body.repeated(), "whole": ask.whole, "stored": body.store is not False}
    ask = ask.model_copy(update={"given": orjson.dumps(kept).decode()})
    record = await _taken(gateway, orphans, origin, ask, behind)
    left = partial(orphans.leave, record, ask.model)
    if body.stream:
        return _stream(gateway, record, _answering(record), None if body.background else left)
    if body.background:
        return reply(_answering(record).shown, headers=_named(record))
    await finished(request, gateway, record, left)
    return reply((await _read(gateway, record)).shown, headers=_named(record))


async def _conversation(
    gateway: Gateway, user: Principal, body: ResponseBody
) -> tuple[list[dict[str, Any]], str | None]:
    """(all items that a request stands for: those of the response before it, and those that it refers to; the session
    of the response before it)."""
    found: list[dict[str, Any]] = []
    behind: str | None = None
    if body.previous_response_id is not None:
        before = await _owned(gateway, user, body.previous_response_id)
        behind = before.session_id
        found = [*orjson.loads(before.given)["items"], *(await _read(gateway, before)).shown["output"]]
    for item in body.items():
        if item.get("type") != "item_reference":
            found.append(item)
            continue
        name = str(item.get("id", ""))
        answer = (await _read(gateway, await _owned(gateway, user, name))).shown["output"]
        known = [one for one in answer if one["id"] == name]
        if not known:
            raise bad(f"input: there is no item {name[:100]!r}", "not_found")
        found += known
    return found, behind


async def _owned(gateway: Gateway, user: Principal, name: str) -> QueryRecord:
    """The query of the user's own response, or of an item of one. Raises ApiError 404."""
    async with gateway.reachable():
        record = await owned(gateway, user, query_of(name), "response")
    if not record.given or not orjson.loads(record.given)["stored"]:
        raise not_found("response, or its time of keeping is over")
    return record


def _answering(record: QueryRecord, after: int = -1) -> Answering:
    kept = orjson.loads(record.given)
    return Answering(record, kept["repeated"], whole=kept["whole"], after=after)


async def _read(gateway: Gateway, record: QueryRecord) -> Answering:
    """A response as far as it has come."""
    answering = _answering(record)
    async with gateway.reachable():
        async for entries in pages(gateway.bus, journal_key(record.query_id, "A")):
            answering.feed([entry.typed() for entry in entries])
    return answering


@router.get(
    "/responses/{name}",
    summary="A response, also while it is made; with `stream` its events from the start or behind one of them",
    responses=spec("The response so far", ResponseObject, _RESPONSE, 404, 503, events=ResponseEvent),
)
async def show_response(
    name: str,
    gateway: GatewayDep,
    user: UserDep,
    stream: Annotated[bool, Query(description="Its events instead")] = False,
    starting_after: Annotated[int, Query(ge=-1, description="Only the events behind this sequence number")] = -1,
) -> Response:
    record = await _owned(gateway, user, name)
    if stream:
        return _stream(gateway, record, _answering(record, starting_after))
    return reply((await _read(gateway, record)).shown)


@router.post("/responses/{name}/cancel", summary="Stop making a response",
             responses=spec("The response", ResponseObject, _RESPONSE, 404, 503))  # fmt: skip
async def cancel_response(name: str, gateway: GatewayDep, user: UserDep) -> Response:
    record = await _owned(gateway, user, name)
    answering = await _read(gateway, record)
    if not answering.done:
        async with gateway.reachable():
            await cancel_all(gateway, [record.query_id])
        answering.shown["status"] = "cancelled"
    return reply(answering.shown)


@router.delete("/responses/{name}", summary="Forget a response, and what was remembered of it",
               responses=spec("Forgotten", ResponseDeleted, _DELETED, 404, 503))  # fmt: skip
async def delete_response(name: str, gateway: GatewayDep, user: UserDep) -> Response:
    record = await _owned(gateway, user, name)
    async with gateway.reachable(extra=STEP):
        await forget_queries(gateway, user.user_id, record.session_id, [record.query_id])
        await gateway.sessions.bring(record.session_id, [record.query_id], [])
    return reply({"id": name, "object": "response", "deleted": True})
