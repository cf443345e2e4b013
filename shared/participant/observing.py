"""Where a running participant is traced and counted: its start, and every delivery of its work streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from shared.bus import Command, Delivery, Route
from shared.bus.keys import subject_of
from shared.envelope import age_ms
from shared.errors import Fenced, PermanentError, TransientError
from shared.extras import required_by
from shared.participant.settings import Settings
from shared.telemetry import metrics, tracing
from shared.telemetry.metrics_listener import Text, listening
from shared.telemetry.outcome import Outcome
from shared.telemetry.spans import Kind

_TRACEPARENT, _CORRELATION = b"traceparent", b"correlation_id"


@contextlib.asynccontextmanager
async def observing(
    participant: str, replica: str, settings: Settings, text: Text | None = None
) -> AsyncIterator[str | None]:
    """Traces and metrics as the settings say; gives the address of the metrics, if there is one.

    text: what is shown in place of this process's counters alone. Raises SettingsError.
    """
    tracing.start(participant, replica, settings.otlp_endpoint)
    if settings.metrics_port is None:
        yield None
        return
    with required_by("LOCAL2_METRICS_PORT", "observability"):
        meter = metrics.start(participant)
        from shared.telemetry.meter import CONTENT_TYPE

    async def own() -> bytes:
        return meter.text()

    async with listening(settings.metrics_host, settings.metrics_port, CONTENT_TYPE, text or own) as address:
        yield address


def watched(group: str, stream: str, route: Route) -> Route:
    """The route with a span and counters round its handler; the route itself when neither is on."""
    meter = metrics.meter()
    if meter is None and not tracing.active():
        return route
    subject = subject_of(stream)
    common = {
        "messaging.system": "redis",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": stream,
        "messaging.consumer.group.name": group,
    }

    async def handler(delivery: Delivery) -> Sequence[Command]:
        started = time.perf_counter()
        waited = age_ms(delivery.entry_id) / 1000
        outcome: Outcome = "ok"
        try:
            with tracing.span(
                f"process {subject}",
                Kind.CONSUMER,
                {
                    **common,
                    "messaging.message.id": delivery.entry_id,
                    "messaging.message.conversation_id": _field(delivery, _CORRELATION) or None,
                    "local2.message.deliveries": delivery.deliveries,
                },
                parent=_field(delivery, _TRACEPARENT),
            ):
                return await route.handler(delivery)
        except BaseException as exc:
            outcome = _outcome(exc)
            raise
        finally:
            if meter is not None:
                meter.message(subject, outcome, time.perf_counter() - started, delivery.deliveries, waited)

    return replace(route, handler=handler)


def _field(delivery: Delivery, name: bytes) -> str:
    """An envelope field before the envelope is parsed: an entry that cannot be is traced too."""
    for key, value in zip(delivery.fields[::2], delivery.fields[1::2], strict=False):
        if key == name:
            return value.decode(errors="replace")
    return ""


def _outcome(exc: BaseException) -> Outcome:
    match exc:
        case Fenced():
            return "lost"
        case TransientError():
            return "retry"
        case PermanentError():
            return "dead"
        case asyncio.CancelledError():
            return "cancelled"
        case _:
            return "error"
