"""Spans by the OpenTelemetry SDK, sent by OTLP over HTTP. Imported only when traces are on.

A thread of its own sends batches from a bounded queue: when the collector is slow or away, spans are dropped, and the
participant does not notice. The sampler is the SDK's: parent-based, or what OTEL_TRACES_SAMPLER says.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextvars import Token
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Self

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shared.errors import Fenced
from shared.telemetry.logging import get_logger
from shared.telemetry.spans import Kind, Span, Value

log = get_logger()

QUEUE = 2_048
_BATCH = 512
_EVERY_SECONDS = 1.0
_EXPORT_SECONDS = 5.0

_KINDS = {
    Kind.INTERNAL: SpanKind.INTERNAL,
    Kind.SERVER: SpanKind.SERVER,
    Kind.CLIENT: SpanKind.CLIENT,
    Kind.CONSUMER: SpanKind.CONSUMER,
}
# What stops work on purpose; a trace does not show it as a failure.
_STOPPED = (asyncio.CancelledError, GeneratorExit, Fenced)


class SdkRecorder:
    """endpoint: the collector's base URL (`/v1/traces` is added), or the whole URL of its traces."""

    def __init__(self, participant: str, replica: str, endpoint: str) -> None:
        # its own words on a collector that is away come with every batch; ours come once
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.namespace": "local2",
                "service.name": participant,
                "service.instance.id": replica,
                "service.version": _version(),
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_EXPORT_SECONDS))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE,
            max_export_batch_size=_BATCH,
            schedule_delay_millis=_EVERY_SECONDS * 1000,
            export_timeout_millis=_EXPORT_SECONDS * 1000,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("local2", _version())

    def span(self, name: str, kind: Kind, parent: str, attributes: Mapping[str, Value | None]) -> Span:
        given = {key: value for key, value in attributes.items() if value is not None}
        context = _remote(parent) if parent else None
        return SdkSpan(self._tracer.start_span(name, context=context, kind=_KINDS[kind], attributes=given))

    def current(self) -> str:
        return _written(trace.get_current_span().get_span_context())

    def annotate(self, attributes: Mapping[str, Value | None]) -> None:
        SdkSpan(trace.get_current_span()).set(attributes)

    def stop(self, seconds: float) -> bool:
        # the SDK's own limit does not cover an export in progress
        closing = threading.Thread(target=self._provider.shutdown, name="traces-closing", daemon=True)
        closing.start()
        closing.join(seconds)
        done = not closing.is_alive()
        if not done:
            # ends the pauses between its attempts, and what is still queued is dropped
            self._exporter.shutdown()
        return done


class SdkSpan(Span):
    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        return _written(self._span.get_span_context())

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def fail(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        self._span.end()

    def __enter__(self) -> Self:
        self._token: Token[Context] = otel_context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
        if kind is not None:
            # the class, not the text: that may hold a question or an address
            if issubclass(kind, _STOPPED):
                self._span.set_attribute("local2.stopped", kind.__name__)
            else:
                self.fail(kind.__name__)
        self._span.end()


class _Exporter(SpanExporter):
    """Says once per outage that spans are lost, and once that they are sent again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._well = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as exc:
            result = SpanExportResult.FAILURE
            if self._well:
                log.warning("tracing.export_failed", reason=type(exc).__name__)
        well = result is SpanExportResult.SUCCESS
        if well != self._well:
            (log.info if well else log.warning)("tracing.collector_back" if well else "tracing.collector_away")
        self._well = well
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def traces_url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _remote(traceparent: str) -> Context:
    _, trace_id, span_id, flags = traceparent.split("-")
    given = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(given), Context())


def _written(context: SpanContext) -> str:
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _version() -> str:
    try:
        return version("local2")
    except PackageNotFoundError:
        return "unknown"
