"""A clock of the bus that was set: calls of processes that have not read it since are run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.apps import ProbeSettings, probe
from support.services import running
from support.waiting import eventually

from shared.bus.clock import BusClock
from shared.contracts import TOOL_REQUEST
from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient

STREAM = TOOL_REQUEST.for_tool("probe")


@pytest.fixture
def probing(redis_url: str, tmp_path: Path) -> ProbeSettings:
    return ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=1.0, concurrency=1)


@pytest.mark.parametrize("hours", [-1, 1])
async def test_call_stamped_before_the_bus_clock_was_set_is_run(
    hours: int, probing: ProbeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks: list[BusClock] = []

    class Noted(BusClock):
        def __init__(self) -> None:
            super().__init__()
            clocks.append(self)

    monkeypatch.setattr("shared.bus.streams.BusClock", Noted)
    rarely = probing.model_copy(update={"heartbeat": 60})
    async with running(probe, probing), open_context("asker", rarely) as context:
        client = ToolClient(context)
        await eventually(client.schemas)
        right = context.bus.now_ms() - time.monotonic_ns() // 1_000_000
        for clock in clocks:
            clock.learn([b"%d" % (clock.now_ms() // 1_000 + hours * 3_600), b"0"], time.monotonic())

        def heard() -> bool:
            wrong = [abs(clock.now_ms() - time.monotonic_ns() // 1_000_000 - right) for clock in clocks]
            return len(wrong) == 2 and min(wrong) < 5_000

        # the worker has, at its next heartbeat; who asks has not
        await eventually(heard)

        async def offered() -> bool:
            # a sign of life by the wrong clock counted for nothing
            await context.registry.replicas(fresh=True)
            return await context.registry.served("probe") is not None

        await eventually(offered)
        caller = Caller("1-1", deadline=context.bus.now_ms() + 10_000)
        answer = await client.call("probe", {"text": "x"}, call_id="c", caller=caller, timeout=10, attempt=1)
    assert (answer.result, answer.error) == ("you said x", None)
