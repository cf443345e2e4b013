"""Where work goes on beside: what fails in it ends nothing and is heard."""

from __future__ import annotations

import asyncio
import contextlib
import io
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apps import Probe, ProbeSettings, probe
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
from shared.envelope import Message
from shared.errors import BusUnavailable
from shared.participant import background, service
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


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun again without a long pause."""
    monkeypatch.setattr(background.run_supervised, "__kwdefaults__", {"first_pause": 0.01})


async def test_an_observer_whose_start_fails_begins_again(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may be away in the moment in which the newest entry is asked for."""
    heard: list[str] = []

    async def note(message: Message[QueryCancel]) -> None:
        heard.append(message.payload.query_id)

    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2)
    async with open_context("probe", settings) as context:
        newest, asked = context.bus.newest, 0

        async def away_at_first(stream: str) -> str:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise BusUnavailable("not now")
            return await newest(stream)

        monkeypatch.setattr(context.bus, "newest", away_at_first)
        context.observe(QUERY_CANCEL, note)
        await eventually(lambda: asked == 2)
        await eventually(lambda: QUERY_CANCEL.stream in context.tail._followers)
        await context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="q1")))
        await eventually(lambda: heard == ["q1"])


async def test_a_setting_that_changes_while_a_replica_starts_reaches_it(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading what was kept and listening for changes."""
    read = service._stored_settings

    async def changed_right_after(bus: Bus, participant: str, settings: Any) -> Any:
        found = await read(bus, participant, settings)
        # as the gateway does
        raw.hset(settings_key(participant), "concurrency", b"7")
        await bus.publish(SETTINGS_UPDATE.of(SettingsUpdate(participant=participant, values={"concurrency": 7})))
        return found

    monkeypatch.setattr(service, "_stored_settings", changed_right_after)
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, concurrency=3)
    async with open_context("probe", settings) as context:
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


async def test_a_call_whose_look_for_the_result_fails_is_told(
    redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, effects_url=redis_url)

    async def broken(self: ToolClient, call: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ToolClient, "_look", broken)
    async with running(probe, settings):
        await announced(redis_url, "probe")
        async with open_context("asker", settings) as context:
            client = ToolClient(context)
            await eventually(client.schemas)
            args = {"text": "x", "seconds": 30.0}
            with pytest.raises(RuntimeError, match="a bug"):
                await client.call("probe", args, call_id="c1", caller=Caller("1-0"), timeout=0.2)
            await context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="1-0")))


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


async def test_a_failure_that_nobody_waits_for_reaches_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from shared.participant.service import _until_told

    async def run(_settings: Any, stop: asyncio.Event) -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        stop.set()

    loop = asyncio.get_running_loop()
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await _until_told(run, ProbeSettings(redis_url="redis://unused"))
    finally:
        loop.set_exception_handler(None)
    assert "background.unhandled" in capfd.readouterr().err


def test_the_counter_is_declared() -> None:
    meter = Meter("test")
    meter.background_failed("tap")
    assert b'local2_background_failures_total{work="tap"} 1.0' in meter.text()
