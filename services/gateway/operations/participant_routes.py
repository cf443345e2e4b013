"""Who is alive, what they work on, and their run-time settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Body, Response

from services.gateway.http.auth import AdminDep, UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.bus_state import GroupReading, read_bus
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.schemas import spec
from services.gateway.operations.operator_shapes import ParticipantList, SettingsShown
from shared.bus.keys import schema_key, settings_key, subject_of
from shared.contracts import SETTINGS_UPDATE, SettingsUpdate
from shared.participant.complaint import complaint, spelled
from shared.participant.registry import ReplicaInfo
from shared.participant.settings import Described, stored_values

router = APIRouter(route_class=JsonRoute, tags=["participants"])

_REPLICA = {"replica": "host-17-a1b2c3", "state": "ready", "in_flight": 1, "concurrency": 4, "age_ms": 300}
_LISTED = {
    "participants": [
        {
            "name": "generator",
            "replicas": [_REPLICA],
            "work": [{"subject": "query.received", "backlog": 0, "pending": 1}],
        }
    ]
}
_SETTINGS = {
    "participant": "web_fetch",
    "schema": {"type": "object", "properties": {"max_chars": {"type": "integer", "minimum": 1}}},
    "values": {"max_chars": 3000},
    "kept": ["max_chars"],
}


@router.get("/participants", summary="Replicas with state, work in flight and backlog; for users, only who is there",
            responses=spec("By participant", ParticipantList, _LISTED, 503))  # fmt: skip
async def list_participants(gateway: GatewayDep, user: UserDep) -> Response:
    async with gateway.reachable():
        replicas = await gateway.context.registry.replicas(fresh=True)
        if user.role != "admin":
            return reply({"participants": presence(replicas)})
        reading = await read_bus(gateway.bus)
    return reply({"participants": overview(replicas, reading.groups, gateway.bus.now_ms())})


def presence(replicas: Sequence[ReplicaInfo]) -> list[dict[str, Any]]:
    """Who is there. Load, addresses and models would tell what other users do, and where."""
    names = sorted({info.participant for info in replicas})
    return [
        {"name": name, "replicas": [{"state": info.state} for info in replicas if info.participant == name]}
        for name in names
    ]


def overview(replicas: Sequence[ReplicaInfo], groups: Sequence[GroupReading], now: int) -> list[dict[str, Any]]:
    """Also participants that have work waiting but no live replica. now: the bus's time, in ms."""
    names = sorted({one.group for one in groups} | {info.participant for info in replicas})
    return [
        {
            "name": name,
            "replicas": [_shown(info, now) for info in replicas if info.participant == name],
            "work": [
                {"subject": subject_of(one.stream), "backlog": one.lag, "pending": one.pending}
                for one in groups
                if one.group == name
            ],
        }
        for name in names
    ]


def _shown(info: ReplicaInfo, now: int) -> dict[str, Any]:
    shown = asdict(info)
    del shown["participant"]
    shown["tools"] = [tool["function"]["name"] for tool in info.tools]
    shown["age_ms"] = max(0, now - info.seen)
    return shown


async def described(gateway: Gateway, name: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A participant's settings schema, its values, and which of them were changed while it ran. Raises ApiError 404."""
    raw, changed = await gateway.bus.link.pipe([("GET", schema_key(name)), ("HGETALL", settings_key(name))])
    found = Described.parse(name, raw)
    if found is None:
        raise not_found("participant")
    known = found.schema.get("properties", {})
    kept = {k: v for k, v in stored_values(name, changed).items() if k in known}
    return found.schema, {**found.defaults, **kept}, sorted(kept)


@router.get("/participants/{name}/settings", summary="Run-time settings with their schema",
            responses=spec("Schema and values", SettingsShown, _SETTINGS, 403, 404, 503))  # fmt: skip
async def show_settings(name: str, gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        schema, values, kept = await described(gateway, name)
    return reply({"participant": name, "schema": schema, "values": values, "kept": kept})


@router.patch(
    "/participants/{name}/settings",
    summary="Change run-time settings in all replicas, and for later starts",
    responses=spec("The values as they are now", SettingsShown, _SETTINGS, 400, 403, 404, 415, 422, 503),
)
async def change_settings(
    name: str,
    values: Annotated[dict[str, Any], Body(examples=[{"max_chars": 5000}], description="Setting → new value")],
    gateway: GatewayDep,
    _admin: AdminDep,
) -> Response:
    async with gateway.reachable():
        schema, current, kept = await described(gateway, name)
        values = spelled(schema, values)
        if wrong := complaint(schema, values):
            raise ApiError(422, "invalid_setting", wrong)
        if values:
            stored = [part for field, value in values.items() for part in (field, orjson.dumps(value))]
            update = SettingsUpdate(participant=name, values=values)
            await gateway.bus.link.pipe(
                [("HSET", settings_key(name), *stored), gateway.bus.publishing(SETTINGS_UPDATE.of(update))]
            )
    now = {"values": {**current, **values}, "kept": sorted({*kept, *values})}
    return reply({"participant": name, "schema": schema, **now})
