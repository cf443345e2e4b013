"""Every error of the HTTP interface has one shape: {"error": {"code", "message", …}}."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Route

from shared.bus import BusFull, ReplyError
from shared.errors import BusUnavailable, TransientError
from shared.participant.room import BusNearlyFull, TooMuchUnderWay
from shared.telemetry.logging import get_logger

log = get_logger()

# What programs tell errors apart by.
CODES = frozenset({
    "attachment_missing", "bad_event_id", "bad_form", "bad_idempotency_key", "bad_json", "bad_query_id",
    "bad_request", "body_too_large", "bus_full", "bus_refused", "bus_unavailable", "clock_behind",
    "context_length_exceeded", "context_overflow", "corrupt", "damaged", "deadline", "deadline_exceeded",
    "experiment_refused",
    "empty_file", "error", "forbidden", "generator_unavailable", "idempotency_conflict",
    "incomplete", "internal",
    "invalid_record", "invalid_request", "invalid_setting", "knowledge_unavailable", "malformed", "memory_error",
    "memory_unavailable", "method_not_allowed", "model_error", "model_missing", "model_not_found",
    "model_overloaded", "model_rejected", "model_unavailable", "newer_format", "newer_section", "no_space",
    "not_a_backup", "not_answered", "not_empty", "not_found", "overloaded", "query_deleted", "quota_exceeded",
    "request_timeout", "restore_running",
    "restore_unfinished", "reward_unavailable", "section_unavailable", "session_busy", "start_key", "stopping",
    "stream_interrupted", "too_large", "too_many_requests", "too_many_uploads", "tool_unavailable", "truncated",
    "unauthorized", "unknown_persona",
    "unknown_section", "unsupported", "unsupported_media_type", "unsupported_type", "wrong_type",
})  # fmt: skip

_CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

# Too many requests, and what will be there again in a moment.
_WORTH_ANOTHER_TRY = (429, 503)

# What a failed query's code means in HTTP. A code that is not here is a fault of ours: 500.
FAILURE_STATUS = {
    "bad_request": 400,
    "unknown_persona": 400,
    "attachment_missing": 404,
    "memory_unavailable": 503,
    "context_overflow": 413,
    "deadline": 504,
    "deadline_exceeded": 504,
    "model_error": 502,
    "model_missing": 502,
    "model_rejected": 400,
    "stream_interrupted": 502,
    "model_overloaded": 503,
    "model_unavailable": 503,
}


class ApiError(HTTPException):
    """A refusal with a code for programs and a sentence for people; `extra` fields stand beside them."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None, **extra: Any
    ) -> None:
        super().__init__(status, message, headers=dict(headers) if headers else None)
        self.code = code
        self.message = message
        self.extra = extra


def not_found(what: str) -> ApiError:
    """Also for things of somebody else: their existence is not told."""
    return ApiError(404, "not_found", f"there is no such {what}")


def error_body(code: str, message: str, extra: Mapping[str, Any] | None = None) -> bytes:
    # a message may quote what a client sent, lone surrogates included
    safe = message.encode(errors="replace").decode()
    return orjson.dumps({"error": {"code": code, "message": safe, **(extra or {})}})


def openai_fields(status: int) -> dict[str, Any]:
    """What clients of OpenAI expect beside code and message."""
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"type": kind, "param": None}


def openai_code(code: str) -> str:
    """The code that clients of OpenAI know a failure by: those that can make a conversation shorter do so for it."""
    return "context_length_exceeded" if code == "context_overflow" else code


def render(
    request: Request,
    status: int,
    code: str,
    message: str,
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Response:
    fields, given = dict(extra or {}), dict(headers or {})
    if request.url.path.startswith("/v1/"):
        if (known := openai_code(code)) != code:
            status, code = 400, known
        fields |= openai_fields(status)
        # OpenAI's clients ask again for every 409 and 5xx by themselves, and each time is a whole run of the agent
        given["X-Should-Retry"] = "true" if status in _WORTH_ANOTHER_TRY else "false"
        given["X-Request-Id"] = given.get("X-Query-Id") or uuid.uuid4().hex
    body = error_body(code, message, fields)
    return Response(body, status, headers=given, media_type="application/json")


async def _refused(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, StarletteHTTPException)
    if isinstance(exc, ApiError):
        return render(request, exc.status_code, exc.code, exc.message, exc.headers, exc.extra)
    message = {
        404: f"there is no such route: {request.method} {request.url.path}",
        405: f"{request.method} {request.url.path} is not possible",
        400: "the body could not be read as JSON",
    }.get(exc.status_code, str(exc.detail))
    headers = {"Allow": _possible(request)} if exc.status_code == 405 else exc.headers
    return render(request, exc.status_code, _CODES.get(exc.status_code, "error"), message, headers)


def _possible(request: Request) -> str:
    """The methods of a path; a route that refuses another method knows only its own."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    methods = [route.methods or () for route in routes if route.path_regex.match(request.scope["path"])]
    return ", ".join(sorted(set().union(*methods))) or "GET"


async def _invalid(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    errors = exc.errors()
    # A misspelt name is the cause of the field that is missing.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "json_invalid":
        return render(request, 400, "bad_json", f"the body is not JSON: {first['ctx']['error']}")
    status = 400 if request.url.path.startswith("/v1/") else 422
    return render(request, status, "invalid_request", sentence(first))


def sentence(error: Mapping[str, Any]) -> str:
    """One validation error as a sentence that names the field, without its value."""
    places = [str(part) for part in error["loc"]]
    if len(places) > 1 and places[0] in ("body", "query", "path", "header"):
        places = places[1:]
    reason = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "missing" if places == ["body"]:
            return "a JSON body is expected"
        case "extra_forbidden":
            reason = "there is no such field"
        case "model_type" | "model_attributes_type":
            reason = "a JSON object is expected"
    return ": ".join(part for part in (".".join(places), reason[:1].lower() + reason[1:]) if part)[:500]


async def _unserializable(request: Request, _exc: Exception) -> Response:
    return render(request, 422, "invalid_request", "body: a value in it cannot be passed on")


def full(reason: str) -> str:
    """Why the bus takes no writes, from what Redis says."""
    if reason.startswith("NOREPLICAS"):
        return "the bus has fewer replicas than it needs for a write"
    return "the bus cannot write to its disk" if reason.startswith("MISCONF") else "the bus is out of memory"


def away(exc: Exception) -> ApiError:
    """Return the refusal of a request that the bus cannot serve now."""
    if isinstance(exc, BusNearlyFull):
        code, message = "bus_full", str(exc)
    else:
        code, message = ("bus_full", full(str(exc))) if isinstance(exc, BusFull) else ("bus_unavailable", str(exc))
    return ApiError(503, code, message, {"Retry-After": "2"})


async def _bus_away(request: Request, exc: Exception) -> Response:
    return await _refused(request, away(exc))


async def _too_much(request: Request, exc: Exception) -> Response:
    return render(request, 429, "too_many_requests", str(exc), {"Retry-After": "2"})


async def _bus_refuses(request: Request, exc: Exception) -> Response:
    # a key that somebody has overwritten with another type, a user of Redis who may not what this needs
    log.error("bus.refused", method=request.method, path=request.url.path, reason=str(exc))
    return render(request, 503, "bus_refused", f"the bus refuses what this needs: {exc}")


async def _unexpected(request: Request, exc: Exception) -> Response:
    log.error("http.failed", method=request.method, path=request.url.path, error=repr(exc), exc_info=exc)
    return render(request, 500, "internal", "something went wrong here; the log has the details")


def install(app: FastAPI) -> None:
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(PydanticSerializationError, _unserializable)
    app.add_exception_handler(BusUnavailable, _bus_away)
    app.add_exception_handler(TransientError, _bus_away)
    app.add_exception_handler(TooMuchUnderWay, _too_much)
    app.add_exception_handler(ReplyError, _bus_refuses)
    app.add_exception_handler(Exception, _unexpected)
