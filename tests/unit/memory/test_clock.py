"""The tool current_time: the time of a moment in a zone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from services.memory.clock import CurrentTime, current_time
from shared.errors import ToolError

MOMENT = round(datetime(2026, 11, 28, 13, 5, 42, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("args", "text", "zone"),
    [
        ({}, "Saturday, 2026-11-28 14:05 (Europe/Berlin)", "Europe/Berlin"),
        ({"zone": ""}, "Saturday, 2026-11-28 14:05 (Europe/Berlin)", "Europe/Berlin"),
        ({"zone": " asia/tokyo "}, "Saturday, 2026-11-28 22:05 (Asia/Tokyo)", "Asia/Tokyo"),
        ({"zone": "Australia/Sydney"}, "Sunday, 2026-11-29 00:05 (Australia/Sydney)", "Australia/Sydney"),
        ({"zone": "UTC"}, "Saturday, 2026-11-28 13:05 (UTC)", "UTC"),
    ],
)
def test_current_time_is_that_of_the_zone(args: dict[str, Any], text: str, zone: str) -> None:
    found = current_time(CurrentTime(**args), MOMENT, "Europe/Berlin")
    assert found.text == text
    assert found.data["zone"] == zone
    assert datetime.fromisoformat(found.data["time"]).timestamp() * 1000 == MOMENT // 1000 * 1000


@pytest.mark.parametrize(
    ("zone", "example"), [("Mars/Olympus", "Europe/Berlin"), ("Tokyo", "Asia/Tokyo"), ("PDT", "Europe/Berlin")]
)
def test_current_time_of_an_unknown_zone_is_an_error(zone: str, example: str) -> None:
    with pytest.raises(ToolError) as caught:
        current_time(CurrentTime(zone=zone), MOMENT, "Europe/Berlin")
    assert str(caught.value) == f"unknown time zone: '{zone}'; give an IANA name such as {example}"
