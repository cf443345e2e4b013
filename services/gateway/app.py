"""The HTTP application, without a server: tests and other programs mount it as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Response

from services.gateway.backup import routes as backup_routes
from services.gateway.description import describe
from services.gateway.http import console_routes, health_routes
from services.gateway.http.errors import install
from services.gateway.http.gateway import Gateway
from services.gateway.http.request_guard import RequestGuard
from services.gateway.http.request_middleware import Entrance
from services.gateway.http.schemas import spec
from services.gateway.openai import embedding_routes
from services.gateway.openai import routes as openai_routes
from services.gateway.openai.orphans import Orphans
from services.gateway.operations import (
    bus_routes,
    dead_letter_routes,
    experiment_routes,
    file_routes,
    key_routes,
    knowledge_routes,
    mcp_routes,
    memory_routes,
    metrics_routes,
    participant_routes,
    persona_routes,
    preference_routes,
    retention_routes,
    tool_routes,
)
from services.gateway.queries import feedback_routes, query_routes, session_routes

_ROUTERS: tuple[APIRouter, ...] = (
    health_routes.router,
    query_routes.router,
    feedback_routes.router,
    session_routes.router,
    tool_routes.router,
    memory_routes.lines_router,
    memory_routes.router,
    file_routes.router,
    knowledge_routes.router,
    participant_routes.router,
    persona_routes.router,
    bus_routes.router,
    dead_letter_routes.router,
    retention_routes.router,
    key_routes.router,
    backup_routes.router,
    preference_routes.router,
    experiment_routes.router,
    openai_routes.asking_router,
    openai_routes.router,
    embedding_routes.router,
    mcp_routes.router,
    metrics_routes.router,
    console_routes.router,
)


def create_app(gateway: Gateway) -> FastAPI:
    # the interactive pages would load scripts from elsewhere; the description itself is served below
    app = FastAPI(
        title="LoCAL2",
        version="1",
        description="A local-first assistant: the model orchestrates, everything else is a participant on a bus.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # the entrance traces and counts
        telemetry={"tracing": False, "metrics": False, "logs": False},
        # Flat: the `Allow` header and the description look at each route.
        routes=[route for router in _ROUTERS for route in router.routes],
    )
    app.state.gateway = gateway
    app.state.orphans = Orphans(gateway)
    install(app)

    made: list[bytes] = []
    making = asyncio.Lock()

    async def document() -> bytes:
        async with making:
            if not made:
                # Takes most of a second, once.
                made.append(orjson.dumps(await asyncio.to_thread(describe, app)))
        return made[0]

    @app.get("/openapi.json", summary="This description", tags=["health"],
             responses=spec("OpenAPI 3.1", dict[str, Any], {"openapi": "3.1.0"}, key=False))  # fmt: skip
    async def openapi_document() -> Response:
        return Response(await document(), media_type="application/json")

    app.add_middleware(RequestGuard, gateway=gateway)
    app.add_middleware(Entrance, metrics=gateway.metrics)
    return app
