"""A follower's position: what it is offered, what it reads itself, and when it waits."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shared.bus import ReplyError, StreamTailer, order
from shared.bus.follow import Follower, next_page
from shared.bus.streams import Entry, entries, event_length, size_of


def entry(number: int, size: int = 1) -> Entry:
    return f"1-{number}", [b"x" * size]


class Feed:
    """A stream in memory, which tells its followers when it is told to."""

    def __init__(self, *numbers: int) -> None:
        self.held = [entry(number) for number in numbers]
        self.reads: list[tuple[str, int]] = []
        self.joined: list[Follower] = []
        self.left: list[Follower] = []
        self.failing: list[Exception] = []
        self.bus: Any = self
        self.link = SimpleNamespace(trouble="")

    async def range(self, stream: str, start: str, *, count: int) -> list[Entry]:
        self.reads.append((start, count))
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing.pop()
        after = order(start.removeprefix("("))
        return [one for one in self.held if order(one[0]) > after][:count]

    def add(self, follower: Follower) -> None:
        self.joined.append(follower)

    def remove(self, follower: Follower) -> None:
        self.left.append(follower)


def follow(feed: Feed, after: str = "0-0") -> Follower:
    return Follower(feed, "stream", after)


def numbers(found: list[Entry]) -> list[int]:
    return [order(one[0])[1] for one in found]


def offer(follower: Follower, after: int, *new: int, size: int = 1) -> None:
    assert new[0] == after + 1
    for n in new:
        follower.offer((1, n), entry(n, size), size)


async def caught_up(feed: Feed, *there: int) -> Follower:
    follower = follow(feed)
    for number in there:
        assert number in numbers(await follower.next())
        break
    assert await follower.next(within=0.01) == []
    assert feed.joined == [follower]
    return follower


async def test_follower_of_new_stream_reads_only_after_joining() -> None:
    feed = Feed(1, 2)
    follower = Follower(feed, "stream", "0-0", new=True)
    waiting = asyncio.create_task(follower.next())
    while not feed.joined:
        await asyncio.sleep(0)
    assert feed.reads == []
    # as a feed does once it hears what comes
    follower.wake()
    assert numbers(await waiting) == [1, 2]


async def test_a_follower_begins_where_it_is_told_or_at_the_start() -> None:
    held = Feed(1, 2, 3)
    feed = StreamTailer(held.bus)
    assert numbers(await feed.follow("stream", "1-2").next()) == [3]
    assert numbers(await feed.follow("stream").next()) == [1, 2, 3]
    assert [start for start, _ in held.reads] == ["(1-2", "(0-0"]
    new = feed.follow("stream", "1-2", new=True)
    assert await new.next(within=0.01) == []
    assert len(held.reads) == 2
    # what is behind it already is not told
    offer(new, 1, 2, 3)
    assert numbers(await new.next()) == [3]
    # who has never joined may leave
    feed.follow("another").close()


async def test_what_is_there_is_read_and_then_what_comes_is_waited_for() -> None:
    feed = Feed(1, 2, 3)
    follower = follow(feed, "1-1")
    assert numbers(await follower.next()) == [2, 3]
    assert follower.position == "1-3"
    waiting = asyncio.create_task(follower.next())
    while not feed.joined:
        await asyncio.sleep(0)
    assert not waiting.done()
    offer(follower, 3, 4, 5)
    assert numbers(await waiting) == [4, 5]
    # joined once for all, and what was offered is not read
    assert await follower.next(within=0.01) == []
    assert len(feed.joined) == 1
    assert [start for start, _ in feed.reads] == ["(1-1"]


async def test_what_is_offered_while_nobody_asks_is_kept() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    offer(follower, 1, 2)
    offer(follower, 2, 3)
    assert numbers(await follower.next()) == [2, 3]


async def test_what_was_seen_already_is_not_told_again() -> None:
    feed = Feed(1, 2)
    follower = await caught_up(feed, 1)
    offer(follower, 0, 1, 2, 3)
    assert numbers(await follower.next()) == [3]
    offer(follower, 1, 2, 3)
    assert await follower.next(within=0.01) == []


async def test_a_gap_before_what_is_offered_is_read_from_the_stream() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    feed.held += [entry(2), entry(3), entry(4)]
    offer(follower, 3, 4)
    assert numbers(await follower.next()) == [2, 3, 4]
    # what was offered has been read with the rest
    assert await follower.next(within=0.01) == []
    offer(follower, 4, 5)
    assert numbers(await follower.next()) == [5]


async def test_follower_reads_once_more_when_offered_entry_is_gone() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    before = len(feed.reads)
    offer(follower, 3, 4)
    assert await follower.next(within=0.05) == []
    assert feed.reads[before:] == [("(1-1", 16)] * 2
    feed.held.append(entry(6))
    offer(follower, 5, 6)
    assert numbers(await follower.next()) == [6]


async def test_what_comes_in_the_moment_in_which_a_wait_ends_is_taken() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    loop, errors = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _loop, context: errors.append(context))
    waiting = asyncio.create_task(follower.next(within=0.05))
    await asyncio.sleep(0)
    loop.call_later(0.01, offer, follower, 1, 2)
    # both are due when the loop goes on
    time.sleep(0.1)  # noqa: ASYNC251
    assert numbers(await waiting) == [2]
    await asyncio.sleep(0.01)
    assert errors == []


async def test_follower_reads_stream_after_gap_between_offers() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    feed.held += [entry(n) for n in (2, 3, 4)]
    offer(follower, 1, 2)
    offer(follower, 3, 4)
    assert numbers(await follower.next()) == [2, 3, 4]


async def test_being_told_to_look_is_believed_once() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    reads = len(feed.reads)
    follower.wake()
    assert await follower.next(within=0.01) == []
    assert len(feed.reads) == reads + 1
    feed.held.append(entry(2))
    follower.wake()
    # the stream has it anyway
    offer(follower, 1, 2)
    assert numbers(await follower.next()) == [2]


async def test_who_waits_is_woken_by_a_look() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    waiting = asyncio.create_task(follower.next())
    await asyncio.sleep(0)
    feed.held.append(entry(2))
    follower.wake()
    assert numbers(await asyncio.wait_for(waiting, 5)) == [2]


async def test_follower_of_slow_reader_drops_offers_above_a_limit_and_reads_them() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    reads = len(feed.reads)
    # four megabytes are offered, and none is taken
    size, count = 100_000, 40
    feed.held += [entry(n) for n in range(2, count + 2)]
    for n in range(1, count + 1):
        offer(follower, n, n + 1, size=size)
    got: list[int] = []
    while len(got) < count:
        got += numbers(await follower.next())
    assert got == list(range(2, count + 2))
    assert len(feed.reads) > reads
    # a single one above the limit is taken, and no page is read for it
    reads = len(feed.reads)
    offer(follower, count + 1, count + 2, size=size * count)
    assert numbers(await follower.next()) == [count + 2]
    assert len(feed.reads) == reads


async def test_a_read_that_fails_or_is_given_up_is_made_again() -> None:
    feed = Feed(1)
    follower = follow(feed)
    feed.failing.append(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await follower.next()
    assert numbers(await follower.next()) == [1]
    # a key that is no stream has nothing to read
    feed.failing.append(ReplyError("WRONGTYPE no"))
    follower.wake()
    assert await follower.next(within=0.01) == []


async def test_a_wait_ends_in_time_and_a_slow_read_too() -> None:
    feed = Feed()
    slow = asyncio.Event()

    async def never(*_args: Any, **_more: Any) -> list[Entry]:
        await slow.wait()
        return []

    follower = follow(feed)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await follower.next(within=0.05) == []
    feed.range = never  # type: ignore[method-assign]
    follower.wake()
    assert await follower.next(within=0.05) == []
    # its clock counts milliseconds
    assert loop.time() - began > 0.09
    follower.close()
    assert feed.left == [follower]


async def test_follower_reads_slow_page_once() -> None:
    feed = Feed(1)
    follower = await caught_up(feed, 1)
    there, given_up = asyncio.Event(), asyncio.Event()

    async def slowly(*_args: Any, **_more: Any) -> list[Entry]:
        feed.reads.append(("slowly", 0))
        try:
            await there.wait()
        except asyncio.CancelledError:
            given_up.set()
            raise
        return [entry(2), entry(3)]

    feed.range = slowly  # type: ignore[method-assign]
    follower.wake()
    for _ in range(3):
        assert await follower.next(within=0.02) == []
        assert follower.reading
    # nobody knows when Redis is back
    feed.link.trouble = "the connection was lost"
    assert not follower.reading
    feed.link.trouble = ""
    # what is told meanwhile comes behind it, once
    offer(follower, 2, 3, 4)
    there.set()
    assert numbers(await follower.next(within=5)) == [2, 3]
    assert not follower.reading
    assert numbers(await follower.next(within=5)) == [4]
    assert [read for read, _ in feed.reads].count("slowly") == 1
    # nobody waits for it any more
    there.clear()
    follower.wake()
    assert await follower.next(within=0.02) == []
    follower.close()
    await asyncio.wait_for(given_up.wait(), 5)


async def test_follower_reads_all_pages_before_joining() -> None:
    feed = Feed(*range(1, 101))
    follower = follow(feed)
    got: list[int] = []
    while len(got) < 100:
        got += numbers(await follower.next())
        assert not feed.joined
    assert got == list(range(1, 101))
    assert [count for _, count in feed.reads] == [16, 64, 256]


def test_pages_grow_while_they_are_full_and_small() -> None:
    small, large = [entry(n) for n in range(16)], [entry(n, 100_000) for n in range(16)]
    assert next_page(small, 16) == 64
    assert next_page(small[:5], 16) == 16
    assert next_page([entry(n) for n in range(512)], 512) == 512
    # also those that hold nothing
    assert next_page([("1-1", [])] * 16, 16) == 64
    # so many that they come to a quarter of a megabyte
    assert next_page(large, 16) == 2
    assert next_page([entry(1, 10_000_000)], 16) == 1
    assert size_of(large[0]) == 100_000
    assert entries(None) == []


def test_events_have_a_length_and_work_has_none() -> None:
    assert event_length("query.received") is None
    assert event_length("tool.request.probe") is None
    assert event_length("tool.result.probe") == event_length("agent.transition") == 10_000
    assert event_length("settings.update") == 1_000
