"""Dead letters: list, replay, drop."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from services.gateway.http.auth import AdminDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.schemas import spec
from services.gateway.operations.operator_shapes import DeadLetterPage, DroppedCount, Replayed
from services.gateway.queries.records import checked_entry_id
from shared.bus import Entry
from shared.bus.dead_letters import drop, replay
from shared.contracts import DEAD_LETTER
from shared.envelope import Envelope
from shared.errors import DecodeError

router = APIRouter(route_class=JsonRoute, prefix="/dead-letters", tags=["dead letters"])

_LETTER = {
    "id": "1700000000000-0",
    "time": 1700000000000,
    "stream": "local2:query.received",
    "group": "generator",
    "entry_id": "1699999999999-0",
    "deliveries": 5,
    "reason": "the entry has no field 'payload'",
    "fields": {"subject": "query.received"},
}


@router.get("", summary="A page of dead letters, the oldest first",
            responses=spec("Dead letters; `next` is the cursor of the following page", DeadLetterPage,
                           {"dead_letters": [_LETTER], "total": 1, "next": None}, 400, 403, 422, 503))  # fmt: skip
async def list_dead_letters(
    gateway: GatewayDep,
    _admin: AdminDep,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(description="`next` of the page before")] = None,
) -> Response:
    after = checked_entry_id(cursor, "cursor")
    async with gateway.reachable():
        total = await gateway.bus.link.call("XLEN", DEAD_LETTER.stream)
        found = await gateway.bus.range(DEAD_LETTER.stream, f"({after}" if after else "-", "+", count=limit + 1)
    shown = [_shown(entry) for entry in found[:limit]]
    following = found[limit - 1][0] if len(found) > limit else None
    return reply({"dead_letters": shown, "total": total, "next": following})


def _shown(entry: Entry) -> dict[str, Any]:
    try:
        envelope = Envelope.parse(DEAD_LETTER.name, *entry)
        letter = DEAD_LETTER.decode(envelope)
    except (DecodeError, ValueError) as exc:
        texts = [field.decode(errors="backslashreplace") for field in entry[1]]
        return {"id": entry[0], "malformed": str(exc), "fields": dict(zip(texts[::2], texts[1::2], strict=True))}
    return {"id": entry[0], "time": envelope.time, **letter.model_dump(exclude={"raw"})}


def _checked(letter_id: str) -> str:
    checked = checked_entry_id(letter_id, "the dead letter's id")
    assert checked is not None
    return checked


@router.post(
    "/{letter_id}/replay",
    summary="Put the original entry back on its stream",
    responses=spec("Replayed", Replayed, {"id": "1-0", "entry_id": "2-0"}, 400, 403, 404, 422, 503),
)  # fmt: skip
async def replay_dead_letter(letter_id: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        try:
            entry_id = await replay(gateway.bus, _checked(letter_id))
        except (DecodeError, ValueError) as exc:
            raise ApiError(422, "malformed", f"this dead letter cannot be replayed: {exc}") from exc
    if entry_id is None:
        raise not_found("dead letter")
    return reply({"id": letter_id, "entry_id": entry_id})


@router.delete("/{letter_id}", summary="Drop one dead letter",
               responses=spec("Dropped", DroppedCount, {"dropped": 1}, 400, 403, 404, 503))  # fmt: skip
async def drop_dead_letter(letter_id: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        if not await drop(gateway.bus, _checked(letter_id)):
            raise not_found("dead letter")
    return reply({"dropped": 1})


@router.delete("", summary="Drop all dead letters", responses=spec("Dropped", DroppedCount, {"dropped": 12}, 403, 503))
async def drop_dead_letters(gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        dropped = await gateway.bus.link.call("XTRIM", DEAD_LETTER.stream, "MAXLEN", "=", 0)
    return reply({"dropped": dropped})
