"""Time zones by their IANA names, and local times. Moments are in ms since the epoch."""

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
# Files of the database that are not zones.
_NO_ZONES = {"factory", "localtime"}
_LINK, _NAMED = Path("/etc/localtime"), Path("/etc/timezone")


@cache
def _names() -> dict[str, str]:
    """Return the names of the database by their case-folded form: no two names differ in case alone."""
    return {name.casefold(): name for name in available_timezones() if name.casefold() not in _NO_ZONES}


def zone_name(text: str) -> str:
    """Return the IANA name for a text, in the database's spelling. Raises ValueError with a sentence for users."""
    found = _names().get(text.strip().casefold()) if len(text) <= LONGEST_NAME else None
    if found is None:
        shown = text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"
        raise ValueError(f"unknown time zone: {shown!r}; give an IANA name such as {city_zone(text) or EXAMPLE}")
    return found


def city_zone(text: str) -> str | None:
    """Return the zone that is named after a city; None if there is none."""
    city = f"/{text.strip().replace(' ', '_').casefold()}"
    return min((name for key, name in _names().items() if len(city) > 1 and key.endswith(city)), default=None)


def first_zone(*texts: str, otherwise: str = "UTC") -> str:
    """Return the zone of the first text that names one, else `otherwise`. For texts from other programs."""
    for text in texts:
        try:
            return zone_name(text)
        except ValueError:
            continue
    return otherwise


def machine_zone() -> str | None:
    """Return the zone from `TZ`, else from /etc/localtime or /etc/timezone; None if none of them names a zone.

    The files are read once in a process.
    """
    return _zone_of(os.environ.get("TZ", "").removeprefix(":"))


@cache
def _zone_of(said: str) -> str | None:
    if said and not said.startswith("/"):
        named = [said]
    else:
        # `TZ` may be the path of a file, as in the C library.
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
    # A skipped midnight gets the offset before the change, which is the moment of the change itself.
    starts = (datetime(each.year, each.month, each.day, tzinfo=where) for each in (day, day + timedelta(days=1)))
    first, following = (round(start.timestamp() * 1000) for start in starts)
    return first, following


def date_line(ms: int, zone: str) -> str:
    """Return the date line of a prompt. It has no time of day: the same text all day keeps the model server's prompt
    cache valid. Raises ValueError for an unknown zone."""
    day = local_date(ms, zone)
    return f"Today's date: {day.isoformat()} ({weekday(day)}, {zone})"


def clock_line(ms: int, zone: str) -> str:
    """Return weekday, date, time and zone of a moment. Raises ValueError for an unknown zone."""
    now = local_time(ms, zone)
    return f"{weekday(now)}, {now:%Y-%m-%d %H:%M} ({zone})"
