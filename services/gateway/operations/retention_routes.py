"""What is kept how long, and what would go: of everybody, for administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.gateway.http.auth import AdminDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import operate
from services.gateway.http.schemas import spec
from services.gateway.operations.operator_shapes import RetentionShown
from services.gateway.queries.deletion import STEP
from services.gateway.queries.retention import retention

router = APIRouter(route_class=JsonRoute, tags=["retention"])

# Who keeps something, besides the gateway.
_KEEPERS = ("memory", "knowledge", "reward")
_KIND = {
    "kind": "sessions", "participant": "gateway", "setting": "keep_days_sessions", "keep_days": 365, "kept": 812,
    "oldest": 1_700_000_000_000, "due": 14,
}  # fmt: skip
_SHOWN = {"days": None, "kinds": [_KIND], "away": [{"participant": "knowledge", "reason": "no knowledge is running"}]}


@router.get("/retention", summary="What is kept how long, and what would be removed now; nothing is removed by asking",
            responses=spec("By kind", RetentionShown, _SHOWN, 403, 422, 503))  # fmt: skip
async def show_retention(
    gateway: GatewayDep,
    _admin: AdminDep,
    days: Annotated[
        int | None, Query(ge=1, le=36_500, description="What would go if each kind were kept for so many days")
    ] = None,
) -> Response:
    async with gateway.reachable(extra=STEP):
        kinds = await retention(gateway).shown(days)
    away = []
    for participant in _KEEPERS:
        try:
            kinds += (await operate(gateway, participant, "", op="retention", days=days))["kinds"]
        except ApiError as exc:
            # without it the others are still shown
            away.append({"participant": participant, "reason": exc.message})
    return reply({"days": days, "kinds": kinds, "away": away})
