"""Prometheus metrics of this replica, and of the bus as seen at the moment of the scrape."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared.bus import StreamState
from shared.registry import ReplicaInfo

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "local2_http_requests", "HTTP requests answered", ["method", "route", "status"], registry=registry
        )
        self.latency = Histogram(
            "local2_http_response_start_seconds",
            "Seconds until the response began",
            ["route"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.streams = Gauge("local2_sse_streams_open", "Event streams open now", registry=registry)
        self.accepted = Counter("local2_queries_accepted", "Queries put on the bus", ["mode"], registry=registry)
        self.refused = Counter("local2_queries_refused", "Queries answered with 429", ["reason"], registry=registry)
        self._up = Gauge("local2_bus_up", "1 when the bus answered this scrape", registry=registry)
        names = ["stream"]
        self._length = Gauge("local2_stream_length", "Entries kept", names, registry=registry)
        self._oldest = Gauge("local2_stream_oldest_seconds", "Age of the oldest entry", names, registry=registry)
        groups = ["stream", "group"]
        self._lag = Gauge("local2_group_lag", "Entries that the group has not read", groups, registry=registry)
        self._pending = Gauge("local2_group_pending", "Entries in flight", groups, registry=registry)
        self._consumers = Gauge("local2_group_consumers", "Consumers of the group", groups, registry=registry)
        self._dead = Gauge("local2_dead_letters", "Entries set aside", registry=registry)
        self._replicas = Gauge("local2_replicas", "Live replicas", ["participant"], registry=registry)

    def bus_away(self) -> None:
        self._forget()
        self._up.set(0)

    def bus_state(self, streams: Iterable[StreamState], dead: int, replicas: Iterable[ReplicaInfo]) -> None:
        self._forget()
        self._up.set(1)
        for stream in streams:
            self._length.labels(stream.name).set(stream.length)
            self._oldest.labels(stream.name).set((stream.oldest_ms or 0) / 1000)
            for group in stream.groups:
                self._lag.labels(stream.name, group.name).set(group.lag)
                self._pending.labels(stream.name, group.name).set(group.pending)
                self._consumers.labels(stream.name, group.name).set(group.consumers)
        self._dead.set(dead)
        for participant, count in Tally(info.participant for info in replicas).items():
            self._replicas.labels(participant).set(count)

    def _forget(self) -> None:
        """What is gone from the bus must not be shown with its last value."""
        for gauge in (self._length, self._oldest, self._lag, self._pending, self._consumers, self._replicas):
            gauge.clear()

    def text(self) -> bytes:
        return generate_latest(self.registry)
