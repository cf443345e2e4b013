"""Who may sit in a committee."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.gateway.http.auth import UserDep
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.schemas import spec
from services.gateway.operations.operator_shapes import PersonaList
from services.gateway.operations.participant_routes import described

router = APIRouter(tags=["queries"])

_LISTED = {
    "personas": ["Analyst", "Skeptic", "The Inner Child"],
    "active_personas": ["Analyst", "Skeptic"],
    "order": [],
    "rounds": 1,
    "parallel": False,
}


@router.get("/personas", summary="Who may sit in a committee, and who does when a query names nobody",
            responses=spec("Names, and how a committee sits", PersonaList, _LISTED, 503))  # fmt: skip
async def list_personas(gateway: GatewayDep, _user: UserDep) -> Response:
    async with gateway.reachable():
        try:
            schema, values, _ = await described(gateway, "generator")
        except ApiError as exc:
            raise ApiError(
                503, "generator_unavailable", "no generator has said yet who may sit in a committee"
            ) from exc
    names = schema.get("properties", {}).get("active_personas", {}).get("items", {}).get("enum", [])
    settings = {name: values[name] for name in ("active_personas", "order", "rounds", "parallel") if name in values}
    return reply({"personas": names, **settings})
