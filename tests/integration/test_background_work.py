"""Where work goes on beside: what fails in it ends nothing and is heard."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apps import Probe, ProbeSettings
from support.services import announced, running
from support.waiting import eventually

from services.cli.launch.child import Child, ChildSpec
from services.cli.launch.log_view import LogView
from services.cli.launch.supervisor import Supervisor
from services.gateway.operations import bus_stream
from services.gateway.queries.sse import KEEP_ALIVE
from shared.bus import Bus
from shared.bus.keys import settings_key
from shared.contracts import QUERY_CANCEL, SETTINGS_UPDATE, QueryCancel, SettingsUpdate
from shared.participant.service import open_context
from shared.participant.tool import Run, ToolResult, tool_service
from shared.participant.tool_client import Caller, ToolClient
from shared.telemetry.logging import configure, get_logger
from shared.telemetry.meter import Meter


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    configure("warning", "json")
    yield
    configure("warning", "json")


def shown(level: str) -> bool:
    """Whether an event of this level is written."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        getattr(get_logger(), level)("probe.level")
    return "probe.level" in written.getvalue()


async def test_setting_changed_while_a_replica_starts_reaches_it(redis_url: str, raw: redis.Redis) -> None:
    """The change comes between reading the stored values and following the changes."""

    def change_after_read() -> None:
        with raw.monitor() as monitor:
            started.set()
            while monitor.next_command()["command"] != f"HGETALL {settings_key('probe')}":
                pass
        # as the gateway does
        raw.hset(settings_key("probe"), "concurrency", b"7")
        update = SETTINGS_UPDATE.of(SettingsUpdate(participant="probe", values={"concurrency": 7}))
        raw.xadd(SETTINGS_UPDATE.stream, {"payload": update.envelope.payload})

    started = threading.Event()
    changing = asyncio.create_task(asyncio.to_thread(change_after_read))
    await asyncio.to_thread(started.wait)
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, concurrency=3)
    async with open_context("probe", settings) as context:
        await changing
        await eventually(lambda: context.settings.concurrency == 7)


async def test_of_two_changes_at_the_same_time_the_one_that_is_kept_counts(redis_url: str, raw: redis.Redis) -> None:
    """Two gateways keep and tell a value each: in a cluster in two steps, between which the other one's may come."""
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, log_level="error")
    async with open_context("probe", settings) as context:
        # kept: first's, second's; told: second's, first's
        raw.hset(settings_key("probe"), "greeting", b'"second"')
        told = [{"greeting": "second"}, {"greeting": "first"}, {"concurrency": 7}]
        await context.bus.publish(
            *[SETTINGS_UPDATE.of(SettingsUpdate(participant="probe", values=values)) for values in told]
        )
        await eventually(lambda: context.settings.concurrency == 7)
        assert context.settings.greeting == "second"


async def test_a_setting_that_changes_while_tools_are_built_reaches_them(redis_url: str) -> None:
    """Building may take a while: the change comes in the middle of it."""
    building, go_on = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def slowly(settings: ProbeSettings) -> AsyncIterator[Run[Probe]]:
        building.set()
        await go_on.wait()

        async def run(_args: Probe) -> ToolResult:
            return ToolResult(settings.greeting)

        yield run

    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2)
    slow = tool_service("probe", Probe, ProbeSettings, slowly)
    async with open_context("asker", settings) as context, running(slow, settings):
        await building.wait()
        update = SettingsUpdate(participant="probe", values={"greeting": "new", "log_level": "error"})
        await context.bus.publish(SETTINGS_UPDATE.of(update))
        # it has arrived when what it says of the log counts
        await eventually(lambda: not shown("warning"))
        go_on.set()
        await announced(redis_url, "probe")
        client = ToolClient(context)

        async def greeted() -> bool:
            answer = await client.call(
                "probe", {"text": "x"}, call_id=uuid.uuid4().hex, caller=Caller("1-1"), timeout=5
            )
            return answer.result == "new"

        await eventually(greeted)


async def test_the_level_of_the_log_is_changed_while_it_runs_and_kept(redis_url: str, raw: redis.Redis) -> None:
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, log_level="info")
    raw.hset(settings_key("probe"), "log_level", b'"error"')
    async with open_context("probe", settings) as context:
        assert not shown("warning")
        # as the gateway does
        raw.hset(settings_key("probe"), "log_level", b'"debug"')
        update = SettingsUpdate(participant="probe", values={"log_level": "debug"})
        await context.bus.publish(SETTINGS_UPDATE.of(update))
        await eventually(lambda: shown("debug"))


async def test_an_entry_that_cannot_be_shown_ends_no_tap(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, failed = bus_stream.event, 0

    def failing_once(subject: str, entry: Any) -> bytes:
        nonlocal failed
        failed += 1
        if failed == 1:
            raise RuntimeError("a bug")
        return shown(subject, entry)

    monkeypatch.setattr(bus_stream, "event", failing_once)
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2)
    async with open_context("probe", settings) as context, Bus(redis_url, "t") as bus:
        await bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="before")))
        live = bus_stream.Tap(context.bus, [QUERY_CANCEL.name], last=0)
        async with aclosing(live.events(keepalive=60.0)) as chunks:
            # it says so when it has begun
            assert await anext(chunks) == KEEP_ALIVE
            coming = asyncio.ensure_future(anext(chunks))
            await bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="first")))
            await eventually(lambda: failed == 1)
            await bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="second")))
            assert b"second" in await coming


async def test_a_process_that_is_no_longer_supervised_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Child) -> None:
        self._ended.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Child, "run", broken)
    out = io.StringIO()
    async with Supervisor(LogView(out), tmp_path, grace=1) as stack:
        stack.start([ChildSpec("web_fetch", ["true"])])
        await eventually(lambda: "web_fetch is no longer supervised (RuntimeError('a bug'))" in out.getvalue())


def test_the_counter_is_declared() -> None:
    meter = Meter("test")
    meter.background_failed("tap")
    assert b'local2_background_failures_total{work="tap"} 1.0' in meter.text()
