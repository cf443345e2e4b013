"""Time zones by their IANA names, and the local time of a moment. Moments are in ms since the epoch."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

# The longest name of the database has 32 characters.
LONGEST_NAME = 64
EXAMPLE = "Europe/Berlin"
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# Files beside the database that are no zone.
_NO_ZONES = {"factory", "localtime"}
_LINK, _NAMED = Path("/etc/localtime"), Path("/etc/timezone")


@cache
def _names() -> dict[str, str]:
    """The names of the database by their case-folded form: IANA names differ in more than case."""
    return {name.casefold(): name for name in available_timezones() if name.casefold() not in _NO_ZONES}


def zone_name(text: str) -> str:
    """Return the IANA name that a text is, in its own spelling. Raises ValueError with a sentence for users."""
    found = _names().get(text.strip().casefold()) if len(text) <= LONGEST_NAME else None
    if found is None:
        shown = text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"
        raise ValueError(f"unknown time zone: {shown!r}; give an IANA name such as {city_zone(text) or EXAMPLE}")
    return found


def city_zone(text: str) -> str | None:
    """Return the zone that is named after a city; None for another place."""
    city = f"/{text.strip().replace(' ', '_').casefold()}"
    return min((name for key, name in _names().items() if len(city) > 1 and key.endswith(city)), default=None)


def first_zone(*texts: str, otherwise: str = "UTC") -> str:
    """Return the zone that the first of the texts names which names one: for texts that other programs have written."""
    for text in texts:
        try:
            return zone_name(text)
        except ValueError:
            continue
    return otherwise


def machine_zone() -> str | None:
    """Return the zone of `TZ`, else of /etc/localtime or /etc/timezone; None when none of them names one."""
    said = os.environ.get("TZ", "").removeprefix(":")
    if said and not said.startswith("/"):
        named = [said]
    else:
        # as the C library reads it, `TZ` may be the path of a file
        named = [os.path.realpath(said or _LINK).split("zoneinfo/")[-1]]
        with suppress(OSError, ValueError):
            named += [] if said else [_NAMED.read_text(encoding="ascii")]
    return next((zone for text in named if (zone := first_zone(text, otherwise=""))), None)


def local_time(ms: int, zone: str) -> datetime:
    """Return the time of a moment in a zone. Raises ValueError for an unknown zone."""
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone(ZoneInfo(zone_name(zone)))


def local_date(ms: int, zone: str) -> date:
    """Return the date of a moment in a zone. Raises ValueError for an unknown zone."""
    return local_time(ms, zone).date()


def weekday(day: date) -> str:
    """Return the English name of a day of the week, whatever the locale."""
    return _WEEKDAYS[day.weekday()]


def day_bounds(day: date, zone: str) -> tuple[int, int]:
    """Return the first moment of a day in a zone and that of the next day: 23 to 25 hours where clocks change.

    Raises ValueError for an unknown zone.
    """
    where = ZoneInfo(zone_name(zone))
    # a midnight that a change skips is read with the offset before it: that is the moment of the change
    starts = (datetime(each.year, each.month, each.day, tzinfo=where) for each in (day, day + timedelta(days=1)))
    first, following = (round(start.timestamp() * 1000) for start in starts)
    return first, following


def date_line(ms: int, zone: str) -> str:
    """Return the line that tells a model the date. It holds no time of day, so that it is the same text all day and
    stays in the model server's prompt cache. Raises ValueError for an unknown zone."""
    day = local_date(ms, zone)
    return f"Today's date: {day.isoformat()} ({weekday(day)}, {zone})"


def clock_line(ms: int, zone: str) -> str:
    """Return weekday, date, time and zone of a moment. Raises ValueError for an unknown zone."""
    now = local_time(ms, zone)
    return f"{weekday(now)}, {now:%Y-%m-%d %H:%M} ({zone})"
