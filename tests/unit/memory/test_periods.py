"""Periods that questions name, in the days of the user's zone."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from services.memory.periods import period_of
from shared.zones import local_time

HOUR = 3_600_000


def ms(text: str) -> int:
    """The moment of an ISO time with its offset, in ms."""
    return int(datetime.fromisoformat(text).timestamp() * 1000)


# A Saturday, in every zone of the tests.
NOW = ms("2026-11-28T12:00:00+00:00")

# A question, and the first and the last day that it names (None: it names no period).
NAMED = [
    ("What did we talk about yesterday?", "2026-11-27", "2026-11-27"),
    ("What was it the day before yesterday?", "2026-11-26", "2026-11-26"),
    ("what did I tell you last night", "2026-11-27", "2026-11-27"),
    ("What did I say TODAY?", "2026-11-28", "2026-11-28"),
    ("this morning's recipe", "2026-11-28", "2026-11-28"),
    ("three days ago", "2026-11-25", "2026-11-25"),
    ("a couple of days ago", "2026-11-26", "2026-11-26"),
    ("a week ago", "2026-11-16", "2026-11-22"),
    ("2 months ago", "2026-09-01", "2026-09-30"),
    ("What did we do last week?", "2026-11-16", "2026-11-22"),
    ("this week", "2026-11-23", "2026-11-29"),
    ("last month", "2026-10-01", "2026-10-31"),
    ("last year", "2025-01-01", "2025-12-31"),
    ("this year", "2026-01-01", "2026-12-31"),
    ("in the last 7 days", "2026-11-21", "2026-11-28"),
    ("over the past two weeks", "2026-11-14", "2026-11-28"),
    ("in the past month", "2026-10-28", "2026-11-28"),
    ("in the past year", "2025-11-28", "2026-11-28"),
    ("last weekend", "2026-11-21", "2026-11-22"),
    ("What did I ask on Monday?", "2026-11-23", "2026-11-23"),
    ("last Saturday", "2026-11-21", "2026-11-21"),
    ("on Friday evening", "2026-11-27", "2026-11-27"),
    ("on Monday, 9 March", None, None),
    ("on Saturday 14 March 2026", None, None),
    ("on a Saturday in March 2026", None, None),
    ("What did I say on 14 March?", None, None),
    ("999 years ago", "1027-01-01", "1027-12-31"),
    ("my last name", None, None),
    ("the last weeks of summer", None, None),
]


@pytest.mark.parametrize(("text", "first", "last"), NAMED)
def test_question_names_a_period(text: str, first: str | None, last: str | None) -> None:
    period, rest = period_of(text, NOW, "UTC")
    if first is None or last is None:
        assert (period, rest) == (None, text)
        return
    assert period is not None
    days = [local_time(at, "UTC").date() for at in (period.start, period.end - 1)]
    assert days == [date.fromisoformat(first), date.fromisoformat(last)]
    assert len(rest) < len(text)


def test_period_is_taken_out_of_the_words() -> None:
    _, rest = period_of("What did I say about coffee yesterday?", NOW, "UTC")
    assert rest.split() == ["What", "did", "I", "say", "about", "coffee", "?"]


# Zone, the moment of the question, and the length of yesterday.
CHANGES = [
    ("America/Los_Angeles", "2026-03-09T08:00:00-07:00", 23),
    ("America/Los_Angeles", "2026-11-02T08:00:00-08:00", 25),
    ("Australia/Sydney", "2026-10-05T08:00:00+11:00", 23),
    ("Australia/Sydney", "2026-04-06T08:00:00+10:00", 25),
    ("Europe/Berlin", "2026-03-30T08:00:00+02:00", 23),
    ("Europe/Berlin", "2026-10-26T08:00:00+01:00", 25),
    ("Europe/Berlin", "2026-11-28T08:00:00+01:00", 24),
]


@pytest.mark.parametrize(("zone", "asked", "hours"), CHANGES)
def test_yesterday_is_a_day_of_the_zone_also_when_clocks_change(zone: str, asked: str, hours: int) -> None:
    period, _ = period_of("yesterday", ms(asked), zone)
    assert period is not None
    assert period.end - period.start == hours * HOUR
    yesterday = datetime.fromisoformat(asked).date() - timedelta(days=1)
    inside, outside = (period.start, period.end - 1), (period.start - 1, period.end)
    assert {local_time(at, zone).date() for at in inside} == {yesterday}
    assert yesterday not in {local_time(at, zone).date() for at in outside}


@pytest.mark.parametrize(
    ("zone", "day"), [("America/Los_Angeles", "2026-11-26"), ("Australia/Sydney", "2026-11-27"), ("UTC", "2026-11-26")]
)
def test_yesterday_depends_on_the_zone_at_one_moment(zone: str, day: str) -> None:
    # 20:00 in London on the 27th: already the 28th in Sydney
    period, _ = period_of("yesterday", ms("2026-11-27T20:00:00+00:00"), zone)
    assert period is not None
    assert local_time(period.start, zone).date() == date.fromisoformat(day)


def test_unknown_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown time zone"):
        period_of("yesterday", NOW, "Mars/Olympus")


def test_moments_are_utc_days_in_utc() -> None:
    period, _ = period_of("yesterday", NOW, "UTC")
    assert period is not None
    assert datetime.fromtimestamp(period.start / 1000, UTC) == datetime(2026, 11, 27, tzinfo=UTC)
