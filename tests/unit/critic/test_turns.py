"""Whose turn it is at the judge, and who is left out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.critic.settings import CriticSettings
from services.critic.turns import Turns


class Line:
    """Answers that wait, each with the number of its question; the judge is ready when it is told so."""

    def __init__(self, **values: Any) -> None:
        self.settings = CriticSettings(**values)
        self.ready = asyncio.Event()
        self.now = 0
        self.turns = Turns(lambda: self.settings, self.ready.wait, lambda: self.now)
        self.judged: list[str] = []
        self.left: list[tuple[str, str]] = []
        self.suspended = 0
        self.tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def park(self) -> AsyncIterator[None]:
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    async def _go(
        self, name: str, asked: int, came: tuple[int, int], size: int, first: bool, done: asyncio.Event | None
    ) -> None:
        async with self.turns.turn((asked, 0), came, size, None if first else self.park) as left:
            if left is not None:
                self.left.append((name, left))
                return
            self.judged.append(name)
            if done is not None:
                await done.wait()

    async def comes(
        self, name: str, asked: int, came: int | None = None, *, number: int = 0, size: int = 1, first: bool = False,
        done: asyncio.Event | None = None,
    ) -> None:  # fmt: skip
        self.begins(name, asked, came, number=number, size=size, first=first, done=done)
        await settle()

    def begins(
        self, name: str, asked: int, came: int | None = None, *, number: int = 0, size: int = 1, first: bool = False,
        done: asyncio.Event | None = None,
    ) -> None:  # fmt: skip
        going = self._go(name, asked, (asked if came is None else came, number), size, first, done)
        self.tasks[name] = asyncio.create_task(going)

    async def over(self) -> None:
        self.ready.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def line(**values: Any) -> AsyncIterator[Line]:
    one = Line(**values)
    calling = asyncio.create_task(one.turns.run())
    try:
        yield one
    finally:
        calling.cancel()
        await asyncio.gather(calling, *one.tasks.values(), return_exceptions=True)


async def test_the_newest_question_is_next_whenever_its_answers_came() -> None:
    async with line() as at:
        for name, asked, came in (("old A", 1, 2), ("new A", 5, 6), ("old B", 1, 9), ("new B", 5, 10), ("odd", 99, 4)):
            await at.comes(name, asked, came)
        assert at.suspended == at.turns.waiting == 5
        await at.over()
    # an id that is not of the time at which it came counts for no more than that
    assert at.judged == ["new A", "new B", "odd", "old A", "old B"]
    assert (at.suspended, at.turns.waiting, at.left) == (0, 0, [])


async def test_of_two_answers_to_one_question_in_one_millisecond_the_first_comes_first() -> None:
    async with line() as at:
        await at.comes("B", 5, 6, number=1)
        await at.comes("A", 5, 6, number=0)
        await at.comes("C", 5, 6, number=2)
        await at.over()
    assert at.judged == ["A", "B", "C"]


async def test_who_is_next_is_said_when_the_judge_may_begin() -> None:
    async with line() as at:
        await at.comes("first", 1)
        await at.comes("later", 2)
        await at.over()
    assert at.judged == ["later", "first"]


async def test_no_more_are_at_the_judge_than_it_takes_and_more_when_that_is_raised() -> None:
    async with line(concurrency=2) as at:
        done = asyncio.Event()
        at.ready.set()
        for number in range(5):
            await at.comes(str(number), number, done=done)
        assert at.judged == ["0", "1"]
        at.settings = CriticSettings(concurrency=3)
        at.turns.expire()
        await settle()
        assert at.judged == ["0", "1", "4"]
        done.set()
        await at.over()
    assert at.judged == ["0", "1", "4", "3", "2"]


async def test_what_is_left_out_makes_no_room_at_the_judge() -> None:
    async with line(concurrency=1, judge_within=10) as at:
        at.ready.set()
        done = asyncio.Event()
        await at.comes("first", 1, done=done)
        at.now = 20_000
        await at.comes("late", 2, done=done)
        await at.comes("next", 20_000, done=done)
        assert (at.judged, at.left) == (["first"], [("late", "age")])
        done.set()
        await at.over()
    assert at.judged == ["first", "next"]


async def test_each_that_leaves_the_judge_makes_room_for_one() -> None:
    async with line(concurrency=2) as at:
        at.ready.set()
        done = {name: asyncio.Event() for name in "abcdef"}
        for number, name in enumerate(done):
            await at.comes(name, number, done=done[name])
        assert at.judged == ["a", "b"]
        for name in "afb":
            done[name].set()
            await settle()
        assert at.judged == ["a", "b", "f", "e", "d"]
        for event in done.values():
            event.set()
        await at.over()
    assert at.judged == ["a", "b", "f", "e", "d", "c"]


async def test_the_oldest_are_left_out_by_who_has_more_than_its_part_of_what_may_wait() -> None:
    async with line(leave_ungraded_above=4) as at:
        for number in (3, 1, 2, 4, 5):
            await at.comes(str(number), number)
        assert at.left == [("1", "backlog")]
        # the other one has none yet
        at.turns.shared(2, 4)
        await at.comes("6", 6)
        assert at.left[1:] == [("2", "backlog")]
        at.turns.shared(2, 5)
        await at.comes("7", 7)
        assert at.left[2:] == [("3", "backlog"), ("4", "backlog")]
        # it has more than its part, and leaves out by itself
        at.turns.shared(2, 12)
        await at.comes("8", 8)
        await at.over()
    assert at.left[4:] == [("5", "backlog"), ("6", "backlog")]
    assert at.judged == ["8", "7"]
    async with line(leave_ungraded_above=None) as at:
        for number in range(50):
            await at.comes(str(number), number)
        await at.over()
    assert (len(at.judged), at.left) == (50, [])


async def test_what_more_replicas_hold_than_is_known_makes_no_room() -> None:
    async with line(leave_ungraded_above=4) as at:
        for number in range(4):
            await at.comes(str(number), number)
        # counted before these came
        at.turns.shared(2, 0)
        await at.comes("4", 4)
        assert at.left == [("0", "backlog")]
        # not even this one is told yet
        at.turns.shared(0, 9)
        assert at.turns.limit() is None
        await at.over()
    assert at.judged == ["4", "3", "2", "1"]


async def test_what_waits_too_long_is_left_out_when_it_comes_and_while_it_waits() -> None:
    async with line(judge_within=10) as at:
        at.now = 20_000
        await at.comes("late", 9_999)
        await at.comes("just", 10_000)
        assert at.left == [("late", "age")]
        at.turns.expire()
        await settle()
        assert at.left == [("late", "age")]
        await at.comes("in time", 10_001)
        at.now = 20_001
        at.turns.expire()
        assert at.turns.waiting == 1
        await at.over()
    assert (at.judged, at.left) == (["in time"], [("late", "age"), ("just", "age")])
    async with line(judge_within=None) as at:
        at.now = 10**15
        await at.comes("whenever", 1)
        at.turns.expire()
        await at.over()
    assert (at.judged, at.left) == (["whenever"], [])


async def test_what_was_tried_before_is_next_and_keeps_its_slot() -> None:
    async with line() as at:
        await at.comes("new", 9)
        await at.comes("tried", 1, first=True)
        assert at.suspended == 1
        await at.over()
    assert at.judged == ["tried", "new"]


@pytest.mark.parametrize("called", [False, True])
async def test_who_goes_away_leaves_the_place_to_the_next(called: bool) -> None:
    async with line() as at:
        done = asyncio.Event()
        if called:
            at.ready.set()
        await at.comes("gone", 2, done=done)
        assert at.judged == (["gone"] if called else [])
        await at.comes("next", 1)
        at.tasks["gone"].cancel()
        await settle()
        assert (at.turns.waiting, at.judged) == ((0, ["gone", "next"]) if called else (1, []))
        await at.over()
    assert at.judged == (["gone", "next"] if called else ["next"])
    assert at.turns.waiting == 0


async def test_who_goes_away_in_the_moment_of_being_called_leaves_the_place_too() -> None:
    async with line() as at:
        await at.comes("gone", 2)
        await at.comes("next", 1)
        at.ready.set()
        # called, but not yet on its way
        while at.turns.waiting == 2:
            await asyncio.sleep(0)
        at.tasks["gone"].cancel()
        await at.over()
    assert at.judged == ["next"]


async def test_who_goes_away_while_nobody_else_waits_keeps_nobody_from_the_judge() -> None:
    async with line() as at:
        await at.comes("gone", 1)
        at.tasks["gone"].cancel()
        await settle()
        at.ready.set()
        await at.comes("next", 1)
        await at.over()
    assert at.judged == ["next"]


@pytest.mark.parametrize("called", [False, True])
async def test_who_goes_away_in_the_moment_of_being_told_gives_no_place_that_it_never_had(called: bool) -> None:
    async with line(leave_ungraded_above=2, concurrency=1) as at:
        done = asyncio.Event()
        await at.comes("gone", 5 if called else 1, done=done)
        await at.comes("other", 2, done=done)
        if called:
            # next in line, it has gone when it would be called
            at.ready.set()
        else:
            # it is told that it is left out
            at.begins("more", 3, done=done)
            await asyncio.sleep(0)
        at.tasks["gone"].cancel()
        at.ready.set()
        await settle()
        await at.comes("last", 4, done=done)
        assert at.judged == ["other" if called else "more"]
        done.set()
        await at.over()
    assert at.left == []


async def test_a_replica_holds_its_part_and_reads_no_more_than_its_memory_bears() -> None:
    async with line() as at:
        assert at.turns.limit() is None
        at.turns.shared(3, 301)
        assert at.turns.limit() == 101 + 64
        at.turns.shared(1, 301)
        await at.comes("large", 1, size=34_000_000)
        await at.comes("larger", 2, size=30_000_000)
        assert at.turns.limit() is None
        await at.comes("too large", 3, size=1)
        assert at.turns.limit() == 3
        await at.over()
        assert at.turns.limit() is None
