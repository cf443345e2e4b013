"""The last hour of the metrics that matter, as this replica saw it: what an operator's plots show at once."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

# Seconds between two moments, and how many of them are an hour.
EVERY = 15.0
KEPT = 240

# Of counters: how much they grew a minute.
_RATES = {
    "questions": "local2_queries_accepted_total",
    "requests": "local2_http_requests_total",
    "errors": "local2_http_errors_total",
}
# Of sums with their counts: the mean of what came between two moments, in seconds.
_MEANS = {"first_word": "local2_first_word_seconds"}
_LEVELS = {
    "questions_waiting": "local2_query_backlog",
    "work_waiting": "local2_group_lag",
    "in_flight": "local2_replicas_in_flight",
    "streams": "local2_sse_streams_open",
    "dead_letters": "local2_dead_letters",
    "redis_bytes": "local2_redis_memory_used_bytes",
}
NAMES = (*_RATES, *_MEANS, *_LEVELS)

Totals = Mapping[str, float]


# Routes whose 503 reports a state and is no failure.
_PROBES = frozenset({"/ready"})


def totals(families: Iterable[Metric]) -> dict[str, float]:
    """Return every sample's sum over its labels.

    Answers of 500 and more, except those of probes, are summed as `local2_http_errors_total`.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for family in families:
        for name, labels, value, *_ in family.samples:
            found[name] += value
            if name == _RATES["requests"] and labels["status"] >= "500" and labels["route"] not in _PROBES:
                found[_RATES["errors"]] += value
    return found


def between(before: Totals, now: Totals, seconds: float) -> dict[str, float | None]:
    """What a moment shows; None for what is not known: the bus was away, or nothing happened that has a mean."""

    def growth(name: str) -> float:
        # what is not there is a counter that nobody has counted with yet
        return now.get(name, 0.0) - before.get(name, 0.0)

    shown: dict[str, float | None] = {key: now.get(name) for key, name in _LEVELS.items()}
    shown |= {key: growth(name) * 60 / seconds for key, name in _RATES.items()}
    for key, name in _MEANS.items():
        count, spent = growth(f"{name}_count"), growth(f"{name}_sum")
        # a sum over replicas is less when one has left, and not there while the bus is away
        known = before.get("local2_bus_up") == 1 and count > 0 and spent >= 0
        shown[key] = spent / count if known else None
    return shown


class Hour:
    """Kept in memory: a replica that starts begins its hour.

    `read` gives the totals of this moment.
    """

    def __init__(self, read: Callable[[], Awaitable[Totals]], clock: Callable[[], float] = time.time) -> None:
        self._read, self._clock = read, clock
        self._before: Totals = {}
        self._at = clock()
        self._moments: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=KEPT)

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            await self.look()

    async def look(self) -> None:
        """Adds what is now."""
        now, at = await self._read(), self._clock()
        # a clock that was set back says nothing of how much time has passed
        self._moments.append((at, between(self._before, now, max(1.0, at - self._at))))
        self._before, self._at = now, at

    def shown(self) -> dict[str, Any]:
        """As `GET /metrics/hour` answers it: moments, and for each name a value a moment."""
        return {
            "every": EVERY,
            "times": [at for at, _ in self._moments],
            "series": {name: [values[name] for _, values in self._moments] for name in NAMES},
        }
