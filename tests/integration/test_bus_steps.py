"""What the bus does in one step of the server, each asked for alone."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.bus import Bus, Script
from shared.bus.scripts import HAND_OVER, PUBLISH_ONCE, REMOVE_IDLE_CONSUMERS, RENEW_CLAIMS

STREAM, GROUP = "s", "g"


@pytest.fixture
def grouped(raw: redis.Redis) -> redis.Redis:
    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    return raw


def add(raw: redis.Redis, *ids: str) -> None:
    for entry_id in ids:
        raw.xadd(STREAM, {"payload": "x"}, id=entry_id)


def read(raw: redis.Redis, by: str, count: int) -> list[str]:
    ((_, found),) = raw.xreadgroup(GROUP, by, {STREAM: ">"}, count=count)
    return [entry_id.decode() for entry_id, _ in found]


def pending(raw: redis.Redis) -> dict[str, tuple[str, int]]:
    """Who has each entry, and how often it was delivered."""
    return {
        row["message_id"].decode(): (row["consumer"].decode(), row["times_delivered"])
        for row in raw.xpending_range(STREAM, GROUP, "-", "+", 10_000)
    }


def silent(raw: redis.Redis, than: int = 50_000) -> list[str]:
    """What nobody has kept for so many milliseconds."""
    return [row["message_id"].decode() for row in raw.xpending_range(STREAM, GROUP, "-", "+", 10_000, idle=than)]


def age(raw: redis.Redis, owner: str, *ids: str, ms: int = 60_000) -> None:
    """Whoever holds these has not kept them for so long."""
    raw.xclaim(STREAM, GROUP, owner, 0, list(ids), idle=ms, justid=True)


async def step(bus: Bus, script: Script, *args: Any) -> Any:
    return await bus.link.call(*script((STREAM,), GROUP, *args))


@pytest.mark.parametrize(("bound", "least", "most"), [((), 301, 301), (("MAXLEN", "~", 150), 150, 250)])
async def test_what_is_published_once_is_there_once_within_the_bound_of_its_stream(
    bound: tuple[Any, ...], least: int, most: int, bus: Bus, raw: redis.Redis
) -> None:
    with raw.pipeline(transaction=False) as pipe:
        for _ in range(300):
            pipe.xadd(STREAM, {"payload": "x"})
        pipe.execute()
    publishing = PUBLISH_ONCE((STREAM, "once"), 60, *bound, "*", "a", "b", "c", "d")
    first, again = await bus.link.call(*publishing), await bus.link.call(*publishing)
    assert first == again == raw.get("once")
    assert raw.xrevrange(STREAM, count=1) == [(first, {b"a": b"b", b"c": b"d"})]
    # a bound is kept up to a node
    assert least <= raw.xlen(STREAM) <= most
    assert 50 <= raw.ttl("once") <= 60


async def test_a_heartbeat_keeps_what_is_ours_and_tells_what_is_not(bus: Bus, grouped: redis.Redis) -> None:
    add(grouped, *(f"{number}-0" for number in range(1, 9)))
    assert read(grouped, "r1", 4) == ["1-0", "2-0", "3-0", "4-0"]
    assert read(grouped, "r2", 2) == ["5-0", "6-0"]
    age(grouped, "r1", "1-0", "2-0", "3-0")
    age(grouped, "r2", "5-0", "6-0")
    grouped.xack(STREAM, GROUP, "4-0")
    before = grouped.time()
    now, left, idle, lost = await step(bus, RENEW_CLAIMS, "r1", "heir", 50_000, "2-0", "5-0", "4-0", "1-0", "7-0")
    after = grouped.time()
    assert before[0] * 1000 + before[1] // 1000 <= now <= after[0] * 1000 + after[1] // 1000
    # of how many there are it is only told that there are some
    assert (left, idle, lost) == (0, 1, [b"5-0", b"4-0", b"7-0"])
    assert silent(grouped) == ["3-0", "5-0", "6-0"]
    assert pending(grouped) == {**dict.fromkeys(["1-0", "2-0", "3-0"], ("r1", 1)), **dict.fromkeys(
        ["5-0", "6-0"], ("r2", 1)
    )}  # fmt: skip
    assert read(grouped, "heir", 2) == ["7-0", "8-0"]
    assert (await step(bus, RENEW_CLAIMS, "r1", "heir", 70_000, "1-0"))[1:] == [1, 0, []]
    assert (await step(bus, RENEW_CLAIMS, "r1", "heir", 50_000, "3-0", "1-0", "2-0"))[1:] == [1, 1, []]
    assert silent(grouped) == ["5-0", "6-0"]


async def test_a_heartbeat_keeps_any_number_of_entries(bus: Bus, grouped: redis.Redis) -> None:
    ids = [f"{number}-0" for number in range(1, 2_302)]
    with grouped.pipeline(transaction=False) as pipe:
        for entry_id in ids:
            pipe.xadd(STREAM, {"payload": "x"}, id=entry_id)
        pipe.execute()
    assert read(grouped, "r1", 2_301) == ids
    age(grouped, "r1", *ids)
    assert (await step(bus, RENEW_CLAIMS, "r1", "heir", 50_000, *ids[:-1]))[1:] == [0, 1, []]
    assert silent(grouped) == ids[-1:]


async def test_what_a_leaving_consumer_holds_is_anybodys_at_once_and_the_consumer_goes_when_that_is_all(
    bus: Bus, grouped: redis.Redis
) -> None:
    ids = [f"{number}-0" for number in range(1, 604)]
    with grouped.pipeline(transaction=False) as pipe:
        for entry_id in ids:
            pipe.xadd(STREAM, {"payload": "x"}, id=entry_id)
        pipe.execute()
    read(grouped, "r1", 602)
    read(grouped, "r2", 1)
    grouped.xclaim(STREAM, GROUP, "r1", 0, ["2-0"], retrycount=3, justid=True)
    grouped.xclaim(STREAM, GROUP, "r1", 0, ["3-0"], retrycount=0, justid=True)
    # an entry that is there no more is nobody's
    grouped.xdel(STREAM, "602-0")
    assert await step(bus, HAND_OVER, "r1", "heir") == 500
    assert {owner for owner, _ in pending(grouped).values()} == {"r1", "r2", "heir"}
    assert await step(bus, HAND_OVER, "r1", "heir") == 102
    assert {row["name"] for row in grouped.xinfo_consumers(STREAM, GROUP)} == {b"r1", b"r2", b"heir"}
    assert await step(bus, HAND_OVER, "r1", "heir") == 0
    assert {row["name"] for row in grouped.xinfo_consumers(STREAM, GROUP)} == {b"r2", b"heir"}
    assert pending(grouped) == {
        **dict.fromkeys(ids[:601], ("heir", 0)), "2-0": ("heir", 2), "603-0": ("r2", 1)
    }  # fmt: skip
    assert silent(grouped, 900_000_000) == ids[:601]


async def test_silent_consumers_that_hold_nothing_are_removed_a_hundred_at_a_time_and_the_others_counted(
    bus: Bus, grouped: redis.Redis
) -> None:
    add(grouped, "1-0")
    read(grouped, "busy", 1)
    for number in range(101):
        grouped.xgroup_createconsumer(STREAM, GROUP, f"gone{number}")
    assert await step(bus, REMOVE_IDLE_CONSUMERS, 600_000) == 102
    left = []
    for _ in range(3):
        assert await step(bus, REMOVE_IDLE_CONSUMERS, -1) == 0
        left.append(len(grouped.xinfo_consumers(STREAM, GROUP)))
    assert left == [2, 1, 1]
    assert [row["name"] for row in grouped.xinfo_consumers(STREAM, GROUP)] == [b"busy"]
