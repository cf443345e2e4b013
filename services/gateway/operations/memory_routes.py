"""A user's memory: search, engrams, topics, moving in and out. Everything here is about the caller's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, StringConstraints

from services.gateway.http.auth import UserDep
from services.gateway.http.body import MAX_DEPTH, JsonRoute, too_deep
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.keys import Principal
from services.gateway.http.participant_rpc import exported, memory_files, operate
from services.gateway.http.schemas import LINES, Body, spec
from services.gateway.operations.memory_shapes import (
    AllForgotten,
    EngramLine,
    EngramPage,
    Forgotten,
    HitList,
    ImportTally,
    TopicForgotten,
    TopicList,
    TopicShown,
    WholeEngram,
)
from shared.contracts import KNOWLEDGE_FORGET, KnowledgeForget

router = APIRouter(tags=["memory"], route_class=JsonRoute)
# The body of an import is read line by line, however long it is.
lines_router = APIRouter(tags=["memory"])

_MEMORY = "memory"
# A page of an import is embedded in one operation.
_IMPORT_LINES, _IMPORT_BYTES = 64, 300_000
MAX_LINE = 400_000
_MOST_ERRORS = 100

_ENGRAM = {
    "id": "1700000000000-0:A", "response_id": "1700000000000-0:A", "query_id": "1700000000000-0",
    "session_id": "geography-1", "kind": "turn", "respondent_id": "A", "time": 1_700_000_000_000, "age_seconds": 60,
    "query": "What is the capital of France?", "answer": "Paris.", "intent": "question", "entities": ["France"],
    "tainted": False, "score": 5, "winner": "A", "pairwise_winner": True,
    "pairwise_verdict": "A", "sentiment": "positive", "reward": 1.0,
}  # fmt: skip
_HIT = {
    **_ENGRAM,
    "relevance": 0.91,
    "mark": "GOOD EXAMPLE",
    "why": {"similarity": 0.83, "keyword_rank": 1},
    "metadata": {},
}
_TOPIC = {"topic": "user.preferred_language", "content": "The user prefers Elixir.", "time": 1_700_000_000_000}
_LINE = {"query": "…", "answer": "…", "session_id": "s", "time": 1_700_000_000_000, "user_id": "ann", "metadata": {}}


_Query = Annotated[str, StringConstraints(min_length=1, max_length=4_000)]


class TopicBody(Body):
    content: str = Field(min_length=1, max_length=20_000, description="What is kept under the topic")


def _zone(gateway: Gateway, user: Principal) -> str:
    """Return the IANA name of a user's time zone."""
    return user.time_zone or gateway.settings.zone


def _there(found: dict[str, Any], what: str) -> dict[str, Any]:
    if not found.pop("found"):
        raise not_found(what)
    return found


@router.get("/memory", summary="Search, ranked as the model gets it",
            responses=spec("The hits, best first", HitList,
                           {"query": "capital", "hits": [_HIT], "text": "[Memory recall — …]", "degraded": None,
                            "rerank": None, "log": None},
                           422, 503))  # fmt: skip
async def search_memory(
    gateway: GatewayDep,
    user: UserDep,
    query: Annotated[str, Query(min_length=1, max_length=4_000, description="What to look for")],
    queries: Annotated[
        list[_Query] | None, Query(max_length=8, description="Further things to look for at the same time; merged")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=50, description="Most hits of each")] = 5,
    n_results: Annotated[int | None, Query(ge=1, le=50, description="The same, as the tool calls it")] = None,
    hybrid: Annotated[bool | None, Query(description="false: by vectors alone, not by words")] = None,
    do_rerank: Annotated[bool | None, Query(description="true: only what helps, chosen by a second look")] = None,
    log: Annotated[bool, Query(description="Also the turns before and after each hit")] = False,
) -> Response:
    wanted: dict[str, Any] = {"queries": queries or [], "hybrid": hybrid, "do_rerank": do_rerank, "log": log}
    found = await operate(
        gateway,
        _MEMORY,
        user.user_id,
        time_zone=_zone(gateway, user),
        op="search",
        query=query,
        limit=n_results or limit,
        **wanted,
    )
    return reply({"query": query, **found})


@router.get("/memory/engrams", summary="Your engrams, newest first",
            responses=spec("A page", EngramPage, {"engrams": [_ENGRAM], "cursor": None, "total": 1},
                           422, 503))  # fmt: skip
async def list_engrams(
    gateway: GatewayDep,
    user: UserDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=300, description="Of the page before")] = None,
) -> Response:
    return reply(await operate(gateway, _MEMORY, user.user_id, op="list", limit=limit, cursor=cursor))


@router.get("/memory/engrams/{engram_id}", summary="One engram with everything that is known of it",
            responses=spec("The engram", WholeEngram, _ENGRAM, 404, 503))  # fmt: skip
async def show_engram(engram_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    found = _there(await operate(gateway, _MEMORY, user.user_id, op="get", id=engram_id), "engram")
    return reply(found["engram"])


@router.delete("/memory/engrams/{engram_id}", summary="Forget one engram, for good",
               responses=spec("Forgotten", Forgotten, {"id": _ENGRAM["id"], "deleted": True}, 404, 503))  # fmt: skip
async def forget_engram(engram_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    await _forgotten(gateway, user.user_id, [engram_id])
    _there(await operate(gateway, _MEMORY, user.user_id, op="delete", id=engram_id), "engram")
    return reply({"id": engram_id, "deleted": True})


@router.delete("/memory",
               summary="Forget everything: all engrams, topics and files; export first what is to be kept",
               responses=spec("Forgotten", AllForgotten, {"deleted": 12, "files": 3}, 422, 503))  # fmt: skip
async def forget_memory(
    gateway: GatewayDep,
    user: UserDep,
    everything: Annotated[bool, Query(description="Must be true: there is no way back")] = False,
) -> Response:
    if not everything:
        raise ApiError(422, "invalid_request", "everything: must be true to delete the whole memory")
    await _forgotten(gateway, user.user_id, [])
    async with memory_files(gateway) as files:
        gone = (await files.operate(user.user_id, op="delete_user"))["deleted"]
    return reply({**await operate(gateway, _MEMORY, user.user_id, op="delete_user"), "files": gone})


async def _forgotten(gateway: Gateway, user_id: str, ids: list[str]) -> None:
    """On the bus, and first: knowledge forgets what rests on this alone, also when it is away now."""
    async with gateway.reachable():
        gone = KnowledgeForget(user_id=user_id, response_ids=ids, at=gateway.bus.now_ms())
        await gateway.bus.publish(KNOWLEDGE_FORGET.of(gone, user_id=user_id))


# ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/memory/topics", summary="Your topics",
            responses=spec("All of them", TopicList, {"topics": [_TOPIC]}, 503))  # fmt: skip
async def list_topics(gateway: GatewayDep, user: UserDep) -> Response:
    return reply(await operate(gateway, _MEMORY, user.user_id, op="topics"))


@router.get("/memory/topics/{topic:path}", summary="What is kept under a topic",
            responses=spec("The topic", TopicShown, _TOPIC, 404, 503))  # fmt: skip
async def show_topic(topic: str, gateway: GatewayDep, user: UserDep) -> Response:
    return reply(_there(await operate(gateway, _MEMORY, user.user_id, op="topic_get", topic=topic), "topic"))


@router.put("/memory/topics/{topic:path}", summary="Keep something under a topic (user.…, project.…, constraint.…)",
            responses=spec("The topic", TopicShown, _TOPIC, 400, 415, 422, 503))  # fmt: skip
async def put_topic(topic: str, body: TopicBody, gateway: GatewayDep, user: UserDep) -> Response:
    return reply(
        await operate(
            gateway,
            _MEMORY,
            user.user_id,
            time_zone=_zone(gateway, user),
            op="topic_put",
            topic=topic,
            content=body.content,
        )
    )


@router.delete("/memory/topics/{topic:path}", summary="Forget a topic",
               responses=spec("Forgotten", TopicForgotten, {"topic": _TOPIC["topic"], "deleted": True},
                              404, 503))  # fmt: skip
async def forget_topic(topic: str, gateway: GatewayDep, user: UserDep) -> Response:
    _there(await operate(gateway, _MEMORY, user.user_id, op="topic_delete", topic=topic), "topic")
    return reply({"topic": topic, "deleted": True})


# ── moving in and out ────────────────────────────────────────────────────────────────────────────────────────


@lines_router.get(
    "/memory/export",
    summary="All your engrams and topics, one JSON object a line",
    responses=spec("JSON lines", EngramLine, orjson.dumps(_LINE).decode(), 503, media=LINES),
)
async def export_memory(gateway: GatewayDep, user: UserDep) -> Response:
    return await exported(gateway, _MEMORY, user.user_id)


_BODY = {
    "requestBody": {
        "required": False,
        "content": {"application/x-ndjson": {"schema": {"type": "string"}, "example": orjson.dumps(_LINE).decode()}},
    }
}


@lines_router.post("/memory/import", summary="Take in engrams: JSON lines as /memory/export writes them",
                   openapi_extra=_BODY,
                   responses=spec("What was taken; `there`: of these, what had been taken before", ImportTally,
                                  {"imported": 2, "there": 0, "errors": [{"line": 3, "message": "…"}], "failed": 1},
                                  400, 413, 503))  # fmt: skip
async def import_memory(request: Request, gateway: GatewayDep, user: UserDep) -> Response:
    imported, there, failed, number = 0, 0, 0, 0
    errors: list[dict[str, Any]] = []
    page: list[tuple[int, dict[str, Any]]] = []
    size = 0

    def wrong(line: int, message: str) -> None:
        nonlocal failed
        failed += 1
        # a body may have more lines than anybody keeps complaints of
        if len(errors) < _MOST_ERRORS:
            errors.append({"line": line, "message": message})

    async def send() -> None:
        nonlocal imported, there, size
        found = await operate(
            gateway,
            _MEMORY,
            user.user_id,
            time_zone=_zone(gateway, user),
            op="import",
            lines=[line for _, line in page],
        )
        imported += found["imported"]
        there += found["there"]
        for bad in found["errors"]:
            wrong(page[bad["line"]][0], bad["message"])
        page.clear()
        size = 0

    async for raw in _lines(request):
        number += 1
        if not raw.strip():
            continue
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError:
            line = None
        if not isinstance(line, dict):
            wrong(number, "a JSON object is expected")
            continue
        if too_deep(raw, line):
            wrong(number, f"it is nested more than {MAX_DEPTH} levels deep")
            continue
        if page and (len(page) >= _IMPORT_LINES or size + len(raw) > _IMPORT_BYTES):
            await send()
        page.append((number, line))
        size += len(raw)
    if page:
        await send()
    return reply({"imported": imported, "there": there, "errors": errors, "failed": failed})


async def _lines(request: Request) -> AsyncIterator[bytes]:
    """The body's lines as they come. Raises ApiError for one that is too long."""
    rest = b""
    async for part in request.stream():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield _bounded(line)
        _bounded(rest)
    if rest:
        yield rest


def _bounded(line: bytes) -> bytes:
    if len(line) > MAX_LINE:
        raise ApiError(413, "body_too_large", f"a line is longer than {MAX_LINE} bytes")
    return line
