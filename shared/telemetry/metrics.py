"""What a participant counts of itself, for Prometheus, and the listener that shows it.

Off unless `LOCAL2_METRICS_PORT` is set; then nothing is imported and nothing is counted. Labels come from closed or
bounded sets: streams, tools, models and outcomes, never an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.telemetry.meter import Meter

_meter: Meter | None = None


def meter() -> Meter | None:
    """The counters of this process; None when they are off."""
    return _meter


def start(participant: str) -> Meter:
    """The counters of this process, made by the first call."""
    global _meter
    if _meter is None:
        from shared.telemetry.meter import Meter

        _meter = Meter(participant)
    return _meter


def stop() -> None:
    """Off again; what was counted is forgotten."""
    global _meter
    _meter = None
