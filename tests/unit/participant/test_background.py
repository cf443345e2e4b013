"""Work beside a participant's own: no failure ends it, and none is unheard."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.virtual_time import run_virtually

from shared.errors import TransientError
from shared.participant.background import log_unhandled, run_supervised, supervised_tasks
from shared.telemetry import metrics
from shared.telemetry.logging import configure

ROOT = Path(__file__).parents[3]

# Files that create tasks themselves, with what handles their failures. Other files use `run_supervised`,
# `supervised_tasks` or a task group.
HEARD = {
    "services/cli/commands/ask.py": "the command waits for all of them",
    "services/cli/launch/child.py": "whoever runs the child waits for all of them",
    "services/cli/launch/run.py": "the command waits for it",
    "services/cli/launch/supervisor.py": "said at once",
    "services/cli/terminal.py": "the end of the block awaits the task and raises its failure",
    "services/demo_model/api.py": "the request waits for both",
    "services/gateway/http/gateway.py": "it waits for the client to go, and ends with the request",
    "services/gateway/openai/orphans.py": "whatever keeps it from its work is logged",
    "services/mcp/stdio.py": "whoever uses the program waits for all of them",
    "shared/bus/follow.py": "the next look at the stream is told",
    "shared/bus/reconnecting.py": "the connection goes on whatever happens",
    "shared/llm/preemption.py": "the call waits for both",
    "shared/participant/background.py": "this is it",
    "shared/participant/service.py": "the process waits for them",
    "shared/participant/tool_client.py": "the call is told",
    "shared/records/journal.py": "whoever sent entries confirms them",
}


@pytest.fixture
def meter() -> Iterator[metrics.Meter]:
    yield metrics.start("test")
    metrics.stop()


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    configure("info", "json", participant="test")
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    # as in tests/conftest.py: the tests after these say little
    configure("warning", "json")


class Work:
    """Fails as often as it is told, then goes on or returns."""

    def __init__(self, *failures: Exception, returns: bool = False) -> None:
        self.failures = list(failures)
        self.returns = returns
        self.begun = 0
        self.well = asyncio.Event()

    async def __call__(self) -> None:
        self.begun += 1
        if self.failures:
            raise self.failures.pop(0)
        self.well.set()
        if not self.returns:
            await asyncio.Event().wait()


async def test_work_that_fails_is_said_counted_and_begun_again(meter: metrics.Meter, log: Any) -> None:
    work = Work(KeyError("choices"), TransientError("Redis is away"), returns=True)
    await run_supervised("looking", work, first_pause=0.001)
    assert work.begun == 3
    failed, interrupted = log()
    assert failed["event"] == "background.failed"
    assert failed["work"] == "looking"
    assert "KeyError: 'choices'" in failed["exception"]
    assert interrupted["event"] == "background.interrupted"
    assert interrupted["reason"] == "Redis is away"
    assert "exception" not in interrupted
    assert b'local2_background_failures_total{work="looking"} 2.0' in meter.text()


async def test_the_pauses_become_longer(log: Any) -> None:
    await run_supervised("looking", Work(*(ValueError(n) for n in range(4)), returns=True), first_pause=0.001)
    assert [line["seconds"] for line in log()] == [0.001, 0.002, 0.004, 0.008]


def test_work_that_fails_often_waits_half_a_minute_at_most(log: Any) -> None:
    run_virtually(run_supervised("looking", Work(*(ValueError(n) for n in range(8)), returns=True)))
    assert [line["seconds"] for line in log()] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_work_that_went_well_for_long_pauses_briefly_again(log: Any) -> None:
    # seconds until each failure
    lasting = [1.0, 1.0, 31.0]

    async def work() -> None:
        if lasting:
            await asyncio.sleep(lasting.pop(0))
            raise ValueError

    run_virtually(run_supervised("looking", work))
    assert [line["seconds"] for line in log()] == [1, 2, 1]


async def test_a_cancelled_one_is_not_begun_again(log: Any) -> None:
    work = Work()
    task = asyncio.create_task(run_supervised("looking", work))
    await work.well.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.begun == 1
    assert log() == []


async def test_beside_a_block_work_goes_on_until_its_end() -> None:
    first, second = Work(RuntimeError("once")), Work()
    ended = asyncio.Event()

    async def tidy() -> None:
        try:
            await second()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async with supervised_tasks(first=first, second=tidy):
        await first.well.wait()
        await second.well.wait()
    assert ended.is_set()
    assert first.begun == 2


async def test_a_failure_that_nobody_waits_for_is_said_and_counted(meter: metrics.Meter, log: Any) -> None:
    log_unhandled(
        asyncio.get_running_loop(), {"message": "Task exception was never retrieved", "exception": ValueError("x")}
    )
    (line,) = log()
    assert line["event"] == "background.unhandled"
    assert "ValueError: x" in line["exception"]
    assert b'local2_background_failures_total{work="unhandled"} 1.0' in meter.text()


def own_tasks(source: str) -> list[str]:
    """Calls that make a task which no group waits for."""
    return [
        ast.unparse(call.func)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("create_task", "ensure_future")
        and ast.unparse(call.func.value).endswith(("asyncio", "loop", "loop()"))
    ]


def test_no_task_is_left_to_itself() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("services", "shared")
        for path in (ROOT / folder).rglob("*.py")
        if "testing" not in path.parts and own_tasks(path.read_text(encoding="utf-8"))
    }
    # a new one: use shared/participant/background.py or a task group, or say here who hears of its failure
    assert not found - set(HEARD)
