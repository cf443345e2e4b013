"""What is due is removed, and nothing else: whatever the clocks do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.participant import retention
from shared.participant.retention import _LOOK_SECONDS, DAY_MS, Census, Kind, Retention, WatchedClock

# A day in 2026, in ms.
_NOW = 1_780_000_000_000


class World:
    """A participant that keeps things by their times, on a bus whose clock is set at will."""

    def __init__(self, *times: int, days: int = 30, replicas: tuple[str, ...] = ("a",)) -> None:
        self.things = list(times)
        self.seconds = 0.0
        self.astray_ms = 0
        self.busy = 0
        self.settings = SimpleNamespace(keep_days_things=days)
        bus = SimpleNamespace(learn_time=self._told, now_ms=lambda: self.now)
        registry = SimpleNamespace(replicas=self._replicas)
        self._there = [SimpleNamespace(participant="keeper", replica=one) for one in replicas]
        # of another participant, which keeps other things
        self._there.append(SimpleNamespace(participant="another", replica="0"))
        context = SimpleNamespace(participant="keeper", replica="a", settings=self.settings, bus=bus, registry=registry)
        kind = Kind("things", "keep_days_things", self._census, self._remove)
        self.retention = Retention(cast(Any, context), [kind], self._answering, WatchedClock(lambda: self.seconds))

    @property
    def now(self) -> int:
        return _NOW + int(self.seconds * 1000) + self.astray_ms

    async def passes(self, minutes: int) -> None:
        """So many minutes, with a look in each."""
        for _ in range(minutes):
            self.seconds += 60
            await self.retention.look()

    async def _told(self) -> None:
        pass

    async def _replicas(self) -> list[Any]:
        return self._there

    async def _answering(self) -> int:
        return self.busy

    async def _census(self, before: int) -> Census:
        return Census(len(self.things), min(self.things, default=None), sum(one < before for one in self.things))

    async def _remove(self, before: int) -> AsyncGenerator[int, None]:
        for one in [thing for thing in self.things if thing < before]:
            self.things.remove(one)
            yield 1


OLD, FRESH = _NOW - 31 * DAY_MS, _NOW - 29 * DAY_MS


async def test_what_is_older_than_its_days_goes_and_the_rest_stays() -> None:
    world = World(OLD, FRESH)
    await world.passes(20)
    assert world.things == [FRESH]


async def test_how_much_was_removed_is_told_once_and_nothing_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(retention, "log", SimpleNamespace(info=lambda event, **what: told.append({event: what})))
    world = World(OLD, OLD + 1, FRESH)
    await world.passes(12 * 60)
    assert told == [{"retention.removed": {"kind": "things", "days": 30, "count": 2}}]


async def test_without_days_nothing_is_ever_removed() -> None:
    world = World(1, OLD, FRESH, days=0)
    await world.passes(10 * 24 * 60)
    assert world.things == [1, OLD, FRESH]


@pytest.mark.parametrize("wrong_minutes", [1, 5, 9])
async def test_a_clock_that_is_put_forward_and_back_makes_nothing_due(wrong_minutes: int) -> None:
    world = World(FRESH)
    await world.passes(60)
    for _ in range(20):
        world.astray_ms = 365 * DAY_MS
        await world.passes(wrong_minutes)
        world.astray_ms = -365 * DAY_MS
        await world.passes(wrong_minutes)
        world.astray_ms = 0
        await world.passes(3)
    assert world.things == [FRESH]
    await world.passes(2 * 24 * 60)
    assert world.things == []


async def test_a_machine_that_starts_with_a_wrong_clock_removes_nothing_until_it_is_right() -> None:
    world = World(FRESH)
    world.astray_ms = 365 * DAY_MS
    await world.passes(8)
    world.astray_ms = 0
    await world.passes(30)
    assert world.things == [FRESH]


async def test_a_clock_that_is_slowly_corrected_is_believed() -> None:
    world = World(OLD)
    for _ in range(15):
        world.astray_ms += 30
        await world.passes(1)
    assert world.things == []


async def test_what_becomes_due_goes_at_the_next_round_some_hours_later() -> None:
    world = World(OLD)
    await world.passes(20)
    world.things.append(OLD)
    # the first was ten minutes after the first look
    await world.passes(6 * 60 - 10)
    assert world.things == [OLD]
    await world.passes(1)
    assert world.things == []


async def test_a_clock_that_was_put_right_is_asked_again_without_waiting_for_the_round() -> None:
    world = World(OLD)
    await world.passes(20)
    world.things.append(OLD)
    world.astray_ms = 2 * 60_000
    await world.passes(9)
    assert world.things == [OLD]
    await world.passes(2)
    assert world.things == []


async def test_the_clock_is_looked_at_now_and_then_and_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []

    async def look() -> None:
        said.append("look")

    async def sleep(seconds: float) -> None:
        said.append(seconds)
        if len(said) == 4:
            raise asyncio.CancelledError

    keeper = World().retention
    monkeypatch.setattr(keeper, "look", look)
    monkeypatch.setattr("shared.participant.retention.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await keeper.run()
    assert said == ["look", _LOOK_SECONDS] * 2


async def test_while_somebody_is_answered_each_step_waits_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(OLD, OLD - 1, OLD - 2)
    world.busy = 1
    waited: list[tuple[float, int]] = []
    clock = SimpleNamespace(monotonic=lambda: sum(seconds for seconds, _ in waited))

    async def sleep(seconds: float) -> None:
        waited.append((seconds, len(world.things)))
        if not world.things:
            world.busy = 0

    monkeypatch.setattr(retention, "time", clock)
    monkeypatch.setattr(retention, "asyncio", SimpleNamespace(sleep=sleep))
    await world.passes(20)
    left = [things for _, things in waited]
    # half a minute for each at most, and no longer than somebody waits
    assert sum(seconds for seconds, things in waited if things == 2) == 30.0
    assert (left.count(1), left.count(0)) == (left.count(2), 1)
    assert world.things == []


async def test_one_replica_of_several_does_it() -> None:
    first, second = World(OLD, replicas=("a", "b")), World(OLD, replicas=("0", "a"))
    for world in (first, second):
        await world.passes(20)
    assert (first.things, second.things) == ([], [OLD])


async def test_who_thinks_better_of_it_stops_what_has_begun() -> None:
    world = World(*range(1, 11))

    async def then(before: int) -> AsyncGenerator[int, None]:
        async for removed in world._remove(before):
            if len(world.things) == 7:
                world.settings.keep_days_things = 0
            yield removed

    world.retention._kinds = [Kind("things", "keep_days_things", world._census, then)]
    await world.passes(20)
    assert len(world.things) == 7


async def test_what_fails_is_tried_again_at_the_next_look() -> None:
    world = World(OLD)

    async def failing(_before: int) -> AsyncGenerator[int, None]:
        raise ConnectionError("away")
        yield 0

    whole = world.retention._kinds
    world.retention._kinds = [Kind("things", "keep_days_things", world._census, failing)]
    with pytest.raises(ConnectionError):
        await world.passes(20)
    world.retention._kinds = whole
    await world.passes(1)
    assert world.things == []


async def test_what_would_go_is_shown_and_stays() -> None:
    world = World(OLD, FRESH, days=0)
    (kind,) = await world.retention.shown()
    assert kind == {
        "kind": "things",
        "participant": "keeper",
        "setting": "keep_days_things",
        "keep_days": 0,
        "kept": 2,
        "oldest": OLD,
        "due": 0,
    }
    for days, due in ((30, 1), (28, 2), (32, 0)):
        (kind,) = await world.retention.shown(days)
        assert (kind["keep_days"], kind["due"]) == (0, due)
    world.settings.keep_days_things = 30
    assert [(kind["keep_days"], kind["due"]) for kind in await world.retention.shown()] == [(30, 1)]
    assert [(kind["keep_days"], kind["due"]) for kind in await world.retention.shown(0)] == [(30, 0)]
    assert world.things == [OLD, FRESH]
