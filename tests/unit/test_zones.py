"""Time zones by their names, and the local date and time of a moment."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from shared.zones import clock_line, date_line, day_bounds, first_zone, local_date, machine_zone, zone_name


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Europe/Berlin", "Europe/Berlin"),
        (" europe/berlin ", "Europe/Berlin"),
        ("UTC", "UTC"),
        ("America/Argentina/Buenos_Aires", "America/Argentina/Buenos_Aires"),
        # a name that browsers still send
        ("Asia/Calcutta", "Asia/Calcutta"),
    ],
)
def test_zone_name_of_a_known_zone_is_the_iana_name(text: str, name: str) -> None:
    assert zone_name(text) == name


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("Mars/Olympus", "Europe/Berlin"),
        ("Tokyo", "Asia/Tokyo"),
        ("new york", "America/New_York"),
        ("", "Europe/Berlin"),
        ("../../etc/passwd", "Europe/Berlin"),
        ("/etc/localtime", "Europe/Berlin"),
        ("localtime", "Europe/Berlin"),
        ("Europe", "Europe/Berlin"),
        ("posix/Europe/Berlin", "Europe/Berlin"),
        ("Europe/Berlin\0", "Europe/Berlin"),
        ("+02:00", "Europe/Berlin"),
        ("x" * 10_000, "Europe/Berlin"),
    ],
)
def test_zone_name_of_another_text_is_refused_with_an_example(text: str, example: str) -> None:
    with pytest.raises(ValueError, match=f"^unknown time zone: .*; give an IANA name such as {example}$") as caught:
        zone_name(text)
    assert repr(text)[:60].rstrip("'") in str(caught.value)
    assert len(str(caught.value)) < 200


def test_first_zone_passes_over_unknown_names() -> None:
    assert first_zone("", "Mars/Olympus", "Asia/Tokyo", "UTC") == "Asia/Tokyo"
    assert first_zone("", "Mars/Olympus") == "UTC"


@pytest.mark.parametrize(
    ("moment", "zone", "line"),
    [
        ("2026-11-28T20:00", "UTC", "Today's date: 2026-11-28 (Saturday, UTC)"),
        ("2026-11-28T20:00", "Australia/Sydney", "Today's date: 2026-11-29 (Sunday, Australia/Sydney)"),
        ("2026-11-28T03:00", "America/Los_Angeles", "Today's date: 2026-11-27 (Friday, America/Los_Angeles)"),
        # summer time moves midnight: Berlin's is at 22:00 UTC in July, at 23:00 in December
        ("2026-07-01T22:30", "Europe/Berlin", "Today's date: 2026-07-02 (Thursday, Europe/Berlin)"),
        ("2026-12-01T22:30", "Europe/Berlin", "Today's date: 2026-12-01 (Tuesday, Europe/Berlin)"),
        # on the night of each change
        ("2026-03-28T23:00", "Europe/Berlin", "Today's date: 2026-03-29 (Sunday, Europe/Berlin)"),
        ("2026-03-29T22:00", "Europe/Berlin", "Today's date: 2026-03-30 (Monday, Europe/Berlin)"),
        ("2026-10-24T22:00", "Europe/Berlin", "Today's date: 2026-10-25 (Sunday, Europe/Berlin)"),
        ("2026-10-25T22:59", "Europe/Berlin", "Today's date: 2026-10-25 (Sunday, Europe/Berlin)"),
        # a zone that skipped a whole day
        ("2011-12-30T09:59", "Pacific/Apia", "Today's date: 2011-12-29 (Thursday, Pacific/Apia)"),
        ("2011-12-30T10:00", "Pacific/Apia", "Today's date: 2011-12-31 (Saturday, Pacific/Apia)"),
    ],
)
def test_date_line_has_date_weekday_and_zone_of_the_user(moment: str, zone: str, line: str) -> None:
    assert date_line(ms(moment), zone) == line


@pytest.mark.parametrize(
    ("moment", "zone", "line"),
    [
        ("2026-11-28T13:05:59", "Europe/Berlin", "Saturday, 2026-11-28 14:05 (Europe/Berlin)"),
        ("2026-11-28T13:05", "Australia/Sydney", "Sunday, 2026-11-29 00:05 (Australia/Sydney)"),
        ("2026-11-28T13:05", "Asia/Kathmandu", "Saturday, 2026-11-28 18:50 (Asia/Kathmandu)"),
        # the clock goes from 02:00 to 03:00, and from 03:00 back to 02:00
        ("2026-03-29T00:59", "Europe/Berlin", "Sunday, 2026-03-29 01:59 (Europe/Berlin)"),
        ("2026-03-29T01:00", "Europe/Berlin", "Sunday, 2026-03-29 03:00 (Europe/Berlin)"),
        ("2026-10-25T00:30", "Europe/Berlin", "Sunday, 2026-10-25 02:30 (Europe/Berlin)"),
        ("2026-10-25T01:30", "Europe/Berlin", "Sunday, 2026-10-25 02:30 (Europe/Berlin)"),
    ],
)
def test_clock_line_has_the_local_time(moment: str, zone: str, line: str) -> None:
    assert clock_line(ms(moment), zone) == line


@pytest.mark.parametrize(
    ("day", "zone", "first", "hours"),
    [
        ("2026-11-28", "UTC", "2026-11-28T00:00", 24),
        ("2026-11-28", "Australia/Sydney", "2026-11-27T13:00", 24),
        ("2026-03-29", "Europe/Berlin", "2026-03-28T23:00", 23),
        ("2026-10-25", "Europe/Berlin", "2026-10-24T22:00", 25),
        ("2026-03-08", "America/Los_Angeles", "2026-03-08T08:00", 23),
        ("2026-04-05", "Australia/Lord_Howe", "2026-04-04T13:00", 24.5),
        # midnight does not exist where the clock goes from 00:00 to 01:00, and exists twice in Havana
        ("2018-11-04", "America/Sao_Paulo", "2018-11-04T03:00", 23),
        ("2020-11-01", "America/Havana", "2020-11-01T04:00", 25),
    ],
)
def test_day_bounds_where_clocks_change_are_23_to_25_hours(day: str, zone: str, first: str, hours: float) -> None:
    start, end = day_bounds(date.fromisoformat(day), zone)
    assert (start, end - start) == (ms(first), hours * 3_600_000)
    assert [local_date(moment, zone).isoformat() == day for moment in (start - 1, start, end - 1, end)] == [
        False, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        ("Europe/Berlin", "Europe/Berlin"),
        (":Europe/Berlin", "Europe/Berlin"),
        ("/usr/share/zoneinfo/Asia/Tokyo", "Asia/Tokyo"),
        ("CET-1CEST,M3.5.0,M10.5.0/3", None),
        ("Mars/Olympus", None),
    ],
)
def test_machine_zone_is_that_of_tz(variable: str, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", variable)
    assert machine_zone() == found


def test_machine_zone_reads_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "localtime"
    monkeypatch.setenv("TZ", str(link))
    for zone in ("Europe/Berlin", "Asia/Tokyo"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "zoneinfo" / zone)
        assert machine_zone() == "Europe/Berlin"
