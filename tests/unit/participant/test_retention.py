"""What is due is removed, and nothing else: whatever the clocks do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from support.virtual_time import run_virtually

from shared.participant.retention import DAY_MS, Census, Kind, Retention, WatchedClock
from shared.telemetry.logging import configure

# A day in 2026, in ms.
_NOW = 1_780_000_000_000


class World:
    """A participant that keeps things by their times, on a bus whose clock is set at will."""

    def __init__(self, *times: int, days: int = 30, replicas: tuple[str, ...] = ("a",)) -> None:
        self.things = list(times)
        self.seconds = 0.0
        self.astray_ms = 0
        self.busy = 0
        self.looks = 0
        # what happens before each removal
        self.before: Callable[[], object] = lambda: None
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
        self.looks += 1

    async def _replicas(self) -> list[Any]:
        return self._there

    async def _answering(self) -> int:
        return self.busy

    async def _census(self, before: int) -> Census:
        return Census(len(self.things), min(self.things, default=None), sum(one < before for one in self.things))

    async def _remove(self, before: int) -> AsyncGenerator[int, None]:
        for one in [thing for thing in self.things if thing < before]:
            self.before()
            self.things.remove(one)
            yield 1


OLD, FRESH = _NOW - 31 * DAY_MS, _NOW - 29 * DAY_MS


async def test_what_is_older_than_its_days_goes_and_the_rest_stays() -> None:
    world = World(OLD, FRESH)
    await world.passes(20)
    assert world.things == [FRESH]


async def test_retention_logs_how_much_it_removed_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    try:
        world = World(OLD, OLD + 1, FRESH)
        await world.passes(12 * 60)
    finally:
        configure("warning", "json")
    (line,) = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = {name: line[name] for name in ("event", "kind", "days", "count")}
    assert told == {"event": "retention.removed", "kind": "things", "days": 30, "count": 2}


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


def test_retention_looks_at_the_clock_now_and_then() -> None:
    async def main() -> int:
        world = World()
        running = asyncio.create_task(world.retention.run())
        await asyncio.sleep(3_600)
        running.cancel()
        return world.looks

    assert 10 <= run_virtually(main()) <= 100


def test_retention_step_waits_while_an_answer_is_written() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World(OLD, OLD - 1, OLD - 2)
        world.busy = 1
        removed: list[float] = []
        world.before = lambda: removed.append(loop.time())
        looking = asyncio.create_task(world.passes(20))
        await asyncio.sleep(45)
        # half a minute for each step at most
        assert len(removed) == 2
        assert 29 <= removed[1] - removed[0] <= 31
        world.busy = 0
        await asyncio.sleep(5)
        assert looking.done()
        assert world.things == []

    run_virtually(main())


async def test_one_replica_of_several_does_it() -> None:
    first, second = World(OLD, replicas=("a", "b")), World(OLD, replicas=("0", "a"))
    for world in (first, second):
        await world.passes(20)
    assert (first.things, second.things) == ([], [OLD])


async def test_retention_stops_when_its_setting_changes() -> None:
    world = World(*range(1, 11))

    def change() -> None:
        if len(world.things) == 8:
            world.settings.keep_days_things = 0

    world.before = change
    await world.passes(20)
    assert len(world.things) == 7


async def test_retention_that_fails_tries_again_at_the_next_look() -> None:
    world = World(OLD)

    def fail() -> None:
        world.before = lambda: None
        raise ConnectionError("away")

    world.before = fail
    with pytest.raises(ConnectionError):
        await world.passes(20)
    assert world.things == [OLD]
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
