"""Many limits of time with one timer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from shared.participant.deadlines import TICK, Deadlines


async def test_what_was_not_taken_back_expires_once_at_its_time() -> None:
    loop = asyncio.get_running_loop()
    expired: list[tuple[str, float]] = []
    limits: Deadlines[str] = Deadlines(lambda thing: expired.append((thing, loop.time())))
    now = loop.time()
    limits.add("late", now + 0.3)
    limits.add("soon", now + 0.1)
    limits.add("past", now - 5)
    limits.add("gone", now + 0.1)
    limits.add("with it", now + 0.1)
    limits.drop("gone")
    # what is not there, or not there any more, is no error
    limits.drop("gone")
    limits.drop("never")
    assert list(limits) == ["late", "soon", "past", "with it"]
    async with asyncio.timeout(10):
        while len(expired) < 4:
            await asyncio.sleep(0.01)
    assert [thing for thing, _ in expired] == ["past", "soon", "with it", "late"]
    for thing, after in (("soon", 0.1), ("late", 0.3)):
        assert dict(expired)[thing] >= now + after
    # nothing is left, and no timer runs for it
    assert limits._timer is None
    limits.add("again", loop.time() + TICK)
    limits.drop("again")
    async with asyncio.timeout(10):
        while limits._timer is not None:
            await asyncio.sleep(0.01)
    assert len(expired) == 4


class Wheel:
    """A loop whose clock the test sets; `timers` are what it was asked to call, and after how long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, turn: Callable[[], None]) -> object:
        self.timers.append((seconds, turn))
        return turn

    def turns(self, now: float) -> None:
        """The one timer that there is runs out then."""
        ((seconds, turn),) = self.timers
        assert seconds == TICK
        self.timers.clear()
        self.now = now
        turn()


@pytest.mark.parametrize("at", [1.0, 1.001, 1.025, 1.049])
async def test_nothing_expires_early_nor_more_than_a_tick_late(at: float) -> None:
    expired: list[str] = []
    limits: Deadlines[str] = Deadlines(expired.append)
    wheel = limits._loop = Wheel()  # type: ignore[assignment]
    limits.add("thing", at)
    wheel.turns(at - 0.0001)
    assert expired == []
    wheel.turns(at + TICK + 0.0001)
    assert expired == ["thing"]


async def test_one_timer_serves_all_limits_and_runs_as_long_as_there_are_any() -> None:
    expired: list[str] = []
    limits: Deadlines[str] = Deadlines(expired.append)
    wheel = limits._loop = Wheel()  # type: ignore[assignment]
    for number in range(3):
        limits.add(f"at {number}", float(number))
        # the later one counts
        limits.add(f"beside {number}", 9.0)
        limits.add(f"beside {number}", float(number))
    limits.drop("beside 0")
    wheel.turns(1.5)
    assert expired == ["at 0", "at 1", "beside 1"]
    limits.drop("at 2")
    wheel.turns(1.6)
    limits.drop("beside 2")
    # nobody is left: it is the last turn
    wheel.turns(1.7)
    assert (expired, wheel.timers) == (["at 0", "at 1", "beside 1"], [])
    limits.add("again", 9.0)
    wheel.turns(9.5)
    assert (expired[3:], wheel.timers) == (["again"], [])


@pytest.mark.parametrize("endless", [False, True])
async def test_a_limit_that_expires_may_take_back_its_neighbour_or_set_itself_anew(endless: bool) -> None:
    expired: list[str] = []

    def expire(thing: str) -> None:
        expired.append(thing)
        limits.drop("second")
        if thing == "first":
            limits.add("first", math.inf if endless else 3.0)

    limits: Deadlines[str] = Deadlines(expire)
    wheel = limits._loop = Wheel()  # type: ignore[assignment]
    limits.add("first", 1.0)
    limits.add("second", 1.0)
    wheel.turns(1.1)
    assert (expired, list(limits)) == (["first"], ["first"])
    wheel.turns(3.1)
    assert (expired, list(limits)) == ((["first"], ["first"]) if endless else (["first", "first"], ["first"]))
