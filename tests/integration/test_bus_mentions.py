"""Finding the entries in which a text occurs."""

from __future__ import annotations

import pytest
import redis

from shared.bus import Bus
from shared.bus.scripts import FIND_BY_TEXT

END = f"{2**64 - 1}-0"


async def mentions(bus: Bus, since: str, text: str, count: int) -> tuple[str, list[str]]:
    found = await bus.link.call(*FIND_BY_TEXT(("s",), since, END, text, count))
    return found[0].decode(), [entry_id.decode() for entry_id in found[1:]]


@pytest.fixture
def ids(raw: redis.Redis) -> list[str]:
    """Thirty entries, of which the fifth and the fifteenth say the same."""
    for number in range(1, 31):
        raw.xadd("s", {"a": "b", "text": "<same>" if number in (5, 15) else f"<{number}>"}, id=f"{number}-0")
    return [f"{number}-0" for number in range(1, 31)]


async def test_every_mention_of_a_page_is_found_and_where_to_go_on(bus: Bus, ids: list[str]) -> None:
    assert await mentions(bus, "0-0", "<same>", 40) == ("", ["5-0", "15-0"])
    assert await mentions(bus, "0-0", "<same>", 10) == ("(10-0", ["5-0"])
    assert await mentions(bus, "(10-0", "<same>", 10) == ("(20-0", ["15-0"])
    assert await mentions(bus, "(20-0", "<same>", 11) == ("", [])


async def test_a_mention_is_looked_for_in_values_from_their_first_to_their_last_byte(
    bus: Bus, raw: redis.Redis
) -> None:
    raw.xadd("s", {"<same>": "a name", "same>": "a part"}, id="1-0")
    raw.xadd("s", {"a": "<same> at the beginning", "b": "<same>"}, id="2-0")
    raw.xadd("s", {"a": "x", "b": "y", "c": "at the end <same>"}, id="3-0")
    raw.xadd("s", {"a": "<Same>", "b": "same>"}, id="4-0")
    assert await mentions(bus, "0-0", "<same>", 40) == ("", ["2-0", "3-0"])
    # a text, and no pattern
    assert await mentions(bus, "0-0", "<.ame>", 40) == ("", [])
