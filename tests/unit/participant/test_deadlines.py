"""Many limits of time with one timer."""

from __future__ import annotations

import asyncio
import math

import pytest
from support.virtual_time import VirtualLoop, run_virtually

from shared.participant.deadlines import TICK, Deadlines


class Limits:
    """Limits with the times at which they expired."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.expired: list[tuple[str, float]] = []
        self.limits: Deadlines[str] = Deadlines(lambda thing: self.expired.append((thing, self.loop.time())))

    @property
    def things(self) -> list[str]:
        return [thing for thing, _ in self.expired]


def test_deadlines_expire_once_in_order_unless_dropped() -> None:
    async def main() -> None:
        on = Limits()
        for thing, at in (("late", 3.0), ("soon", 1.0), ("past", -5.0), ("gone", 1.0), ("beside", 9.0)):
            on.limits.add(thing, at)
        # the later limit of a thing counts
        on.limits.add("beside", 1.0)
        for thing in ("gone", "gone", "never"):
            on.limits.drop(thing)
        assert list(on.limits) == ["late", "soon", "past", "beside"]
        await asyncio.sleep(10)
        assert on.things == ["past", "soon", "beside", "late"]
        assert list(on.limits) == []
        on.limits.add("again", 20.0)
        await asyncio.sleep(20)
        assert on.things[4:] == ["again"]

    run_virtually(main())


@pytest.mark.parametrize("at", [1.0, 1.001, 1.025, 1.049])
def test_deadline_expires_at_most_one_tick_late(at: float) -> None:
    async def main() -> None:
        on = Limits()
        on.limits.add("thing", at)
        await asyncio.sleep(5)
        ((_, when),) = on.expired
        assert at <= when <= at + TICK + 0.001

    run_virtually(main())


def test_deadlines_need_no_timer_once_all_are_gone() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        limits: Deadlines[int] = Deadlines(lambda _thing: None)
        for number in range(1_000):
            limits.add(number, 1.0)
        before = loop.waits
        await asyncio.sleep(2)
        # one timer for all of them
        assert loop.waits - before < 2.5 / TICK
        before = loop.waits
        await asyncio.sleep(3_600)
        assert loop.waits == before + 1

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.mark.parametrize("endless", [False, True])
def test_deadline_may_drop_another_or_set_itself_anew(endless: bool) -> None:
    async def main() -> None:
        expired: list[str] = []

        def expire(thing: str) -> None:
            expired.append(thing)
            limits.drop("second")
            if len(expired) == 1:
                limits.add("first", math.inf if endless else 3.0)

        limits: Deadlines[str] = Deadlines(expire)
        limits.add("first", 1.0)
        limits.add("second", 1.0)
        await asyncio.sleep(2)
        assert (expired, list(limits)) == (["first"], ["first"])
        await asyncio.sleep(5)
        assert expired == ["first"] * (1 if endless else 2)
        assert list(limits) == ["first"] * endless

    run_virtually(main())
