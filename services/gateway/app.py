"""The HTTP application, without a server: tests and other programs mount it as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Response

from services.gateway.description import describe
from services.gateway.entrance import Entrance
from services.gateway.errors import install
from services.gateway.gateway import Gateway
from services.gateway.orphans import Orphans
from services.gateway.request_guard import RequestGuard
from services.gateway.routes import (
    backup,
    bus,
    console,
    dead_letters,
    embeddings,
    experiments,
    feedback,
    files,
    health,
    keys,
    knowledge,
    mcp,
    memory,
    metrics,
    openai,
    participants,
    personas,
    preferences,
    queries,
    retention,
    sessions,
    tools,
)
from services.gateway.schemas import told

_ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    queries.router,
    feedback.router,
    sessions.router,
    tools.router,
    memory.lines_router,
    memory.router,
    files.router,
    knowledge.router,
    participants.router,
    personas.router,
    bus.router,
    dead_letters.router,
    retention.router,
    keys.router,
    backup.router,
    preferences.router,
    experiments.router,
    openai.asking_router,
    openai.router,
    embeddings.router,
    mcp.router,
    metrics.router,
    console.router,
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
             responses=told("OpenAPI 3.1", dict[str, Any], {"openapi": "3.1.0"}, key=False))  # fmt: skip
    async def openapi_document() -> Response:
        return Response(await document(), media_type="application/json")

    app.add_middleware(RequestGuard, gateway=gateway)
    app.add_middleware(Entrance, metrics=gateway.metrics)
    return app
