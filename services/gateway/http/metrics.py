"""Prometheus metrics of this replica, and of the bus as seen at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from services.gateway.http.bus_state import BusReading, read_bus, read_starts
from shared.bus import Bus
from shared.contracts import QUERY_RECEIVED
from shared.participant.registry import Registry, ReplicaInfo
from shared.telemetry import metrics
from shared.telemetry.meter import CONTENT_TYPE as CONTENT_TYPE

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a scrape shows of the bus. starts: replicas ever started, by participant.

    Also of those that have work but no replica: that is a 0 to be seen, not a gap. The answering one always.
    """

    bus: BusReading
    replicas: Sequence[ReplicaInfo]
    starts: dict[str, int]


async def take(bus: Bus, registry: Registry) -> Reading:
    """Raises BusUnavailable."""
    reading, replicas = await read_bus(bus), await registry.replicas(fresh=True)
    names = {info.participant for info in replicas} | {one.group for one in reading.groups} | {"generator"}
    return Reading(reading, replicas, await read_starts(bus, sorted(names)))


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
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

    def text(self, reading: Reading | None) -> bytes:
        """Everything; with None the bus is away, and what it would have said is left out, not repeated."""
        shown = CollectorRegistry()
        shown.register(_Shown(reading))
        meter = metrics.meter()
        own = meter.text() if meter is not None else b""
        return generate_latest(self._registry) + generate_latest(shown) + own


class _Shown(Collector):
    def __init__(self, reading: Reading | None) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        up = self._reading is not None
        yield GaugeMetricFamily("local2_bus_up", "1 when the bus answered this scrape", value=float(up))
        if self._reading is not None:
            yield from _of_streams(self._reading.bus)
            yield from _of_groups(self._reading.bus)
            yield from _of_replicas(self._reading)
            yield from _of_generators(self._reading.replicas)
            yield from _of_judging(self._reading.replicas)
            yield from _of_knowledge(self._reading.replicas)
            yield from _of_redis(self._reading.bus)


def _of_streams(bus: BusReading) -> Iterator[Metric]:
    length = GaugeMetricFamily("local2_stream_length", "Entries kept", labels=["stream"])
    oldest = GaugeMetricFamily("local2_stream_oldest_seconds", "Age of the oldest entry kept", labels=["stream"])
    for stream, count in bus.lengths.items():
        length.add_metric([stream], count)
        oldest.add_metric([stream], bus.ages[stream])
    yield length
    yield oldest
    yield GaugeMetricFamily("local2_dead_letters", "Dead letters now", value=bus.dead)
    yield CounterMetricFamily("local2_dead_letters_added", "Dead letters written", value=bus.dead_total)


def _of_groups(bus: BusReading) -> Iterator[Metric]:
    names = ["stream", "group"]
    lag = GaugeMetricFamily("local2_group_lag", "Entries that the group has not read", labels=names)
    lost = GaugeMetricFamily("local2_group_lag_lost", "1 where Redis has lost count of what is unread", labels=names)
    pending = GaugeMetricFamily("local2_group_pending", "Entries in flight", labels=names)
    consumers = GaugeMetricFamily("local2_group_consumers", "Consumers of the group", labels=names)
    handled = CounterMetricFamily("local2_group_handled", "Entries that the group has finished", labels=names)
    oldest = GaugeMetricFamily(
        "local2_group_oldest_seconds", "Age of the oldest entry that the group has not finished", labels=names
    )
    served = GaugeMetricFamily(
        "local2_group_served_seconds", "Seconds since a replica of the group was there", labels=names
    )
    backlog = 0
    for one in bus.groups:
        labels = [one.stream, one.group]
        lag.add_metric(labels, one.lag)
        lost.add_metric(labels, one.lost)
        pending.add_metric(labels, one.pending)
        consumers.add_metric(labels, one.consumers)
        oldest.add_metric(labels, one.oldest)
        if one.handled is not None:
            handled.add_metric(labels, one.handled)
        if one.served is not None:
            served.add_metric(labels, one.served)
        if (one.stream, one.group) == (QUERY_RECEIVED.stream, "generator"):
            backlog = one.lag + one.pending
    yield from (lag, lost, pending, consumers, handled, oldest, served)
    yield GaugeMetricFamily("local2_query_backlog", "Queries waiting for a generator or in its hands", value=backlog)


def _of_replicas(reading: Reading) -> Iterator[Metric]:
    live = GaugeMetricFamily("local2_replicas", "Live replicas", labels=["participant"])
    busy = GaugeMetricFamily("local2_replicas_in_flight", "Messages in the replicas' hands", labels=["participant"])
    room = GaugeMetricFamily("local2_replicas_concurrency", "Messages they can have", labels=["participant"])
    starts = CounterMetricFamily("local2_replica_starts", "Replicas started ever", labels=["participant"])
    for name, started in reading.starts.items():
        found = [info for info in reading.replicas if info.participant == name]
        live.add_metric([name], len(found))
        busy.add_metric([name], sum(info.in_flight for info in found))
        room.add_metric([name], sum(info.concurrency for info in found))
        starts.add_metric([name], started)
    yield from (live, busy, room, starts)


def _of_generators(replicas: Sequence[ReplicaInfo]) -> Iterator[Metric]:
    """What live generators have counted since they started; nothing before the first answer."""
    generators = [info.facts for info in replicas if info.participant == "generator"]
    told = [facts["first_words"] for facts in generators if "first_words" in facts]
    if told:
        count, spent = sum(one["count"] for one in told), sum(one["seconds"] for one in told)
        text = "Seconds from accepting a query to the first sign of its answer, as live generators counted"
        yield SummaryMetricFamily("local2_first_word_seconds", text, count_value=count, sum_value=spent)


def _of_judging(replicas: Sequence[ReplicaInfo]) -> Iterator[Metric]:
    """What critics and reward say of themselves; nothing when they do not run."""
    for info in replicas:
        if info.participant == "reward" and "grades" in info.facts:
            yield _tally("local2_answers_graded", "Answers kept, by grade", "score", info.facts["grades"])
            yield _tally("local2_answers_compared", "Comparisons kept, by winner", "winner", info.facts["verdicts"])
            yield _tally("local2_answers_rated", "Answers kept, by vote", "sentiment", info.facts["sentiments"])
            break
    critics = [info.facts for info in replicas if info.participant == "critic" and "pairs_waiting" in info.facts]
    if critics:
        waiting = max(facts["pairs_waiting"] for facts in critics)
        yield GaugeMetricFamily("local2_pairs_waiting", "Answers that wait for their counterpart", value=waiting)
        in_line = sum(facts.get("waiting", 0) for facts in critics)
        yield GaugeMetricFamily("local2_judge_waiting", "Answers that wait for the judge", value=in_line)
        left = sum(facts["left_out"] for facts in critics)
        yield GaugeMetricFamily("local2_judge_left_out", "Answers left ungraded: the judge is too slow", value=left)
        unread = sum(facts["unreadable"] for facts in critics)
        yield GaugeMetricFamily("local2_judge_unread", "What the judge said and could not be read", value=unread)


def _of_knowledge(replicas: Sequence[ReplicaInfo]) -> Iterator[Metric]:
    """What knowledge says of itself; nothing when it does not run."""
    told = (
        ("claims", "local2_knowledge_claims", "What was said and noted, of which facts are made"),
        ("names", "local2_knowledge_names", "Names that something is known of"),
        ("waiting", "local2_knowledge_waiting", "Responses that the model is still to read"),
    )
    found = [info.facts for info in replicas if info.participant == "knowledge" and "claims" in info.facts]
    for key, name, text in told if found else ():
        yield GaugeMetricFamily(name, text, value=max(facts[key] for facts in found))


def _tally(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _of_redis(bus: BusReading) -> Iterator[Metric]:
    told = (
        ("used", "local2_redis_memory_used_bytes", "Memory that the bus server uses"),
        ("max", "local2_redis_memory_max_bytes", "Its limit (maxmemory); 0: none"),
        ("system", "local2_redis_memory_system_bytes", "Memory of its machine"),
        ("clients", "local2_redis_clients", "Connections to it"),
    )
    for key, name, text in told:
        if key in bus.redis:
            yield GaugeMetricFamily(name, text, value=bus.redis[key])
