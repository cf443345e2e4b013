"""Every answer that the tests' HTTP clients get is compared with the description of the API.

What a shape does not name is an error here, although clients must ignore it: a field that was added without being
described would else be seen by nobody.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import orjson
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from services.gateway.app import create_app
from services.gateway.description import describe
from services.gateway.http.errors import CODES
from services.gateway.http.gateway import Gateway
from services.gateway.settings import GatewaySettings

JSON, SSE, LINES = "application/json", "text/event-stream", "application/x-ndjson"
# What participants that exist in tests only, and failures that a test scripts, are called by.
_OWN_CODES = re.compile(r"[a-z_]+_unavailable|[a-z_]*boom[a-z_]*")


@cache
def document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = GatewaySettings(data_dir=Path(folder), admin_key="an-administrator's-key")
        return describe(create_app(Gateway(settings)))


@cache
def _paths() -> list[tuple[re.Pattern[str], str]]:
    """The longest template first: /memory/topics before /memory/{…}."""
    found = sorted(document()["paths"], key=lambda path: (path.count("{"), -len(path)))
    openings = {"name": ".+", "topic": ".+"}
    return [(re.compile(re.sub(r"\{(\w+)\}", lambda m: openings.get(m[1], "[^/]+"), path)), path) for path in found]


def template(path: str) -> str | None:
    """The route of a path, as the description names it."""
    return next((found for pattern, found in _paths() if pattern.fullmatch(path)), None)


def _closed(schema: Any) -> Any:
    """A schema in which an object has the properties that are named, and no other."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items() if name not in ("example", "examples")}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


@cache
def _components() -> dict[str, Any]:
    return {name: _closed(schema) for name, schema in document()["components"]["schemas"].items()}


@cache
def _registry() -> Registry[Any]:
    resource = DRAFT202012.create_resource({"components": {"schemas": _components()}})
    return Registry().with_resource("urn:described", resource).crawl()


@cache
def _validator(schema: bytes) -> Draft202012Validator:
    placed = orjson.loads(schema.replace(b'"#/components', b'"urn:described#/components'))
    return Draft202012Validator(_closed(placed), registry=_registry())


def trouble(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a value of this schema of the description; None when nothing is."""
    errors = sorted(_validator(orjson.dumps(schema)).iter_errors(value), key=lambda error: list(error.absolute_path))
    return "; ".join(f"{error.json_path}: {error.message[:300]}" for error in errors[:3]) or None


def event_trouble(name: str, event: Mapping[str, str]) -> str | None:
    """The same of a server-sent event or a line: of its shape called `name`, and of the JSON in its data."""
    schema = _components()[name]
    if "discriminator" in schema:
        place = schema["discriminator"]["mapping"].get(event["event"])
        if place is None:
            return f"an event {event['event']!r} is not described"
        schema = _components()[place.rsplit("/", 1)[1]]
    if wrong := trouble(event, schema):
        return wrong
    data = schema["properties"].get("data", {})
    inner = next((part for part in (data, *data.get("anyOf", ())) if "contentSchema" in part), None)
    if inner is None or event["data"] == "[DONE]":
        return None
    return trouble(orjson.loads(event["data"]), inner["contentSchema"])


def check(method: str, path: str, status: int, media: str, body: bytes) -> None:
    """Raises AssertionError for an answer that the description does not know."""
    route = template(path)
    operation = document()["paths"].get(route, {}).get(method.lower())
    where = f"{method} {path} {status}"
    if operation is None:
        # nobody's route: a refusal in the one form
        assert status >= 400, f"{where}: this route is not described"
        operation = {"responses": {"default": {"content": {JSON: {"schema": _PROBLEM}}}}}
    answers = operation["responses"]
    assert str(status) in answers or status >= 400, f"{where}: this status is not described"
    kinds = answers.get(str(status), answers["default"]).get("content", {})
    assert media in kinds, f"{where}: {media} is not described, {sorted(kinds)} are"
    if media == JSON:
        value = orjson.loads(body)
        wrong = trouble(value, kinds[JSON]["schema"])
        assert wrong is None, f"{where}: not as described: {wrong}"
        if status >= 400 and "error" in value:
            code = value["error"]["code"]
            assert code in CODES or _OWN_CODES.fullmatch(code), f"{where}: the code {code!r} is not described"


_PROBLEM = {"$ref": "#/components/schemas/Problem"}


# made before a test begins: it takes most of a second, in which no replica could say that it lives
_registry()


async def hook(response: httpx.Response) -> None:
    """For the `response` hooks of an httpx client. The request's extension `undescribed` leaves an answer alone."""
    media = response.headers.get("content-type", "").partition(";")[0]
    if media != JSON or response.request.extensions.get("undescribed"):
        return
    body = await response.aread()
    check(response.request.method, response.request.url.path, response.status_code, media, body)
