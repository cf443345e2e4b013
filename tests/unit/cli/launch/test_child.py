"""A supervised process: real ones, looked at by their ids."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.cli.launch.child import Backoff, Child, ChildSpec, described
from services.cli.launch.parent_death_pipe import ParentDeathPipe

FAST = Backoff(first=0.02, longest=0.08, good=60)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[ParentDeathPipe]:
    pipe = ParentDeathPipe(tmp_path, grace=1)
    yield pipe
    pipe.close()


def script(code: str, name: str = "child") -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-u", "-c", code], {"CHILD_VALUE": "handed on"})


async def until(fact: Callable[[], object], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not fact():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(child: Child, grace: float = 5.0) -> AsyncIterator[Child]:
    task = asyncio.create_task(child.run())
    try:
        yield child
    finally:
        await child.stop(grace)
        await task


async def test_lines_of_both_outputs_and_the_environment_are_passed_on(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    code = "import os, sys, time; print(os.environ['CHILD_VALUE']); print('err', file=sys.stderr); time.sleep(60)"
    async with running(Child(script(code), pipe, lines.append)):
        await until(lambda: len(lines) == 2)
    assert sorted(lines) == ["err", "handed on"]


async def test_a_dead_child_is_started_again_with_pauses_that_grow(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    ends: list[int] = []
    child = Child(script("raise SystemExit(3)"), pipe, lines.append, backoff=FAST, on_end=ends.append)
    async with running(child):
        await until(lambda: len(ends) >= 4)
    pauses = [line.rsplit(" in ", 1)[1] for line in lines if "starting again" in line]
    assert pauses[:4] == ["0.02 s", "0.04 s", "0.08 s", "0.08 s"]
    assert set(ends) == {3}
    assert child.failures >= 4


async def test_a_child_that_lived_long_enough_begins_with_the_shortest_pause_again(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    backoff = Backoff(first=0.02, longest=1, good=0.0)
    async with running(Child(script("pass"), pipe, lines.append, backoff=backoff)) as child:
        await until(lambda: child.starts >= 3)
    again = [line for line in lines if "starting again" in line]
    assert len(again) >= 2
    assert all("in 0.02 s" in line for line in again)


async def test_a_killed_child_comes_back_under_a_new_id(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    async with running(Child(script("import time; time.sleep(60)"), pipe, lines.append, backoff=FAST)) as child:
        await until(lambda: child.pid)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in (None, first))
        second = child.pid
    assert any("SIGKILL" in line for line in lines)
    assert second is not None
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    child = Child(script(code), pipe, lines.append)
    async with running(child, grace=0.2):
        await until(lambda: "deaf" in lines)
        pid = child.pid
        began = time.perf_counter()
    assert time.perf_counter() - began < 5
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert lines[-1] == "did not stop within 0.2 s; killed"


async def test_a_stop_during_the_pause_ends_it_at_once(pipe: ParentDeathPipe) -> None:
    ends: list[int] = []
    backoff = Backoff(first=60, longest=60)
    began = time.perf_counter()
    async with running(Child(script("pass"), pipe, print, backoff=backoff, on_end=ends.append)):
        await until(lambda: ends)
    assert time.perf_counter() - began < 10


async def test_a_program_that_is_not_there_is_reported_and_tried_again(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    child = Child(ChildSpec("x", ["/no/such/program"]), pipe, lines.append, backoff=FAST)
    async with running(child):
        await until(lambda: child.failures >= 2)
    assert lines[0].startswith("cannot be started: ")


async def test_a_line_without_end_does_not_stop_the_reading(pipe: ParentDeathPipe) -> None:
    lines: list[str] = []
    code = "import time; print('x' * 3_000_000); print('after'); time.sleep(60)"
    async with running(Child(script(code), pipe, lines.append)):
        await until(lambda: "after" in lines)
    assert any("left out" in line for line in lines)


def test_exit_statuses_are_named() -> None:
    assert [described(s) for s in (0, 2, -9, -15)] == ["status 0", "status 2", "signal SIGKILL", "signal SIGTERM"]
