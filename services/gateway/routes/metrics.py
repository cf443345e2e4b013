"""Metrics for Prometheus, and the last hour of those that matter."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.gateway.answers import reply
from services.gateway.auth import AdminDep
from services.gateway.gateway import GatewayDep
from services.gateway.metrics import CONTENT_TYPE
from services.gateway.schemas import told
from services.gateway.shapes.operating import MetricsHour

router = APIRouter(tags=["metrics"])

_HOUR = {
    "every": 15.0,
    "times": [1_700_000_000.0, 1_700_000_015.0],
    "series": {
        "questions": [0.0, 4.0], "requests": [12.0, 20.0], "errors": [0.0, 0.0], "first_word": [None, 0.8],
        "questions_waiting": [0.0, 1.0], "work_waiting": [0.0, 2.0], "in_flight": [0.0, 1.0], "streams": [1.0, 1.0],
        "dead_letters": [0.0, 0.0], "redis_bytes": [9_000_000.0, None],
    },
}  # fmt: skip


@router.get("/metrics", summary="This replica and the bus, in Prometheus' text format",
            responses=told("Metrics", str, 'local2_group_lag{stream="local2:query.received",group="generator"} 0.0',
                           403, media="text/plain"))  # fmt: skip
async def metrics(gateway: GatewayDep, _admin: AdminDep) -> Response:
    return Response(await gateway.metrics_text(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/metrics/hour", summary="What mattered during the last hour, as this replica saw it",
            responses=told("Moments", MetricsHour, _HOUR, 403))  # fmt: skip
async def metrics_hour(gateway: GatewayDep, _admin: AdminDep) -> Response:
    return reply(gateway.hour.shown())
