"""OpenAI's routes: the whole agent behind one stock call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from services.gateway.accept import ONCE, Origin, accept
from services.gateway.answers import reply
from services.gateway.auth import UserDep
from services.gateway.body import JsonRoute
from services.gateway.chat_body import DEFAULT_MODEL, UTILITY_MODEL, ChatBody, asked
from services.gateway.completions import Chunks, completion, failed
from services.gateway.gateway import Gateway, GatewayDep
from services.gateway.records import QueryRecord, forgotten
from services.gateway.routes.queries import finished, loop_time_of
from services.gateway.schemas import told
from services.gateway.sse import KEEP_ALIVE, EventStream
from shared.bus.keys import journal_key
from shared.records.journal import JournalEntry

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"])

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


async def _models(gateway: Gateway) -> list[str]:
    """The models that live generators answer with."""
    found = {
        str(info.facts["model"]) for info in await gateway.context.registry.live("generator") if "model" in info.facts
    }
    return sorted(found)


@router.get("/models", summary="The assistant, and the models behind it",
            responses=told("Models", {"object": "list", "data": [_MODEL]}, 503))  # fmt: skip
async def models(gateway: GatewayDep, _user: UserDep) -> Response:
    async with gateway.reachable():
        names = [DEFAULT_MODEL, UTILITY_MODEL, *await _models(gateway)]
    started = gateway.context.started // 1000
    return reply({"object": "list", "data": [{**_MODEL, "id": name, "created": started} for name in names]})


@router.post(
    "/chat/completions",
    summary="A chat completion by the whole agent; its tools run on this side",
    responses=told("The completion; with `stream` its chunks as events", _COMPLETION,
                   400, 404, 409, 413, 415, 429, 502, 503, 504),
)  # fmt: skip
async def chat(
    request: Request,
    body: ChatBody,
    gateway: GatewayDep,
    user: UserDep,
    idempotency_key: Annotated[str | None, Header(description=ONCE)] = None,
    traceparent: Annotated[str | None, Header(description="W3C trace context")] = None,
) -> Response:
    async with gateway.reachable():
        names = await _models(gateway)
    ask = asked(body, names)
    record = await accept(gateway, Origin(user, idempotency_key, traceparent), ask)
    model = body.model or DEFAULT_MODEL
    named = {"X-Query-Id": record.query_id, "X-Request-Id": record.query_id}
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        chunks = Chunks(record.query_id, model, include_usage, whole=ask.whole, legacy=body.legacy)
        return EventStream(gateway, _streamed(gateway, record, chunks), named)
    shown = await finished(request, gateway, record)
    answer = completion(record.query_id, model, shown, int(time.time()), whole=ask.whole, legacy=body.legacy)
    return reply(answer, headers=named)


async def _streamed(gateway: Gateway, record: QueryRecord, chunks: Chunks) -> AsyncIterator[bytes]:
    now = asyncio.get_running_loop().time
    until = loop_time_of(gateway, record)
    follower = gateway.bell.follow(journal_key(record.query_id, "A"))
    try:
        yield chunks.opening()
        while (left := until - now()) > 0:
            found = await follower.next(min(gateway.settings.keepalive, left))
            if not found:
                if await forgotten(gateway, record.query_id):
                    yield failed("not_found", "the query was deleted before it was answered")
                    return
                yield KEEP_ALIVE
                continue
            text = chunks.feed([JournalEntry.parse(entry) for entry in found])
            if text:
                yield text
            if chunks.done:
                return
        yield failed("deadline", "the query was not answered by its deadline")
    finally:
        follower.close()
