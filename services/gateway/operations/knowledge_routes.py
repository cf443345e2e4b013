"""A user's knowledge: facts with what is and what was, and who they are about. Everything is the caller's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Response
from pydantic import Field, model_validator

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import not_found
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import exported, operate
from services.gateway.http.schemas import LINES, Body, spec
from services.gateway.operations.knowledge_shapes import (
    ClaimLine,
    EntityPage,
    Fact,
    FactForgotten,
    FactPage,
    Kind,
    KnowledgeGraph,
    State,
)

router = APIRouter(tags=["knowledge"], route_class=JsonRoute)

_KNOWLEDGE = "knowledge"

_ANNA = {"id": "anna", "name": "Anna", "kind": "person"}
_LYON = {"id": "lyon", "name": "Lyon", "kind": "place"}
_FACT = {
    "id": "3f1c9a5b7d2e4f60a1b2c3d4", "subject": _ANNA, "relation": "lives in", "object": _LYON, "state": "was",
    "since": None, "until": "2026-05", "said": "2026-01-03", "time": 1_767_400_000_000, "confidence": 0.8,
    "text": "Anna lives in Lyon: WAS true until 2026-05 (said 2026-01-03)",
    "why": ["The user said on 2026-01-03: “My sister Anna lives in Lyon.” (read by the model)."],
    "sources": [{"source": "1767400000000-0:A", "session_id": "family-1", "time": 1_767_400_000_000,
                 "speaker": "user", "by": "model", "quote": "My sister Anna lives in Lyon."}],
}  # fmt: skip
_EDGE = {"id": _FACT["id"], "from": "anna", "to": "lyon", "relation": "lives in", "state": "was", "since": None,
         "until": "2026-05", "confidence": 0.8}  # fmt: skip
# fmt: off
_LINE = {"user_id": "ann", "id": _FACT["id"], "source": "1767400000000-0:A", "session_id": "family-1",
         "said": 1_767_400_000_000, "subject_key": "anna", "subject": "Anna", "subject_kind": "person",
         "relation": "lives in", "object_key": "lyon", "object": "Lyon", "object_kind": "place", "holds": "is",
         "since": "", "until": "", "speaker": "user", "by": "model", "quote": "My sister Anna lives in Lyon."}
# fmt: on

_About = Annotated[str, Query(max_length=200, description="Only about this name, as the model would search it")]


class FactBody(Body):
    """since, until: as precise as they are known: 2026, 2026-05 or 2026-05-03."""

    subject: str = Field(min_length=1, max_length=80, description="A name; `me` for yourself")
    relation: str = Field(min_length=1, max_length=60, description="A few words: lives in, works at, sister of, …")
    object: str = Field(min_length=1, max_length=80, description="A name")
    subject_kind: Kind | None = None
    object_kind: Kind | None = None
    holds: Literal["is", "was"] | None = Field(default=None, description="was: it is over; left out: it is so")
    since: str | None = Field(default=None, max_length=20)
    until: str | None = Field(default=None, max_length=20, description="When it was over; then it WAS")


class CorrectionBody(Body):
    """What is left out stays as it is; `since` and `until` of "" are taken away."""

    subject: str | None = Field(default=None, min_length=1, max_length=80)
    relation: str | None = Field(default=None, min_length=1, max_length=60)
    object: str | None = Field(default=None, min_length=1, max_length=80)
    subject_kind: Kind | None = None
    object_kind: Kind | None = None
    holds: Literal["is", "was"] | None = None
    since: str | None = Field(default=None, max_length=20)
    until: str | None = Field(default=None, max_length=20)

    @model_validator(mode="after")
    def _something(self) -> CorrectionBody:
        if not self.model_fields_set:
            raise ValueError("say what is to be corrected")
        return self


def _there(found: dict[str, Any]) -> dict[str, Any]:
    if not found.pop("found"):
        raise not_found("fact")
    return found


def _given(body: Body) -> dict[str, Any]:
    return {name: value for name, value in body.model_dump().items() if value is not None}


@router.get("/knowledge/facts", summary="Your facts, the newest first",
            responses=spec("A page", FactPage, {"facts": [_FACT], "cursor": None, "total": 1}, 422, 503))  # fmt: skip
async def list_facts(
    gateway: GatewayDep,
    user: UserDep,
    about: _About = "",
    state: Annotated[State | None, Query(description="Only what is, was, or is doubted")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=100, description="Of the page before")] = None,
) -> Response:
    asked: dict[str, Any] = {"about": about, "state": state or "", "limit": limit, "cursor": cursor}
    return reply(await operate(gateway, _KNOWLEDGE, user.user_id, op="list", **asked))


@router.get("/knowledge/facts/{fact_id}", summary="One fact, and why it is believed",
            responses=spec("The fact", Fact, _FACT, 404, 503))  # fmt: skip
async def show_fact(fact_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    return reply(_there(await operate(gateway, _KNOWLEDGE, user.user_id, op="get", id=fact_id))["fact"])


@router.post("/knowledge/facts", summary="Add a fact; it counts more than anything that was read from what was said",
             responses=spec("The fact", Fact, _FACT, 400, 415, 422, 503))  # fmt: skip
async def add_fact(body: FactBody, gateway: GatewayDep, user: UserDep) -> Response:
    return reply((await operate(gateway, _KNOWLEDGE, user.user_id, op="add", **_given(body)))["fact"])


@router.patch("/knowledge/facts/{fact_id}", summary="Correct a fact: its parts, or whether and when it was so",
              responses=spec("The fact as it is now", Fact, _FACT, 400, 404, 415, 422, 503))  # fmt: skip
async def correct_fact(fact_id: str, body: CorrectionBody, gateway: GatewayDep, user: UserDep) -> Response:
    found = await operate(gateway, _KNOWLEDGE, user.user_id, op="correct", id=fact_id, **_given(body))
    return reply(_there(found)["fact"])


@router.delete("/knowledge/facts/{fact_id}", summary="Forget a fact, for good",
               responses=spec("Forgotten", FactForgotten, {"id": _FACT["id"], "deleted": True}, 404, 503))  # fmt: skip
async def forget_fact(fact_id: str, gateway: GatewayDep, user: UserDep) -> Response:
    _there(await operate(gateway, _KNOWLEDGE, user.user_id, op="delete", id=fact_id))
    return reply({"id": fact_id, "deleted": True})


@router.get("/knowledge/entities", summary="Who and what your facts are about, the most talked of first",
            responses=spec("Entities", EntityPage,
                           {"entities": [{**_ANNA, "names": ["anna", "annie"], "facts": 2}], "total": 1},
                           422, 503))  # fmt: skip
async def list_entities(
    gateway: GatewayDep, user: UserDep, about: _About = "", limit: Annotated[int, Query(ge=1, le=500)] = 100
) -> Response:
    return reply(await operate(gateway, _KNOWLEDGE, user.user_id, op="entities", about=about, limit=limit))


@router.get("/knowledge/graph", summary="Nodes and edges for a picture, around a name or of the newest facts",
            responses=spec("The graph", KnowledgeGraph, {"nodes": [_ANNA, _LYON], "edges": [_EDGE]},
                           422, 503))  # fmt: skip
async def draw_knowledge(
    gateway: GatewayDep, user: UserDep, about: _About = "", limit: Annotated[int, Query(ge=1, le=500)] = 100
) -> Response:
    return reply(await operate(gateway, _KNOWLEDGE, user.user_id, op="graph", about=about, limit=limit))


@router.get(
    "/knowledge/export",
    summary="Everything that was ever noted of your facts, one JSON object a line",
    responses=spec("JSON lines", ClaimLine, orjson.dumps(_LINE).decode(), 503, media=LINES),
)
async def export_knowledge(gateway: GatewayDep, user: UserDep) -> Response:
    return await exported(gateway, _KNOWLEDGE, user.user_id)
