"""Metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.gateway.http.auth import AdminDep
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.metrics import CONTENT_TYPE
from services.gateway.http.schemas import spec

router = APIRouter(tags=["metrics"])


@router.get("/metrics", summary="This replica and the bus, in Prometheus' text format",
            responses=spec("Metrics", str, 'local2_group_lag{stream="local2:query.received",group="generator"} 0.0',
                           403, media="text/plain"))  # fmt: skip
async def metrics(gateway: GatewayDep, _admin: AdminDep) -> Response:
    return Response(await gateway.metrics_text(), headers={"Content-Type": CONTENT_TYPE})
