"""Counts and traces requests.

Plain ASGI: a wrapper that owns the response would cost every streamed event a task switch.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.metrics import Metrics
from shared.telemetry import tracing
from shared.telemetry.spans import NOTHING, Kind, Span

_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})


class Entrance:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._span(scope) as span:
            await self._app(scope, receive, self._counting(scope, send, span))

    def _counting(self, scope: Scope, send: Send, span: Span) -> Send:
        started = time.perf_counter()

        async def counting(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                # the template, not the path: a label per query id would grow without bound
                route, status = getattr(scope.get("route"), "path", "other"), message["status"]
                self._metrics.requests.labels(scope["method"], route, str(status)).inc()
                self._metrics.latency.labels(route).observe(time.perf_counter() - started)
                if span is not NOTHING:
                    span.name(f"{scope['method']} {route}")
                    span.set({"http.route": route, "http.response.status_code": status})
                    if status >= 500:
                        span.fail(str(status))

        return counting

    def _span(self, scope: Scope) -> Span:
        """One for what puts something on the bus, and for whatever a client traces itself."""
        if not tracing.active():
            return NOTHING
        method: str = scope["method"]
        parent = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), "")
        if method in _LOOKING and not parent:
            return NOTHING
        given = {"http.request.method": method, "url.scheme": scope["scheme"]}
        return tracing.span(method, Kind.SERVER, given, parent=parent)
