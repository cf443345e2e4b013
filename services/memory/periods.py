"""Periods in questions, relative to the day of the question: yesterday, last week, three days ago."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, timedelta
from typing import NamedTuple

from shared.zones import day_bounds, local_date


class Period(NamedTuple):
    """Moments from `start` up to but without `end`, in ms since the epoch."""

    start: int
    end: int


_Days = tuple[date, date]

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_NUMBERS = {
    name: number
    for number, names in enumerate(
        ("a|an|one", "two|a couple of", "three|a few", "four", "five", "six", "seven", "eight", "nine", "ten"), start=1
    )
    for name in names.split("|")
}
_NUMBER = rf"(?P<number>\d{{1,3}}|{'|'.join(sorted(_NUMBERS, key=len, reverse=True))})"
_UNIT = r"(?P<unit>day|week|month|year)"
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
# "on Monday, 9 March" names its day itself.
_NO_DATE = rf"(?!,?\s+(?:the\s+)?(?:\d|(?:{_MONTHS})))"


def _week(day: date) -> _Days:
    """Weeks begin on Monday (ISO 8601)."""
    monday = day - timedelta(days=day.weekday())
    return monday, monday + timedelta(days=6)


def _month(day: date, back: int = 0) -> _Days:
    months = day.year * 12 + day.month - 1 - back
    first = date(months // 12, months % 12 + 1, 1)
    following = date((months + 1) // 12, (months + 1) % 12 + 1, 1)
    return first, following - timedelta(days=1)


def _calendar(today: date, unit: str, back: int) -> _Days:
    """Return the whole day, week, month or year that is `back` of them before today's."""
    match unit:
        case "day":
            return today - timedelta(days=back), today - timedelta(days=back)
        case "week":
            return _week(today - timedelta(weeks=back))
        case "month":
            return _month(today, back)
        case _:
            return date(today.year - back, 1, 1), date(today.year - back, 12, 31)


def _number(found: re.Match[str]) -> int:
    text = found["number"].lower()
    return _NUMBERS.get(text) or int(text)


def _ago(today: date, found: re.Match[str]) -> _Days:
    return _calendar(today, found["unit"].lower(), _number(found))


def _running(today: date, found: re.Match[str]) -> _Days:
    """Return the last days, weeks, months or years up to today."""
    count, unit = _number(found) if "number" in found.groupdict() else 1, found["unit"].lower()
    if unit in ("day", "week"):
        return today - timedelta(days=count * (7 if unit == "week" else 1)), today
    first = _month(today, count * (12 if unit == "year" else 1))[0]
    return min(date(first.year, first.month, min(today.day, _month(first)[1].day)), today), today


def _weekday(today: date, found: re.Match[str]) -> _Days:
    """Return the last such day before today."""
    back = (today.weekday() - _WEEKDAYS.index(found["weekday"].lower()) - 1) % 7 + 1
    return today - timedelta(days=back), today - timedelta(days=back)


def _weekend(today: date, _found: re.Match[str]) -> _Days:
    """Return the last weekend that began before today."""
    saturday = today - timedelta(days=(today.weekday() - 6) % 7 + 1)
    return saturday, saturday + timedelta(days=1)


def _back(days: int) -> Callable[[date, re.Match[str]], _Days]:
    return lambda today, _found: _calendar(today, "day", days)


# The first rule that matches a question counts.
_RULES: tuple[tuple[re.Pattern[str], Callable[[date, re.Match[str]], _Days]], ...] = tuple(
    (re.compile(rf"\b{pattern}\b{behind}", re.IGNORECASE), rule)
    for pattern, behind, rule in (
        (r"(?:the\s+)?day\s+before\s+yesterday", "", _back(2)),
        (r"(?:yesterday|last\s+night)", "", _back(1)),
        (r"(?:today|tonight|this\s+(?:morning|afternoon|evening))", "", _back(0)),
        (rf"{_NUMBER}\s+{_UNIT}s?\s+ago", "", _ago),
        (rf"(?:(?:in|over|during|within)\s+)?(?:the\s+)?(?:last|past)\s+{_NUMBER}\s+{_UNIT}s?", "", _running),
        (r"(?:(?:in|over|during)\s+)?the\s+past\s+(?P<unit>week|month|year)", "", _running),
        (r"(?:last|the\s+previous)\s+(?P<unit>week|month|year)", "", lambda t, f: _calendar(t, f["unit"].lower(), 1)),
        (r"this\s+(?P<unit>week|month|year)", "", lambda t, f: _calendar(t, f["unit"].lower(), 0)),
        (r"(?:(?:last|this|on\s+the|over\s+the)\s+)weekend", "", _weekend),
        (rf"(?:on|last|this|this\s+past)\s+(?P<weekday>{'|'.join(_WEEKDAYS)})", _NO_DATE, _weekday),
    )
)


def period_of(text: str, now: int, zone: str) -> tuple[Period | None, str]:
    """Return the period that a text names, and the text without it.

    now: ms since the epoch. zone: IANA name of the zone whose days count. Raises ValueError for an unknown zone.
    """
    today = local_date(now, zone)
    for pattern, rule in _RULES:
        if (found := pattern.search(text)) is None:
            continue
        try:
            first, last = rule(today, found)
            period = Period(day_bounds(first, zone)[0], day_bounds(last, zone)[1])
        except (ValueError, OverflowError):
            # Outside the range of `date`.
            continue
        return period, f"{text[: found.start()]} {text[found.end() :]}"
    return None, text
