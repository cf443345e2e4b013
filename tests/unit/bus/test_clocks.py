"""The bus's clock, and for how long somebody has watched by it."""

from __future__ import annotations

import time

import pytest

from shared.bus.claims import Watch
from shared.bus.clock import BusClock


def reply(seconds: float) -> list[bytes]:
    return [b"%d" % int(seconds), b"%d" % round(seconds % 1 * 1e6)]


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr("shared.bus.clock.time.monotonic", lambda: now[0])
    return now


def test_before_anything_is_told_the_hosts_clock_counts() -> None:
    assert abs(BusClock().now_ms() - time.time() * 1000) < 1_000


def test_a_reply_tells_the_time_in_the_middle_of_its_way(monotonic: list[float]) -> None:
    clock = BusClock()
    monotonic[0] = 1_000.2
    clock.learn(reply(5_000.25), asked=1_000.0)
    assert clock.now_ms() == pytest.approx(5_000_350, abs=1)
    monotonic[0] += 60
    assert clock.now_ms() == pytest.approx(5_060_350, abs=1)


def test_a_slow_reply_is_better_than_none_and_worse_than_a_quick_one(monotonic: list[float]) -> None:
    clock = BusClock()
    monotonic[0] = 1_010.0
    clock.learn(reply(5_000.0), asked=1_000.0)
    assert clock.now_ms() == pytest.approx(5_005_000, abs=1)
    # says nothing new
    monotonic[0] = 1_020.0
    clock.learn(reply(9_000.0), asked=1_019.7)
    assert clock.now_ms() == pytest.approx(5_015_000, abs=1)
    clock.learn(reply(9_000.0), asked=1_019.75)
    assert clock.now_ms() == pytest.approx(9_000_125, abs=1)


def test_only_what_was_watched_without_a_gap_counts() -> None:
    watch = Watch(100)
    assert watch.look(0) == 0
    assert [watch.look(now) for now in (50, 150, 250)] == [50, 150, 250]
    # away for longer than that
    assert watch.look(351) == 0
    assert watch.look(400) == 49
    # a clock that was set back proves nothing either
    assert watch.look(399) == 0
    assert watch.look(450) == 51


def test_the_first_look_begins_the_watch_whatever_the_time_is() -> None:
    for now in (0, 50, 1_700_000_000_000):
        assert Watch(100).look(now) == 0
