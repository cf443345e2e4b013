"""Metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.gateway.auth import UserDep
from services.gateway.gateway import GatewayDep
from services.gateway.metrics import CONTENT_TYPE
from services.gateway.routes.participants import work_streams
from services.gateway.schemas import told
from shared.contracts import DEAD_LETTER
from shared.errors import BusUnavailable

router = APIRouter(tags=["metrics"])


@router.get("/metrics", summary="This replica and the bus, in Prometheus' text format",
            responses=told("Metrics", 'local2_group_lag{stream="local2:query.received",group="generator"} 0.0',
                           media="text/plain"))  # fmt: skip
async def metrics(gateway: GatewayDep, _user: UserDep) -> Response:
    try:
        async with gateway.reachable():
            streams = await work_streams(gateway)
            dead = await gateway.bus.link.call("XLEN", DEAD_LETTER.stream)
            replicas = await gateway.context.registry.replicas(fresh=True)
    except BusUnavailable:
        # a scrape tells that the bus is away; failing it would hide the rest
        gateway.metrics.bus_away()
    else:
        gateway.metrics.bus_state(streams, dead, replicas)
    return Response(gateway.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
