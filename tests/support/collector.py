"""A collector of traces: OTLP over HTTP, as the OpenTelemetry collector takes it, on loopback."""

from __future__ import annotations

import gzip
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class Seen:
    """A span as it arrived. `status` is 0 (unset), 1 (ok) or 2 (error); times in ns."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    status: int
    message: str
    begin: int
    end: int
    events: int
    attributes: dict[str, Any] = field(compare=False, hash=False)


class Collector:
    """`spans`: what came so far. `delay`: seconds before each answer; `status`: of each answer."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.bodies: list[bytes] = []
        self.delay = 0.0
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                time.sleep(collector.delay)
                if self.path == "/v1/traces" and collector.status == 200:
                    collector.bodies.append(body)
                    collector.spans.extend(decoded(body))
                self.send_response(collector.status if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str, service: str | None = None) -> list[Seen]:
        return [one for one in self.spans if one.name == name and service in (None, one.service)]

    def trace(self, trace_id: str) -> list[Seen]:
        return [one for one in self.spans if one.trace_id == trace_id]


def decoded(body: bytes) -> list[Seen]:
    found = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = _values(resource.resource.attributes)
        found += [
            Seen(
                service=about["service.name"],
                instance=about["service.instance.id"],
                name=span.name,
                kind=KINDS[span.kind],
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                status=span.status.code,
                message=span.status.message,
                begin=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                events=len(span.events),
                attributes=_values(span.attributes),
            )
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    return found


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, which)
