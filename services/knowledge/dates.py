"""Dates as precise as in the text: a year, a month of a year, or a day."""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime

_ISO = re.compile(r"^(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?$", re.ASCII)
MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
          "december")  # fmt: skip
_MONTH = "|".join([*(f"{name}|{name[:3]}" for name in MONTHS), "sept"])
_TOLD = re.compile(
    rf"^(?:(?P<day>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?)?(?P<month>{_MONTH})\.?(?: (?P<day2>\d{{1,2}})(?:st|nd|rd|th)?"
    rf"(?!\d))?(?:,? (?P<year>\d{{4}}))?$",
    re.ASCII,
)
MOST = 40


def day(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).date().isoformat()


def earlier(one: str, other: str) -> bool:
    """Return whether a date is before another, to the precision of both: 2026 is not before 2026-05."""
    told = min(len(one), len(other))
    return one[:told] < other[:told]


def first(one: str, other: str) -> str:
    """Return the earlier of two dates, or the more precise one if neither is earlier; '' stands for no date."""
    if not one or not other:
        return one or other
    if earlier(one, other) or earlier(other, one):
        return min(one, other)
    return max(one, other, key=len)


def date_of(text: str | None, said_ms: int) -> str | None:
    """Return the date that a text names, as `2026`, `2026-05` or `2026-05-03`; None if it names no date.

    said_ms: when it was said. A month without a year is the last one that had begun then.
    """
    # Dates are compared as texts: other scripts' digits become ASCII.
    words = " ".join(unicodedata.normalize("NFKC", text or "").casefold().replace(",", " ").split())
    if not words or len(words) > MOST:
        return None
    today = day(said_ms)
    year = int(today[:4])
    if words in ("today", "now", "this week"):
        return today
    if words in ("this year", "last year"):
        return str(year - (words == "last year"))
    if words in ("this month", "last month"):
        month = int(today[5:7]) - (words == "last month")
        return f"{year}-{month:02}" if month else f"{year - 1}-12"
    if (iso := _ISO.match(words)) is not None:
        return words if _valid(int(iso[1]), iso[2], iso[3]) else None
    if (told := _TOLD.match(words)) is None:
        return None
    month = 1 + next(n for n, name in enumerate(MONTHS) if name.startswith(told["month"][:3]))
    in_month = told["day"] or told["day2"]
    named = int(told["year"]) if told["year"] else year - (f"{year}-{month:02}" > today[:7])
    found = f"{named}-{month:02}" + (f"-{int(in_month):02}" if in_month else "")
    return found if _valid(named, f"{month:02}", found[8:] or None) else None


def _valid(year: int, month: str | None, in_month: str | None) -> bool:
    try:
        datetime(year, int(month or 1), int(in_month or 1), tzinfo=UTC)
    except ValueError:
        return False
    return True
