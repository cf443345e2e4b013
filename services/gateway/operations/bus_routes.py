"""Looking into the bus."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from services.gateway.http.auth import AdminDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.bus_state import BusReading, read_bus
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.schemas import SSE, spec
from services.gateway.operations.bus_stream import Tap, matches
from services.gateway.operations.operator_shapes import StreamList
from services.gateway.queries.event_shapes import BusEvent
from services.gateway.queries.sse import EventStream
from shared.bus.keys import subject_of
from shared.contracts import SUBJECTS, TOOL_REQUEST, TOOL_RESULT

router = APIRouter(route_class=JsonRoute, prefix="/bus", tags=["bus"])

_STREAM = {
    "subject": "query.received",
    "length": 3,
    "oldest_seconds": 1.2,
    "groups": [{"name": "generator", "consumers": 2, "lag": 1, "pending": 2}],
}
_EVENT = 'id: 1-0\nevent: query.received\ndata: {"subject":"query.received","payload":{"query":"Hello"}}\n\n'


def _shown(reading: BusReading, stream: str) -> dict[str, Any]:
    return {
        "subject": subject_of(stream),
        "length": reading.lengths[stream],
        "oldest_seconds": reading.ages[stream] if reading.lengths[stream] else None,
        "groups": [
            {"name": g.group, "consumers": g.consumers, "lag": g.lag, "pending": g.pending}
            for g in reading.groups
            if g.stream == stream
        ],
    }


@router.get("/streams", summary="Length, age, lag and work in flight of every subject",
            responses=spec("Streams", StreamList, {"streams": [_STREAM]}, 403, 503))  # fmt: skip
async def list_streams(gateway: GatewayDep, _admin: AdminDep) -> Response:
    async with gateway.reachable():
        reading = await read_bus(gateway.bus)
    return reply({"streams": [_shown(reading, stream) for stream in reading.lengths]})


@router.get(
    "/events",
    summary="Everything that is published, live",
    responses=spec("One event per bus entry", BusEvent, _EVENT, 403, 422, 503, media=SSE),
)
async def bus_events(
    gateway: GatewayDep,
    _admin: AdminDep,
    subject: Annotated[
        list[str] | None, Query(description="A subject, or a beginning with `*`: tool.*. Repeatable; none: all")
    ] = None,
    last: Annotated[int, Query(ge=0, le=1_000, description="So many earlier events first")] = 0,
) -> Response:
    patterns = subject or ["*"]
    for pattern in patterns:
        if not _possible(pattern):
            raise ApiError(422, "invalid_request", f"subject: there is no subject {pattern[:100]}")
    async with gateway.reachable():
        await gateway.full()
    tap = Tap(gateway.bus, patterns, last)
    return EventStream(gateway, tap.events(gateway.settings.keepalive))


def _possible(pattern: str) -> bool:
    """Whether a subject can have this name; those of tools come and go."""
    tools = tuple(f"{base.name}." for base in (TOOL_REQUEST, TOOL_RESULT))
    if any(matches(subject.name, [pattern]) for subject in SUBJECTS) or pattern.startswith(tools):
        return True
    return pattern.endswith("*") and any(name.startswith(pattern[:-1]) for name in tools)
