"""A participant's process: what it says, hears, reads and writes, and how it ends; without a server."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import orjson
import pytest
from structlog.contextvars import get_contextvars

from shared.bus import Bus, BusFull, Command, ConnectionLost, Delivery, ReplyError, Route
from shared.bus.keys import REPLICAS, inbox_key, replica_key, settings_key
from shared.contracts import QUERY_CANCEL, SETTINGS_UPDATE, Outgoing, QueryCancel, SettingsUpdate
from shared.envelope import Envelope, Message
from shared.errors import BusUnavailable, DecodeError, SettingsError
from shared.participant import service
from shared.participant.background import log_unhandled
from shared.participant.inbox import Inbox, inbox_bound
from shared.participant.registry import RELEASE, ReplicaInfo
from shared.participant.service import Context, Service, Subscription, Work, new_replica_name, receive, run_main
from shared.participant.settings import Settings
from shared.telemetry import logging as telemetry
from shared.telemetry import metrics


class Probing(Settings):
    runtime: ClassVar[frozenset[str]] = frozenset({"log_level", "greeting", "concurrency"})

    greeting: str = "hello"
    concurrency: int = 3


class On:
    """What a context asks of its bus."""

    def __init__(self, kept: Sequence[bytes] = ()) -> None:
        self.kept = list(kept)
        self.link = self.heartbeat_link = self
        self.sent: list[Command] = []

    def now_ms(self) -> int:
        return 77

    async def call(self, *command: Any) -> list[bytes]:
        assert command == ("HGETALL", settings_key("probe"))
        return self.kept

    async def pipe(self, commands: Sequence[Command]) -> list[int]:
        self.sent += commands
        return [1 for _ in commands]

    pipe_raw = pipe

    async def reset_exhausted_ids(self, stream: str) -> None:
        self.sent.append(("unblock", stream))

    async def learn_time(self) -> None:
        pass

    async def load_scripts(self) -> None:
        raise asyncio.CancelledError

    def publishing(self, message: Outgoing) -> tuple[Any, ...]:
        return ("PUBLISH", message)

    async def newest(self, stream: str) -> str:
        return f"newest of {stream}"


async def context(settings: Settings | None = None, bus: On | None = None) -> Context[Any]:
    start = Probing(heartbeat=2.0)
    return Context("probe", settings or start, cast(Bus, bus or On()), "r1", start)


class Heard:
    """An inbox that has been read up to an entry; `asked` is who asked for which of its entries."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.read = "7-5"
        self.asked: list[Any] = []

    def on(self, *what: Any) -> None:
        self.asked.append(what)


async def test_a_process_says_what_it_is_and_has_to_do_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "Inbox", Heard)
    bus = On()
    on = await context(bus=bus)
    inbox = on.inbox
    assert inbox == inbox_key("probe", "r1")
    on.tools = [{"name": "probe"}]
    on.facts["model"] = "m"
    on.state = "ready"
    told = ReplicaInfo("probe", "r1", "ready", on.started, 77, 0, 0, 0, on.tools, on.facts, RELEASE)
    await on.announce()
    assert bus.sent[0] == ("SET", replica_key("probe", "r1"), orjson.dumps(asdict(told)), "PX", 6_000)
    on.consumer = cast(Any, SimpleNamespace(held={"a": 1, "b": 2}, concurrency=3, handled=9))
    bus.sent.clear()
    await on.announce()
    assert orjson.loads(bus.sent[0][2]) == {**asdict(told), "in_flight": 2, "concurrency": 3, "handled": 9}
    bus.sent.clear()
    # one beat of its heart
    with pytest.raises(asyncio.CancelledError):
        await on.presence.run()
    assert bus.sent[-2:] == [("XTRIM", inbox, "MINID", "=", "7-6"), ("unblock", inbox)]
    bus.sent.clear()
    await on.presence.deregister()
    gone = [("DEL", replica_key("probe", "r1")), ("ZREM", REPLICAS), ("DEL", inbox)]
    assert [command[:2] for command in bus.sent] == gone


async def test_what_is_asked_for_of_the_inbox_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Heard] = []

    def inbox(stream: str) -> Heard:
        made.append(Heard(stream))
        return made[0]

    def notify(_entry_id: str, _fields: Any) -> None:
        pass

    monkeypatch.setattr(service, "Inbox", inbox)
    on = await context()
    on.on_inbox("note", notify)
    assert [one.asked for one in made] == [[("note", notify)]]


async def test_a_process_describes_its_settings_with_the_values_that_it_started_with() -> None:
    on = await context(Probing(heartbeat=2.0, greeting="changed", log_level="error"))
    try:
        described = orjson.loads(on.presence.described)
        assert set(described) == {"schema", "defaults"}
        assert set(described["schema"]["properties"]) == set(Probing.runtime)
        assert (described["defaults"]["greeting"], described["defaults"]["concurrency"]) == ("hello", 3)
        # what was changed earlier counts all the same, from the first line of its log on
        assert on.settings.greeting == "changed"
        assert telemetry.get_logger().get_effective_level() == logging.ERROR
    finally:
        telemetry.show_from("warning")


@pytest.mark.parametrize(
    ("kept", "values", "greeting", "told"),
    [
        ({}, {"greeting": "a"}, "a", 1),
        # of two changes at the same moment the kept one counts; what nobody has changed now stays
        ({"greeting": "kept", "concurrency": 9}, {"greeting": "a"}, "kept", 1),
        ({}, {"greeting": 5}, "hello", 0),
        ({}, {"heartbeat": 5.0}, "hello", 0),
    ],
)
async def test_a_change_of_settings_is_used_and_told_to_those_who_asked_for_it(
    kept: dict[str, Any], values: dict[str, Any], greeting: str, told: int
) -> None:
    on = await context(bus=On([part for name, value in kept.items() for part in (name.encode(), orjson.dumps(value))]))
    heard: list[str] = []

    async def changed(settings: Probing) -> None:
        heard.append(settings.greeting)

    on.on_settings(changed)
    on.on_settings(changed)
    for participant in ("another", "probe"):
        assert heard == []
        update = SettingsUpdate(participant=participant, values=values)
        await on._follow_settings(Message("1-0", Envelope("settings.update", b""), update))
    assert (on.settings.greeting, on.settings.concurrency) == (greeting, 3)
    assert heard == [greeting] * 2 * told


async def test_settings_of_earlier_days_count_one_by_one() -> None:
    kept = {"greeting": "kept", "concurrency": "many", "gone": 1, "log_level": "error"}
    bus = On([part for name, value in kept.items() for part in (name.encode(), orjson.dumps(value))])
    found = await service._stored_settings(cast(Bus, bus), "probe", Probing())
    assert (found.greeting, found.concurrency, found.log_level) == ("kept", 3, "error")


async def test_more_work_is_read_at_once_by_a_process_that_reads_already(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []

    async def add(routes: Any) -> None:
        added.append(routes)

    class Reading:
        def __init__(self, stream: str) -> None:
            self.stream = stream

        def route(self, of: Context[Any]) -> Route:
            assert of is on
            return routes[self.stream]

    async def handler(_delivery: Delivery) -> Sequence[Any]:
        return ()

    routes = {name: Route(handler) for name in ("local2:a", "local2:b", "local2:c")}
    on = await context()
    await on.serve([Reading("local2:a")])
    assert on.routes == {"local2:a": routes["local2:a"]}
    on.consumer = cast(Any, SimpleNamespace(add=add))
    await on.serve([])
    assert added == []
    await on.serve([Reading("local2:b"), Reading("local2:c")])
    assert added == [{"local2:b": routes["local2:b"], "local2:c": routes["local2:c"]}]
    assert on.routes == routes


async def test_an_announcement_that_a_full_redis_refuses_comes_with_a_later_heartbeat() -> None:
    on = await context()
    said: list[Exception | None] = []
    for error in (None, BusFull("out of memory"), BusUnavailable("away")):

        async def announce(error: Exception | None = error) -> None:
            said.append(error)
            if error:
                raise error

        on.presence = cast(Any, SimpleNamespace(announce=announce))
        if isinstance(error, BusUnavailable):
            with pytest.raises(BusUnavailable):
                await on.announce()
        else:
            await on.announce()
    assert len(said) == 3


async def test_what_is_observed_is_kept_up_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[str, float]] = []
    followed: list[Any] = []

    async def run_supervised(name: str, work: Callable[[], Awaitable[object]], *, first_pause: float) -> None:
        kept.append((name, first_pause))
        await work()

    async def observed(*what: Any) -> None:
        followed.append(what)

    async def handle(_message: Message[QueryCancel]) -> None:
        pass

    monkeypatch.setattr(service, "run_supervised", run_supervised)
    on = await context()
    monkeypatch.setattr(on, "_observe", observed)
    async with asyncio.TaskGroup() as on.background:
        on.observe(QUERY_CANCEL, handle)
        on.observe(QUERY_CANCEL, handle, after="5-0")
        on.supervise("other", lambda: observed("other"), first_pause=0.2)
        assert {task.get_name() for task in on.background._tasks} == {"observe query.cancel", "other"}
    assert kept == [("observe query.cancel", 1.0), ("observe query.cancel", 1.0), ("other", 0.2)]
    assert followed == [(QUERY_CANCEL, handle, None), (QUERY_CANCEL, handle, "5-0"), ("other",)]


@asynccontextmanager
async def parked() -> AsyncIterator[None]:
    yield


def delivery(**fields: str) -> Delivery:
    given = {"payload": '{"query_id":"9-1"}', **fields}
    flat = [word.encode() for pair in given.items() for word in pair]
    made = SimpleNamespace(entry_id="5-1", fields=flat, deliveries=2, suspended=parked)
    return cast(Delivery, made)


def test_a_delivery_is_received_as_what_it_says() -> None:
    message = receive(QUERY_CANCEL, delivery(session_id="s", traceparent="trace"))
    assert (message.entry_id, message.payload, message.deliveries) == ("5-1", QueryCancel(query_id="9-1"), 2)
    assert (message.envelope.subject, message.envelope.session_id) == ("query.cancel", "s")
    assert (message.envelope.traceparent, message.suspended) == ("trace", parked)
    with pytest.raises(DecodeError):
        receive(QUERY_CANCEL, delivery(payload="{"))


@pytest.mark.parametrize(("span", "passed_on"), [("", "trace"), ("span", "span")])
def test_what_a_traced_message_causes_is_caused_by_its_handling(
    span: str, passed_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "tracing", SimpleNamespace(active=lambda: True, current=lambda: span))
    assert receive(QUERY_CANCEL, delivery(traceparent="trace")).envelope.traceparent == passed_on


@pytest.mark.parametrize(("correlation", "query_id"), [("7-0", "7-0"), ("", "5-1")])
def test_whatever_is_logged_of_a_message_says_whose_it_is(correlation: str, query_id: str) -> None:
    fields = {"correlation_id": correlation, "session_id": "s", "respondent_id": "B"}
    assert receive(QUERY_CANCEL, delivery(**fields)).envelope.ids() == {
        "query_id": query_id, "session_id": "s", "respondent_id": "B",
    }  # fmt: skip


async def test_what_a_handler_says_is_published_with_the_acknowledgement_and_so_is_what_a_given_up_one_causes() -> None:
    said: list[Any] = []
    out = QUERY_CANCEL.of(QueryCancel(query_id="later"))

    async def handle(message: Message[QueryCancel]) -> Iterable[Outgoing]:
        said.append((message.payload.query_id, get_contextvars()["session_id"]))
        return [out, out]

    async def abandon(message: Message[QueryCancel], reason: str) -> Iterable[Outgoing]:
        said.append((message.payload.query_id, reason))
        return [out]

    on = await context()
    bare = Subscription(QUERY_CANCEL, handle, limit=4)
    assert bare.stream == QUERY_CANCEL.stream
    route = bare.route(on)
    assert route.limit == 4
    assert await route.handler(delivery(session_id="s")) == [("PUBLISH", out), ("PUBLISH", out)]
    assert route.on_dead_letter is not None
    assert await route.on_dead_letter(delivery(), "it killed three workers") == ()
    hook = Subscription(QUERY_CANCEL, handle, abandon).route(on).on_dead_letter
    assert hook is not None
    assert await hook(delivery(), "it killed three workers") == [("PUBLISH", out)]
    assert said == [("9-1", "s"), ("9-1", "it killed three workers")]


def test_a_replica_is_named_by_its_machine_and_process_and_never_twice() -> None:
    names = {new_replica_name() for _ in range(20)}
    assert len(names) == 20
    form = rf"{re.escape(socket.gethostname())}-{os.getpid()}-[0-9a-f]{{6}}"
    assert all(re.fullmatch(form, name) for name in names)


async def test_a_service_serves_what_it_builds_with_the_slots_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    opened = await context()
    changed: list[Callable[[Settings], Awaitable[None]]] = []

    @asynccontextmanager
    async def open_context(participant: str, settings: Settings) -> AsyncIterator[Context[Any]]:
        done.append(("open", participant, settings))
        yield opened
        done.append("close")

    @asynccontextmanager
    async def build(of: Context[Any]) -> AsyncIterator[list[Work]]:
        assert of is opened
        yield []
        done.append("torn down")

    class Reads:
        def __init__(self, *args: Any, **how: Any) -> None:
            assert args == (opened.bus, "probe", "r1", opened.routes)
            done.append(how)
            self.concurrency, self.held, self.handled = how["concurrency"], dict[str, int](), 0

        def resize(self, slots: int) -> None:
            done.append(("resize", slots))

        async def run(self, stop: asyncio.Event) -> None:
            assert cast(object, opened.consumer) is self
            done.append(("run", opened.state))
            stop.set()
            await asyncio.sleep(0)

    async def announce() -> None:
        done.append(("announce", opened.state))

    monkeypatch.setattr(service, "open_context", open_context)
    monkeypatch.setattr(service, "Consumer", Reads)
    monkeypatch.setattr(opened, "announce", announce)
    monkeypatch.setattr(opened, "on_settings", changed.append)
    started = Probing(heartbeat=1.5, max_deliveries=7, drain=2.5)
    app = Service("probe", Probing, build)
    assert (app.participant, app.settings_cls) == ("probe", Probing)
    await app.run(started, asyncio.Event())
    how = {"concurrency": 3, "heartbeat": 1.5, "max_deliveries": 7, "drain": 2.5}
    assert done == [
        ("open", "probe", started), how, ("announce", "ready"), ("run", "ready"), ("announce", "draining"),
        "torn down", "close",
    ]  # fmt: skip
    (resize,) = changed
    await resize(Probing(concurrency=8))
    assert done[-1] == ("resize", 8)


def test_a_service_is_run_under_its_name_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(service, "run_main", lambda *what: asked.append(what))
    app = Service("probe", Probing, cast(Any, None))
    app.main()
    assert asked == [(app.run, "probe", Probing)]


class Wrong(Probing):
    """Its settings cannot be loaded."""

    @classmethod
    def load(cls, participant: str, overrides: Any = None) -> Any:
        raise SettingsError(f"{participant} has none")


def test_a_participant_with_a_wrong_setting_ends_with_a_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(_settings: Probing, _stop: asyncio.Event) -> None:
        raise AssertionError("it runs")

    with pytest.raises(SystemExit) as ended:
        run_main(nothing, "probe", Wrong)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "local2: probe has none\n"


@pytest.mark.parametrize(("drain", "seconds"), [(60.0, 2.0), (0.5, 0.5)])
@pytest.mark.parametrize("sent", [True, False])
def test_a_participant_runs_with_its_settings_and_sends_its_last_spans_whatever_ends_it(
    drain: float, seconds: float, sent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[float] = []

    def stop(patience: float) -> bool:
        stopped.append(patience)
        return sent

    async def fails(settings: Probing, stop: asyncio.Event) -> None:
        assert (settings.drain, stop.is_set()) == (drain, False)
        raise ExceptionGroup("all", [SettingsError("one"), ExceptionGroup("more", [SettingsError("two")])])

    monkeypatch.setenv("LOCAL2_DRAIN", str(drain))
    monkeypatch.setattr(service, "tracing", SimpleNamespace(stop=stop))
    monkeypatch.setattr(service, "configure", lambda *how, **always: stopped.append((how, always)))  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        run_main(fails, "probe", Probing)
    assert ended.value.code == 2
    assert stopped == [(("info", "auto"), {"participant": "probe"}), seconds]
    told = capsys.readouterr().err.splitlines()
    assert told[-2:] == ["local2: one", "local2: two"]
    assert ("tracing.not_all_sent" in "".join(told)) is not sent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("late", [False, True])
async def test_a_signal_ends_a_participant_and_one_that_does_not_end_is_given_up(
    number: signal.Signals, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = asyncio.Event(), list[str]()
    monkeypatch.setattr(service, "_LEAVING_SECONDS", 0.0 if late else 600.0)

    async def run(_settings: Probing, stop: asyncio.Event) -> None:
        began.set()
        try:
            await (asyncio.Event().wait() if late else stop.wait())
            ended.append("by itself")
        except asyncio.CancelledError:
            ended.append("given up")
            raise

    running = asyncio.create_task(service._until_told(run, Probing(drain=0.01)))
    await began.wait()
    loop = asyncio.get_running_loop()
    try:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(60):
            await running
        assert ended == ["given up" if late else "by itself"]
        assert loop.get_exception_handler() is log_unhandled
    finally:
        loop.set_exception_handler(None)
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)


async def test_a_participant_that_ends_by_itself_is_not_waited_for_and_its_failure_is_raised() -> None:
    loop = asyncio.get_running_loop()

    async def run(_settings: Probing, _stop: asyncio.Event) -> None:
        raise ReplyError("NOPERM no")

    try:
        async with asyncio.timeout(60):
            with pytest.raises(ReplyError):
                await service._until_told(run, Probing(drain=0.01))
    finally:
        loop.set_exception_handler(None)
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)


async def test_an_open_process_is_what_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    bus = On([b"greeting", b'"kept"'])

    @asynccontextmanager
    async def observing(participant: str, replica: str, settings: Settings, text: Any) -> AsyncIterator[str | None]:
        done.append((participant, replica.startswith(socket.gethostname()), settings, text))
        yield addresses.pop(0)

    @asynccontextmanager
    async def opened(url: str, source: str, *, timeout: float, retention: int) -> AsyncIterator[On]:
        done.append((url, source.partition("/")[0], timeout, retention))
        yield bus

    @asynccontextmanager
    async def running(self: Context[Any], patient: bool, since: str) -> AsyncIterator[None]:
        done.append((patient, since))
        yield

    async def text() -> bytes:
        return b""

    monkeypatch.setattr(service, "observing", observing)
    monkeypatch.setattr(service, "Bus", opened)
    monkeypatch.setattr(Context, "_running", running)
    addresses = [None, "127.0.0.1:9"]
    settings = Probing(redis_url="redis://there", redis_timeout=0.7, retention=99)
    since = f"newest of {SETTINGS_UPDATE.stream}"
    async with service.open_context("probe", settings) as on:
        assert (on.tools, on.facts, on.settings.greeting, on.state) == ([], {}, "kept", "starting")
        assert on.replica.startswith(socket.gethostname())
        assert orjson.loads(on.presence.described)["defaults"]["greeting"] == "hello"
    assert done == [("probe", True, settings, None), ("redis://there", "probe", 0.7, 99), (True, since)]
    async with service.open_context("probe", settings, tools=[{"a": 1}], metrics=text, patient=False) as on:
        assert (on.tools, on.facts) == ([{"a": 1}], {"metrics": "127.0.0.1:9"})
    assert done[3:] == [("probe", True, settings, text), ("redis://there", "probe", 0.7, 99), (False, since)]


async def test_a_process_is_there_before_anything_else_and_gone_after_everything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    on = await context()

    async def forever(name: str) -> None:
        try:
            done.append(name)
            await asyncio.Event().wait()
        finally:
            done.append(f"no {name}")

    class There:
        async def register(self, *, patient: bool) -> None:
            done.append(("register", patient))

        async def run(self) -> None:
            await forever("beat")

        async def deregister(self) -> None:
            done.append("leave")

    class Office:
        def __init__(self, bus: Any, period: float) -> None:
            assert bus is on.bus
            self.period = period

        async def run(self) -> None:
            await forever(f"janitor {self.period}")

    async def ends(on: Context[Any]) -> None:
        async with asyncio.timeout(60), on._running(False, "5-0"):
            await asyncio.sleep(0)
            done.append("there")
            raise KeyError

    async def inbox(bus: Any) -> None:
        assert bus is on.bus
        await forever("inbox")

    monkeypatch.setattr(service, "Janitor", Office)
    on.presence = cast(Any, There())
    monkeypatch.setattr(on.tail, "run", lambda: forever("tail"))
    monkeypatch.setattr(on._inbox, "run", inbox)
    monkeypatch.setattr(on.registry, "run", lambda: forever("registry"))
    monkeypatch.setattr(on, "observe", lambda subject, hear, *, after: done.append((subject.name, hear, after)))
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await ends(on)
    parts = ["tail", "inbox", "registry", "beat", "janitor 10.0"]
    assert done[:2] == [("register", False), ("settings.update", on._follow_settings, "5-0")]
    assert sorted(done[2:7]) == sorted(parts)
    assert done[7] == "there"
    assert sorted(done[8:]) == sorted(["leave", *(f"no {part}" for part in parts)])


@pytest.mark.parametrize(
    ("size", "most"), [(0, None), (999, None), (1_000, 1_000), (32_000, 1_000), (64_000, 500), (40_000_000, 1)]
)
def test_large_answers_are_bounded_by_whoever_writes_them(size: int, most: int | None) -> None:
    """To so many bytes in all, and never to none."""
    assert inbox_bound(size) == (() if most is None else ("MAXLEN", "~", most))


LATE: Any = [b"100000000000000-0", []]


async def test_every_entry_of_an_inbox_goes_to_whoever_asked_for_its_type_and_the_others_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[str] = []
    given: list[Any] = []
    answers: list[Any] = [
        [[b"inbox", [[b"1-0", [b"type", b"started"]], [b"2-0", [b"number", b"7"]], [b"3-0", [b"type", b"other"]]]]],
        None,
        ConnectionLost("gone"),
        ReplyError("WRONGTYPE"),
        # what the last one stands in is put right by the heartbeat
        [
            [
                b"inbox",
                [
                    [b"4-0", [b"type", b"note", b"bad", b"1"]],
                    [b"5-0", [b"type", b"note", b"number", b"2"]],
                    [b"100000000000000-0", []],
                ],
            ]
        ],
    ]

    class Line:
        async def call(self, *command: Any, retry: bool, block: float) -> Any:
            assert command[:-1] == ("XREAD", "COUNT", 200, "BLOCK", 2_000, "STREAMS", "inbox")
            assert (retry, block) == (False, 2.0)
            given.append(command[-1])
            if not answers:
                raise asyncio.CancelledError
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    @asynccontextmanager
    async def dedicated(kind: str) -> AsyncIterator[Line]:
        given.append(kind)
        yield Line()

    async def sleep(seconds: float) -> None:
        given.append(seconds)

    def notify(entry_id: str, fields: Any) -> None:
        given.append((entry_id, fields[b"number"]))

    monkeypatch.setattr(metrics, "meter", lambda: SimpleNamespace(inbox_ignored=counted.append))
    monkeypatch.setattr("shared.telemetry.unread._said", {})
    monkeypatch.setattr("shared.participant.inbox.asyncio", SimpleNamespace(sleep=sleep))
    inbox = Inbox("inbox")
    inbox.on("note", notify)
    with pytest.raises(asyncio.CancelledError):
        await inbox.run(cast(Any, SimpleNamespace(dedicated=dedicated, block=2.0)))
    assert given == ["inbox", "0-0", "3-0", "3-0", "3-0", 2.0, "3-0", ("5-0", b"2"), 0.1, "5-0"]
    assert counted == ["unknown", "unknown", "malformed"]
    told = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(one.get("entry_id", ""), one.get("reason", "")[:6]) for one in told] == [
        ("2-0", "no han"),
        ("3-0", "no han"),
        ("", ""),
        ("4-0", ""),
    ]
