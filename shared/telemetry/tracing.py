"""Traces: one per query, over all processes that have to do with it. Off unless a collector is named.

When off, nothing of OpenTelemetry is imported, `span` gives a span that does nothing, and the runtime does not wrap
what it runs. When on, each span's parent is the current span of this task, or the `traceparent` of a message.
Attributes hold names, numbers and ids: never a prompt, an answer, an argument or an error's text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shared.extras import required_by
from shared.telemetry.spans import NOTHING, Kind, Recorder, Span, Value

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_recorder: Recorder | None = None


def start(participant: str, replica: str, endpoint: str | None) -> None:
    """Records from now on, when an endpoint is given. Raises SettingsError when the packages are missing."""
    global _recorder
    if endpoint is None or _recorder is not None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    with required_by("LOCAL2_OTLP_ENDPOINT", "observability"):
        from shared.telemetry.tracing_sdk import SdkRecorder
    _recorder = SdkRecorder(participant, replica, endpoint)


def stop(seconds: float) -> bool:
    """Sends what is left, for at most so many seconds, and is off again; False when not all could be sent in time."""
    global _recorder
    recorder, _recorder = _recorder, None
    return recorder is None or recorder.stop(seconds)


def active() -> bool:
    return _recorder is not None


def span(
    name: str, kind: Kind = Kind.INTERNAL, attributes: Mapping[str, Value | None] | None = None, *, parent: str = ""
) -> Span:
    """A span, begun now; inside its block it is the current one. `parent`: a traceparent, else the current span."""
    if _recorder is None:
        return NOTHING
    return _recorder.span(name, kind, parent if well_formed(parent) else "", attributes or {})


def current() -> str:
    """The traceparent of the current span; empty when there is none."""
    return "" if _recorder is None else _recorder.current()


def annotate(attributes: Mapping[str, Value | None]) -> None:
    """Attributes of the current span."""
    if _recorder is not None:
        _recorder.annotate(attributes)


def well_formed(traceparent: str) -> bool:
    return _TRACEPARENT.fullmatch(traceparent) is not None
