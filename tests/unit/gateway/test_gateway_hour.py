"""The last hour of metrics: what a moment shows, and how many are kept."""

from __future__ import annotations

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from services.gateway.bus_state import BusReading
from services.gateway.hour import EVERY, KEPT, NAMES, Hour, Totals, between, totals
from services.gateway.metrics import Metrics, Reading
from shared.participant.registry import ReplicaInfo


def test_totals_of_samples_sum_labels_and_failed_requests() -> None:
    requests = CounterMetricFamily("local2_http_requests", "", labels=["route", "status"])
    for route, status, count in (
        ("/query", "200", 90), ("/query", "404", 5), ("/query", "500", 1), ("/query", "503", 3),
        # the probe answers 503 while a part is missing: nothing failed
        ("/ready", "200", 2), ("/ready", "503", 40),
    ):  # fmt: skip
        requests.add_metric([route, status], count)
    lag = GaugeMetricFamily("local2_group_lag", "", labels=["group"])
    lag.add_metric(["a"], 2)
    lag.add_metric(["b"], 3)
    found = totals([requests, lag])
    assert found["local2_http_requests_total"] == 141
    assert found["local2_http_errors_total"] == 4
    assert found["local2_group_lag"] == 5


def test_what_nobody_has_counted_yet_is_none_a_minute() -> None:
    shown = between({}, {}, 60)
    assert (shown["questions"], shown["errors"]) == (0, 0)


def test_counters_are_rates_and_levels_are_as_they_are() -> None:
    before = {"local2_queries_accepted_total": 2.0, "local2_dead_letters": 9.0}
    now = {"local2_queries_accepted_total": 5.0, "local2_dead_letters": 1.0}
    shown = between(before, now, 30)
    assert (shown["questions"], shown["dead_letters"]) == (6, 1)


def test_first_words_are_those_of_all_live_generators() -> None:
    def replica(participant: str, facts: dict[str, object]) -> ReplicaInfo:
        return ReplicaInfo(participant, "r", "ready", 1, 1, facts=facts)

    counted = [
        replica("generator", {"first_words": {"count": 2, "seconds": 3.0}}),
        replica("generator", {"first_words": {"count": 1, "seconds": 0.5}}),
        replica("generator", {}),
        replica("web_fetch", {"first_words": {"count": 9, "seconds": 9.0}}),
    ]
    found = totals(Metrics().families(Reading(BusReading({}, {}, [], 0, 0), counted, {})))
    assert (found["local2_first_word_seconds_count"], found["local2_first_word_seconds_sum"]) == (3, 3.5)
    assert found["local2_bus_up"] == 1
    away = totals(Metrics().families(None))
    assert away["local2_bus_up"] == 0
    assert "local2_first_word_seconds_count" not in away


def of_first_words(count: float, spent: float) -> Totals:
    return {"local2_bus_up": 1, "local2_first_word_seconds_count": count, "local2_first_word_seconds_sum": spent}


@pytest.mark.parametrize(
    ("before", "now", "mean"),
    [
        ((2, 4), (4, 10), 3.0),
        ((2, 4), (2, 4), None),
        # a replica has left, and with it what it had counted
        ((9, 30), (4, 10), None),
        ((4, 30), (5, 10), None),
    ],
)
def test_a_mean_is_of_what_happened_between_two_moments(
    before: tuple[int, int], now: tuple[int, int], mean: float | None
) -> None:
    assert between(of_first_words(*before), of_first_words(*now), 15)["first_word"] == mean


@pytest.mark.parametrize("before", [{}, {"local2_bus_up": 0.0}])
def test_what_was_counted_while_nobody_looked_is_no_mean_of_this_moment(before: Totals) -> None:
    assert between(before, of_first_words(100, 900), 15)["first_word"] is None
    assert between({"local2_bus_up": 1.0}, of_first_words(1, 9), 15)["first_word"] == 9


def test_while_the_bus_is_away_what_it_would_have_said_is_not_known() -> None:
    shown = between({"local2_group_lag": 4.0}, {"local2_queries_accepted_total": 0.0}, 15)
    assert shown["work_waiting"] is None
    assert shown["questions"] == 0


async def test_an_hour_is_kept_the_oldest_moment_leaves() -> None:
    clock = iter(float(at) * EVERY for at in range(KEPT + 3))
    counted = iter(range(KEPT + 2))

    async def read() -> Totals:
        return {"local2_queries_accepted_total": float(next(counted))}

    hour = Hour(read, lambda: next(clock))
    assert hour.shown() == {"every": EVERY, "times": [], "series": {name: [] for name in NAMES}}
    for _ in range(KEPT + 2):
        await hour.look()
    shown = hour.shown()
    assert len(shown["times"]) == KEPT
    assert shown["times"][0] == 3 * EVERY
    assert all(len(values) == KEPT for values in shown["series"].values())
    assert set(shown["series"]["questions"]) == {60 / EVERY}


async def test_a_clock_that_is_set_back_divides_by_nothing() -> None:
    clock = iter((100.0, 40.0))

    async def read() -> Totals:
        return {"local2_http_requests_total": 5.0}

    hour = Hour(read, lambda: next(clock))
    await hour.look()
    assert hour.shown()["series"]["requests"] == [300]
