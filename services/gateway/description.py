"""The OpenAPI document: what FastAPI finds in the routes, and what it cannot know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.http.schemas import JSON, MEANINGS, PLACE, PROBLEM, Problem
from services.gateway.openai.shapes import ChatChunkEvent, ResponseEvent
from services.gateway.operations.knowledge_shapes import ClaimLine
from services.gateway.operations.memory_shapes import EngramLine
from services.gateway.operations.operator_shapes import RestoreLine
from services.gateway.operations.preference_shapes import PreferenceRow
from services.gateway.queries.event_shapes import BusEvent, JournalEvent

# What a stream or a file is made of, and every refusal; no route has one of these as its body.
_ITEMS: tuple[type[BaseModel], ...] = (
    JournalEvent,
    BusEvent,
    ChatChunkEvent,
    ResponseEvent,
    EngramLine,
    ClaimLine,
    PreferenceRow,
    RestoreLine,
    Problem,
)
# FastAPI's own words for a request that is refused; ours are others.
_FOREIGN = ("HTTPValidationError", "ValidationError")
_DEFAULT = {"description": "Any other refusal, or a failure", **PROBLEM}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of an application, made once. 3.1, because generators of clients read nothing newer yet."""
    if app.openapi_schema is None:
        app.openapi_schema = _made(app)
    return app.openapi_schema


def _made(app: FastAPI) -> dict[str, Any]:
    for route in app.routes:
        if isinstance(route, APIRoute):
            # methods of generated clients are called like our functions
            route.operation_id = route.name
    document = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version="3.1.0",
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    schemas: dict[str, Any] = document["components"]["schemas"]
    _, found = models_json_schema([(item, "validation") for item in _ITEMS], ref_template=PLACE)
    schemas |= found["$defs"]
    for name in _FOREIGN:
        schemas.pop(name, None)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            _answers(path, operation["responses"])
    for schema in schemas.values():
        for part in schema.get("properties", {}).values():
            _may_be_left_out(part)
    return document


def _answers(path: str, responses: dict[str, Any]) -> None:
    """An answer that FastAPI makes up has no schema, or one that is not ours."""
    for answer in responses.values():
        for media in [media for media, kind in answer.get("content", {}).items() if not kind.get("schema")]:
            del answer["content"][media]
    wrong = responses.get("422", {}).get("content", {}).get(JSON, {}).get("schema", {})
    if wrong.get("$ref", "").endswith(_FOREIGN):
        del responses["422"]
        code = 400 if path.startswith("/v1/") else 422
        responses.setdefault(str(code), {**_DEFAULT, "description": MEANINGS[code]})
    responses["default"] = _DEFAULT


def _may_be_left_out(part: dict[str, Any]) -> None:
    """Generators take a field with a default for one that must be given: it is told in words."""
    if "default" not in part:
        return
    default = part.pop("default")
    if default not in (None, "", [], {}, 0, False):
        part["description"] = f"{part.get('description', '').removesuffix('.')}. Left out: {default}".removeprefix(". ")
