"""The bus's clock, and for how long somebody has watched by it."""

from __future__ import annotations

import time

import pytest

from shared.bus.clock import BusClock
from shared.bus.visibility import Watch


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


def test_clock_ignores_slow_reply_after_a_quick_one(monotonic: list[float]) -> None:
    clock = BusClock()
    monotonic[0] = 1_010.0
    clock.learn(reply(5_000.0), asked=1_000.0)
    assert clock.now_ms() == pytest.approx(5_005_000, abs=1)
    # says nothing new: it may have been given at any moment of its way
    monotonic[0] = 1_020.0
    clock.learn(reply(5_014.75), asked=1_019.7)
    assert clock.now_ms() == pytest.approx(5_015_000, abs=1)
    clock.learn(reply(5_014.75), asked=1_019.75)
    assert clock.now_ms() == pytest.approx(5_014_875, abs=1)


@pytest.mark.parametrize("leap", [-3_600.0, -2.0, 2.0, 3_600.0])
def test_clock_learns_from_slow_reply_that_contradicts_it(leap: float, monotonic: list[float]) -> None:
    clock = BusClock()
    clock.learn(reply(5_000.0), asked=1_000.0)
    monotonic[0] = 1_010.0
    clock.learn(reply(5_009.5 + leap), asked=1_009.0)
    assert clock.now_ms() == pytest.approx((5_010 + leap) * 1000, abs=1)


def test_only_what_was_watched_without_a_gap_counts() -> None:
    watch = Watch(100)
    assert watch.observe(0) == 0
    assert [watch.observe(now) for now in (50, 50, 150, 250)] == [50, 50, 150, 250]
    # away for longer than that, so that others may come back as much later
    assert watch.observe(351) == -101
    assert watch.back == 452
    assert [watch.observe(now) for now in (400, 500, 552)] == [-52, 48, 100]
    # a clock that was set back proves nothing either, and says nothing about how long that was
    assert watch.observe(500) == 0
    assert watch.observe(551) == 51


def test_watch_restarts_when_clock_goes_back_before_its_start() -> None:
    watch = Watch(100)
    assert [watch.observe(now) for now in (3_600_000, 3_600_050)] == [0, 50]
    assert [watch.observe(now) for now in (1_000, 1_050, 1_150)] == [0, 50, 150]


def test_watch_waits_as_long_as_the_pause_up_to_fifteen_gaps() -> None:
    for away, later in ((101, 101), (1_500, 1_500), (1_501, 1_500), (36_000_000, 1_500)):
        watch = Watch(100)
        watch.observe(1_000)
        assert watch.observe(1_000 + away) == -later


def test_watch_short_pause_does_not_shorten_a_long_wait() -> None:
    watch = Watch(100)
    watch.observe(0)
    watch.observe(1_000)
    assert watch.observe(1_200) == -800
    assert watch.back == 2_000
    # nor does a clock that is set back by hours keep anybody from watching for as long
    assert watch.observe(10_000_000) == -1_500
    assert watch.observe(3_000) == -1_500


def test_the_first_look_begins_the_watch_whatever_the_time_is() -> None:
    for now in (0, 50, 1_700_000_000_000):
        assert Watch(100).observe(now) == 0


def test_deadline_stamped_before_forward_jump_keeps_its_time(monotonic: list[float]) -> None:
    clock = BusClock()
    clock.learn(reply(5_000.0), asked=1_000.0)
    assert clock.left(5_060_000, stamped=5_000_000) == 60_000
    monotonic[0] += 10
    clock.learn(reply(8_610.0), asked=1_010.0)
    assert clock.left(5_060_000, stamped=5_000_000) == pytest.approx(50_000, abs=1)
    assert clock.left(5_060_000, stamped=5_009_900) == pytest.approx(50_000, abs=1)
    # nor from what others stamp who hear of it later
    assert clock.left(5_070_500, stamped=5_010_500) == pytest.approx(60_500, abs=1)
    # what is stamped afterwards was set by the clock as it is
    assert clock.left(8_620_000, stamped=8_610_000) == pytest.approx(10_000, abs=1)
    # and so again
    monotonic[0] += 10
    clock.learn(reply(12_220.0), asked=1_020.0)
    assert clock.left(5_060_000, stamped=5_000_000) == pytest.approx(40_000, abs=1)
    assert clock.left(8_630_000, stamped=8_610_000) == pytest.approx(10_000, abs=1)


def test_deadline_is_longer_before_the_jump_is_noticed(monotonic: list[float]) -> None:
    clock = BusClock()
    clock.learn(reply(5_000.0), asked=1_000.0)
    # accepted by the clock as it is, of a minute
    assert clock.left(8_660_000, stamped=8_600_000) == pytest.approx(60_000 + 3_600_000, abs=1)
    clock.learn(reply(8_600.0), asked=1_000.0)
    assert clock.left(8_660_000, stamped=8_600_000) == pytest.approx(60_000, abs=1)


def test_deadline_is_unchanged_by_correction_or_backward_jump(monotonic: list[float]) -> None:
    clock = BusClock()
    monotonic[0] = 1_004.0
    clock.learn(reply(5_000.0), asked=1_000.0)
    # it was given at the beginning of that way
    clock.learn(reply(5_003.9), asked=1_004.0)
    assert clock.left(5_060_000, stamped=5_000_000) == pytest.approx(56_100, abs=1)
    clock.learn(reply(4_000.0), asked=1_004.0)
    assert clock.left(5_060_000, stamped=5_000_000) == pytest.approx(1_060_000, abs=1)
