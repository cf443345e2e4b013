"""Operations of other participants, as routes need them: an answer, or an error of the API."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse

from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.http.schemas import LINES
from shared.errors import BusUnavailable, Local2Error, TransientError
from shared.participant.files import OPERATION, Files, FilesRefused, FilesUnavailable, open_files, recorded
from shared.participant.tool import OUTCOME_UNKNOWN
from shared.participant.tool_client import Caller
from shared.participant.writes import UNAVAILABLE, is_write
from shared.telemetry.logging import get_logger

log = get_logger()

_SECONDS = 30.0
# Records of an export in one operation.
_EXPORTED = 100
# Ids in one operation of the memory, at most.
_MOST_IDS = 100
_AWAY = (UNAVAILABLE, OUTCOME_UNKNOWN, "tool timeout", "tool unavailable", "unknown tool")


def new_call() -> str:
    """Return an id for a call of the gateway's own."""
    return f"http:{uuid.uuid4().hex}"


async def operate(
    gateway: Gateway, participant: str, user_id: str, *, time_zone: str = "", **args: Any
) -> dict[str, Any]:
    """Return the result of an operation of a participant's `…_manage`.

    time_zone: IANA name of the user's zone. Raises ApiError: 422 when the participant refuses the operation, 503 when
    it does not answer; with `outcome` when a write may have been made.
    """
    return await operate_for(gateway, participant, Caller(query_id="", user_id=user_id, time_zone=time_zone), args)


async def operate_for(
    gateway: Gateway, participant: str, caller: Caller, args: dict[str, Any], seconds: float = _SECONDS
) -> dict[str, Any]:
    """Do the same as `operate` with a timeout in seconds. The id of the call is `caller.query_id`, or a new one."""
    operation, asked = f"{participant}_manage", False
    changes = is_write(participant, args)
    try:
        async with gateway.reachable(extra=seconds):
            if await gateway.context.registry.served(operation) is None:
                await gateway.check_room()
                raise _unavailable(participant, f"no {participant} is running")
            call_id, asked = caller.query_id or new_call(), True
            caller = replace(caller, query_id=call_id, deadline=gateway.bus.now_ms() + int(seconds * 1000))
            outcome = await gateway.tools.call(
                operation, args, call_id=call_id, caller=caller, timeout=seconds, attempt=1, internal=True
            )
    except BusUnavailable as exc:
        if changes and asked:
            raise _unavailable(participant, str(exc), unknown=True) from exc
        raise
    if outcome.error is None:
        found: dict[str, Any] = outcome.data
        return found
    if outcome.error.startswith(_AWAY):
        # A participant that reports "unavailable" has written nothing.
        unsure = bool(outcome.request_id) and not outcome.error.startswith(UNAVAILABLE)
        why = outcome.error.removeprefix(UNAVAILABLE).removeprefix(OUTCOME_UNKNOWN)
        raise _unavailable(participant, why, unknown=changes and unsure)
    raise ApiError(422, "invalid_request", outcome.error)


async def exported(gateway: Gateway, participant: str, user_id: str) -> Response:
    """Return all that a participant keeps of a user, as JSON lines. Raises ApiError when the first page fails.

    When a later page fails, the connection ends: the answer must not look whole.
    """
    first = await operate(gateway, participant, user_id, op="export", limit=_EXPORTED)

    async def lines() -> AsyncIterator[bytes]:
        page = first
        while True:
            yield b"".join(orjson.dumps(line) + b"\n" for line in page["lines"])
            if page["cursor"] is None:
                return
            try:
                page = await operate(gateway, participant, user_id, op="export", limit=_EXPORTED, cursor=page["cursor"])
            except (ApiError, Local2Error) as exc:
                log.warning("export.broken", participant=participant, reason=str(exc))
                raise

    return StreamingResponse(lines(), media_type=LINES)


@contextlib.asynccontextmanager
async def memory_files(gateway: Gateway) -> AsyncIterator[Files]:
    """The files that the memory keeps. What goes wrong inside becomes an ApiError: 503 when the memory is away, what it
    says itself when it refuses."""
    async with gateway.reachable():
        if await gateway.context.registry.served(OPERATION) is None:
            await gateway.check_room()
            raise _unavailable("memory", "no memory is running")
    try:
        async with open_files(gateway.tools) as files:
            yield files
    except FilesUnavailable as exc:
        raise _unavailable("memory", str(exc), unknown=exc.unknown) from exc
    except FilesRefused as exc:
        headers = {"Retry-After": "5"} if exc.status == 429 else None
        raise ApiError(exc.status, exc.code, str(exc), headers) from exc


async def known_files(gateway: Gateway, user_id: str, ids: Sequence[str] | None) -> list[dict[str, Any]] | None:
    """Return the files of a question, each once, with the fields that a turn records. Raises ApiError 404 for a file
    that is not the user's."""
    if ids is None:
        return None
    found = await there_still(gateway, user_id, ids)
    if missing := [one for one in ids if one not in {file["id"] for file in found}]:
        raise ApiError(404, "not_found", f"attachments: there is no such file: {missing[0]}")
    return found


async def there_still(gateway: Gateway, user_id: str, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the existing ones of a user's files, each once, with the fields that a turn records. Raises ApiError 503
    while the memory is away."""
    if not ids:
        return []
    async with memory_files(gateway) as files:
        found = await files.operate(user_id, op="get", ids=list(dict.fromkeys(ids)))
    return [recorded(file) for file in found["files"]]


async def files_now(gateway: Gateway, user_id: str, files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return attached files by id for clients: with the memory's present facts, and `deleted`. While the memory is
    away, each file has only the fields that its turn recorded."""
    found = {str(file["id"]): {**file, "deleted": False} for file in files}
    ids = list(found)
    with contextlib.suppress(ApiError, TransientError):
        for start in range(0, len(ids), _MOST_IDS):
            async with memory_files(gateway) as memory:
                now = await memory.operate(user_id, op="get", ids=ids[start : start + _MOST_IDS])
            for file in now["files"]:
                found[file["id"]] |= recorded(file)
            for id in now["missing"]:
                found[id]["deleted"] = True
    return found


def _unavailable(participant: str, why: str, *, unknown: bool = False) -> ApiError:
    """unknown: whether a write may have been made."""
    text, extra = f"{participant} is not available: {why}"[:500], {"outcome": "unknown"} if unknown else {}
    if unknown:
        text += ". The outcome of this change is unknown: read it again before you repeat the change."
    return ApiError(503, f"{participant}_unavailable", text, {"Retry-After": "5"}, **extra)
