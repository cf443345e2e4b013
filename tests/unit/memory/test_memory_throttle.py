"""Turns and rests while users are being answered, and none while nobody is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.memory.throttle import FEW, LONGEST, REST, Pace, answering
from shared.errors import BusUnavailable


class Day:
    """A clock that goes on when somebody sleeps or works; somebody is being answered or not."""

    def __init__(self, asking: bool = True) -> None:
        self.now = 100.0
        self.asking = asking
        self.pace = Pace(self.answering, lambda: self.now, self.sleep)

    async def answering(self) -> bool:
        return self.asking

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def work(self, seconds: float) -> float:
        """A turn that long; how long it had to wait."""
        asked = self.now
        _, began = await self.pace.turn(100)
        self.now += seconds
        await self.pace.done(began)
        return round(began - asked, 6)


async def test_while_nobody_is_answered_turns_are_whole_and_follow_each_other() -> None:
    day = Day(asking=False)
    assert (await day.pace.turn(100))[0] == 100
    assert [await day.work(0.02) for _ in range(3)] == [0, 0, 0]


async def test_while_users_are_answered_a_turn_is_small_and_followed_by_a_longer_rest() -> None:
    day = Day()
    assert [(await day.pace.turn(most))[0] for most in (100, 1)] == [FEW, 1]
    assert [await day.work(0.02), await day.work(0.04), await day.work(0)] == [0, 0.02 * REST, 0.04 * REST]


async def test_what_comes_after_the_rest_does_not_wait() -> None:
    day = Day()
    await day.work(0.02)
    day.now += 0.02 * REST
    assert await day.work(0.02) == 0


async def test_no_rest_is_longer_than_the_longest() -> None:
    day = Day()
    await day.work(60)
    assert await day.work(0) == LONGEST


async def test_turns_at_the_same_time_are_rested_for_one_after_the_other() -> None:
    day = Day()
    began = [(await day.pace.turn(100))[1] for _ in range(4)]
    day.now += 0.02
    for one in began:
        await day.pace.done(one)
    assert await day.work(0) == round(4 * 0.02 * REST, 6)


@dataclass
class Replica:
    participant: str
    in_flight: int


@dataclass
class Registry:
    found: list[Replica] = field(default_factory=list)
    away: bool = False

    async def replicas(self) -> list[Replica]:
        if self.away:
            raise BusUnavailable("gone")
        return self.found


@dataclass
class Process:
    registry: Registry


async def test_somebody_is_answered_while_a_generator_is_at_work() -> None:
    registry = Registry()
    process: Any = Process(registry)
    asked = answering(process)
    for found, expected in (
        ([], False),
        ([Replica("generator", 0), Replica("memory", 9)], False),
        ([Replica("generator", 0), Replica("generator", 1)], True),
        ([Replica("respondent-b", 2)], True),
    ):
        registry.found = found
        assert await asked() is expected
    registry.away = True
    assert await asked() is False
