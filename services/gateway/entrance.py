"""Counts requests. Plain ASGI: a wrapper that owns the response would cost every streamed event a task switch."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.metrics import Metrics


class Entrance:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # the template, not the path: a label per query id would grow without bound
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(scope["method"], route, str(message["status"])).inc()
                self._metrics.latency.labels(route).observe(time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, counting)
