"""API keys of users."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from services.gateway.http.auth import AdminDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.keys import LINK_SECONDS, KeyRecord
from services.gateway.http.schemas import KeyBody, KeyChange, RedeemBody, spec
from services.gateway.operations.operator_shapes import Key, KeyList, Link, NewKey

router = APIRouter(route_class=JsonRoute, prefix="/keys", tags=["keys"])

_KEY = {"id": "0f1e2d3c4b5a", "name": "Ann's laptop", "user_id": "ann", "role": "user", "created": 1700000000000,
        "trusted": False, "time_zone": "Europe/Berlin"}  # fmt: skip


def _shown(record: KeyRecord) -> dict[str, Any]:
    shown = {
        "id": record.id,
        "name": record.name,
        "user_id": record.user_id,
        "role": record.role,
        "created": record.created,
        "trusted": record.trusted,
        "time_zone": record.time_zone or None,
    }
    return {**shown, "until": record.until} if record.until else shown


@router.post("", summary="Make an API key; it is shown this once", status_code=201,
             responses=spec("The key", NewKey, {**_KEY, "key": "l2_…"}, 400, 403, 415, 422, 503,
                            status=201))  # fmt: skip
async def create_key(body: KeyBody, gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        record, secret = await gateway.keys.create(
            body.name, body.user_id, body.role, trusted=body.trusted, time_zone=body.time_zone or ""
        )
    return reply({**_shown(record), "key": secret}, 201, {"Cache-Control": "no-store"})


@router.get(
    "", summary="All API keys, without their secrets", responses=spec("Keys", KeyList, {"keys": [_KEY]}, 403, 503)
)
async def list_keys(gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        found = await gateway.keys.listed()
    return reply({"keys": [_shown(record) for record in found]})


@router.post("/link", summary="A link that opens the console as you, once, within a minute",
             status_code=201,
             responses=spec("The link's token", Link, {"token": "…", "path": "/#once=…", "seconds": 60}, 403, 503,
                            status=201))  # fmt: skip
async def create_link(gateway: GatewayDep, admin: AdminDep) -> Response:
    async with gateway.reachable():
        token = await gateway.keys.link(admin)
    body = {"token": token, "path": f"/#once={token}", "seconds": LINK_SECONDS}
    return reply(body, 201, {"Cache-Control": "no-store"})


@router.post("/redeem", summary="The key that a one-time link stands for; it ends after a week",
             status_code=201,
             responses=spec("A key", NewKey, {**_KEY, "until": 1700000000000, "key": "l2_…"}, 400, 404, 415, 422, 503,
                            status=201))  # fmt: skip
async def redeem_link(body: RedeemBody, gateway: GatewayDep) -> Response:
    async with gateway.reachable():
        found = await gateway.keys.redeem(body.token)
    if found is None:
        raise ApiError(404, "not_found", "this link was used already, or is older than a minute")
    record, secret = found
    return reply({**_shown(record), "key": secret}, 201, {"Cache-Control": "no-store"})


@router.patch("/{key_id}", summary="Set the time zone of an API key; it is used within two seconds",
              responses=spec("Changed", Key, _KEY, 400, 403, 404, 409, 415, 422, 503))  # fmt: skip
async def change_key(key_id: str, body: KeyChange, gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        record = await gateway.keys.set_zone(key_id, body.time_zone or "")
    if record is None:
        raise not_found("key")
    if record.start:
        raise ApiError(409, "start_key", "the start key has the deployment's time zone: set TZ or LOCAL2_TIME_ZONE")
    return reply(_shown(record))


@router.delete("/{key_id}", summary="Revoke an API key; it stops working within two seconds",
               responses=spec("Revoked", Key, _KEY, 403, 404, 409, 503))  # fmt: skip
async def revoke_key(key_id: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        record = await gateway.keys.revoke(key_id)
    if record is None:
        raise not_found("key")
    if record.start:
        raise ApiError(
            409, "start_key", "the start key is changed by LOCAL2_ADMIN_KEY, or by removing admin.key and restarting"
        )
    return reply(_shown(record))
