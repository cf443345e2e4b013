"""The run loop of every participant: settings, bus, heartbeats, signals, staged shutdown.

`Context` is what a running process has; `Service` reads work streams with it. A gateway uses the context alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import orjson

from shared.bus import Bus, BusFull, Command, Consumer, Delivery, Limit, ReplyError, Route, StreamTailer
from shared.bus.keys import inbox_key, settings_key
from shared.contracts import SETTINGS_UPDATE, AnyPayload, Outgoing, Subject
from shared.envelope import Envelope, Message, now_ms
from shared.errors import BusUnavailable, DecodeError, SettingsError
from shared.participant.background import FIRST_PAUSE, Job, log_unhandled, run_supervised
from shared.participant.inbox import Inbox, Notify
from shared.participant.janitor import Janitor
from shared.participant.observing import observing, watched
from shared.participant.presence import Presence
from shared.participant.registry import RELEASE, Registry, ReplicaInfo
from shared.participant.settings import Settings, stored_values
from shared.telemetry import tracing
from shared.telemetry.logging import bind_ids, configure, get_logger, show_from
from shared.telemetry.metrics_listener import Text

log = get_logger()

S = TypeVar("S", bound=Settings)
T = TypeVar("T", bound=AnyPayload)
_JANITOR_HEARTBEATS = 5
# For handing over and saying good-bye, after `drain`.
LEAVING_SECONDS = 4.0
# For the last spans, after that.
_FLUSH_SECONDS = 2.0


class Context(Generic[S]):
    """A running process on the bus.

    settings: the current ones; replaced when an operator changes them.
    inbox: the stream to which answers for this replica are written.
    facts: what this replica says of itself in the registry.
    tools: the schemas of the tools that it serves.
    """

    def __init__(self, participant: str, settings: S, bus: Bus, replica: str, start_settings: S) -> None:
        self.participant = participant
        self.replica = replica
        self.settings = start_settings
        self._use(settings)
        self.bus = bus
        self.inbox = inbox_key(participant, replica)
        self._inbox = Inbox(self.inbox)
        self.tail = StreamTailer(bus)
        self.registry = Registry(bus, settings.heartbeat)
        self.facts: dict[str, Any] = {}
        self.tools: list[dict[str, Any]] = []
        self.state = "starting"
        self.started = now_ms()
        self.consumer: Consumer | None = None
        self.routes: dict[str, Route] = {}
        self.background: asyncio.TaskGroup
        described = {"schema": type(settings).get_settings_schema(), "defaults": start_settings.runtime_values()}
        self.presence = Presence(
            bus,
            participant,
            replica,
            self.inbox,
            lambda: self._inbox.read,
            self._told,
            orjson.dumps(described),
            settings.heartbeat,
        )
        self._on_settings: list[Callable[[S], Awaitable[None]]] = []

    def on_inbox(self, kind: str, notify: Notify) -> None:
        """Entries of this replica's inbox whose `type` is `kind` go to `notify`."""
        self._inbox.on(kind, notify)

    def on_settings(self, changed: Callable[[S], Awaitable[None]]) -> None:
        """Called after a run-time update has been applied to `settings`."""
        self._on_settings.append(changed)

    def observe(
        self, subject: Subject[T], handle: Callable[[Message[T]], Awaitable[None]], *, after: str | None = None
    ) -> None:
        """Follows an event stream from now on, or from just after an id, in this replica alone."""
        self.supervise(f"observe {subject.name}", lambda: self._observe(subject, handle, after))

    def supervise(self, name: str, work: Job, *, first_pause: float = FIRST_PAUSE) -> None:
        """Run work in the background as long as this process is on the bus (see `background.run_supervised`)."""
        self.background.create_task(run_supervised(name, work, first_pause=first_pause), name=name)

    async def _observe(
        self, subject: Subject[T], handle: Callable[[Message[T]], Awaitable[None]], after: str | None
    ) -> None:
        follower = self.tail.follow(subject.stream, after or await self.bus.newest(subject.stream))
        while True:
            for entry_id, fields in await follower.next():
                try:
                    envelope = Envelope.parse(subject.name, entry_id, fields)
                    message = Message(entry_id, envelope, subject.decode(envelope))
                    await handle(message)
                except DecodeError as exc:
                    log.warning("event.malformed", subject=subject.name, entry_id=entry_id, reason=str(exc))
                except Exception:
                    # an observer's bug or a passing fault must not end the participant
                    log.exception("event.handler_failed", subject=subject.name, entry_id=entry_id)

    async def serve(self, works: Iterable[Work]) -> None:
        """Reads what these are for, from now on and as long as this process runs."""
        routes = {work.stream: watched(self.participant, work.stream, work.route(self)) for work in works}
        self.routes.update(routes)
        if self.consumer is not None and routes:
            await self.consumer.add(routes)

    async def announce(self) -> None:
        """Writes this replica's registry entry now; what a full Redis refuses comes with a later heartbeat."""
        with contextlib.suppress(BusFull):
            await self.presence.announce()

    def _told(self) -> ReplicaInfo:
        consumer = self.consumer
        return ReplicaInfo(
            participant=self.participant,
            replica=self.replica,
            state=self.state,
            started=self.started,
            seen=self.bus.now_ms(),
            in_flight=len(consumer.held) if consumer else 0,
            concurrency=consumer.concurrency if consumer else 0,
            handled=consumer.handled if consumer else 0,
            tools=self.tools,
            facts=self.facts,
            release=RELEASE,
        )

    def _use(self, settings: S) -> None:
        if settings.log_level != self.settings.log_level:
            show_from(settings.log_level)
        self.settings = settings

    async def _follow_settings(self, message: Message[Any]) -> None:
        if message.payload.participant != self.participant:
            return
        # of two changes at the same time the one that is kept counts, and not the one that is heard of last
        kept = await _kept_values(self.bus, self.participant)
        values = {name: kept.get(name, value) for name, value in message.payload.values.items()}
        try:
            self._use(self.settings.update_settings(values))
        except SettingsError as exc:
            log.warning("settings.refused", reason=str(exc))
            return
        log.info("settings.applied", names=sorted(values))
        for changed in self._on_settings:
            await changed(self.settings)

    @contextlib.asynccontextmanager
    async def _running(self, patient: bool, since: str) -> AsyncIterator[None]:
        """Announced and listening, with everything that goes on in the background. since: the newest change of settings
        when the kept ones were read."""
        with _allowed(self.participant):
            await self.presence.register(patient=patient)
        async with asyncio.TaskGroup() as background:
            self.background = background
            for running in (
                self.tail.run(),
                self._inbox.run(self.bus),
                self.registry.run(),
                self.presence.run(),
                Janitor(self.bus, _JANITOR_HEARTBEATS * self.settings.heartbeat).run(),
            ):
                background.create_task(running)
            self.observe(SETTINGS_UPDATE, self._follow_settings, after=since)
            try:
                yield
            finally:
                for task in list(background._tasks):
                    task.cancel()
                await self.presence.deregister()


@contextlib.contextmanager
def _allowed(participant: str) -> Iterator[None]:
    """What a participant begins with. Raises SettingsError where its user of Redis may not do that."""
    try:
        yield
    except ReplyError as exc:
        raise SettingsError(
            f"Redis refuses what {participant} needs ({exc}): see whose user LOCAL2_REDIS_URL names, and what that may "
            "do (deploy/redis/users.acl)"
        ) from exc


async def _kept_values(bus: Bus, participant: str) -> dict[str, Any]:
    """What was changed while the participant ran, by the setting's name."""
    return stored_values(participant, await bus.link.call("HGETALL", settings_key(participant)))


async def _stored_settings(bus: Bus, participant: str, settings: S) -> S:
    """The settings with the run-time updates of earlier days; one that is no longer valid is left out."""
    for name, value in (await _kept_values(bus, participant)).items():
        try:
            settings = settings.update_settings({name: value})
        except SettingsError as exc:
            log.warning("settings.ignored", name=name, reason=str(exc))
    return settings


def new_replica_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


@contextlib.asynccontextmanager
async def open_context(
    participant: str,
    settings: S,
    *,
    tools: Sequence[dict[str, Any]] = (),
    metrics: Text | None = None,
    patient: bool = True,
    opened: Callable[[Bus], None] = lambda _bus: None,
) -> AsyncIterator[Context[S]]:
    """A process on the bus: connected, announced, listening. Waits for Redis as long as it takes.

    metrics: what the metrics' port shows, in place of this process's counters alone.
    patient: waits for a Redis that is full, too; off for whoever can be of use by reading alone.
    opened: told the bus before it has answered.
    """
    replica = new_replica_name()
    source = f"{participant}/{replica}"
    async with (
        observing(participant, replica, settings, metrics) as address,
        Bus(settings.redis_url, source, timeout=settings.redis_timeout, retention=settings.retention) as bus,
    ):
        opened(bus)
        with _allowed(participant):
            # before the kept ones are read: a change in between is in them, or heard afterwards, or both
            since = await bus.newest(SETTINGS_UPDATE.stream)
            stored = await _stored_settings(bus, participant, settings)
        context = Context(participant, stored, bus, replica, settings)
        context.tools = list(tools)
        if address is not None:
            context.facts["metrics"] = address
        async with context._running(patient, since):
            yield context


class Work(Protocol):
    """Something that a service does with the entries of one work stream."""

    @property
    def stream(self) -> str: ...

    def route(self, context: Context[Any]) -> Route: ...


@dataclass(frozen=True, slots=True)
class Subscription(Generic[T]):
    """handle: one message in, the messages to publish out; they are written together with the acknowledgement.

    abandon: the same for a message that is given up for good, with the reason.
    limit: messages held at the same time (see Route), or what says it now; None: as many as the replica has slots.
    """

    subject: Subject[T]
    handle: Callable[[Message[T]], Awaitable[Iterable[Outgoing]]]
    abandon: Callable[[Message[T], str], Awaitable[Iterable[Outgoing]]] | None = None
    limit: Limit = None

    @property
    def stream(self) -> str:
        return self.subject.stream

    def route(self, context: Context[Any]) -> Route:
        async def handler(delivery: Delivery) -> Sequence[Command]:
            message = receive(self.subject, delivery)
            bind_ids(message.envelope.ids())
            return [context.bus.publishing(out) for out in await self.handle(message)]

        async def on_dead_letter(delivery: Delivery, reason: str) -> Sequence[Command]:
            if self.abandon is None:
                return ()
            return [context.bus.publishing(out) for out in await self.abandon(receive(self.subject, delivery), reason)]

        return Route(handler, on_dead_letter, self.limit)


def receive(subject: Subject[T], delivery: Delivery) -> Message[T]:
    """The typed message of a delivery. Raises DecodeError."""
    envelope = Envelope.parse(subject.name, delivery.entry_id, delivery.fields)
    if tracing.active():
        # what this message causes is caused by its handling
        envelope.traceparent = tracing.current() or envelope.traceparent
    return Message(delivery.entry_id, envelope, subject.read(envelope.payload), delivery.deliveries, delivery.suspended)


Build = Callable[[Context[S]], AbstractAsyncContextManager[Sequence[Work]]]


class Service(Generic[S]):
    """A participant: its settings, and a builder that opens its resources and yields what it reads.

    participant: a name, or a function that derives it from the settings (one program, two participants).
    """

    def __init__(self, participant: str, settings_cls: type[S], build: Build[S]) -> None:
        self.participant = participant
        self.settings_cls = settings_cls
        self._build = build

    def main(self) -> None:
        """Runs until SIGTERM or SIGINT. A wrong setting ends the process with a sentence and status 2."""
        run_main(self.run, self.participant, self.settings_cls)

    async def run(self, settings: S, stop: asyncio.Event) -> None:
        async with open_context(self.participant, settings) as context, self._build(context) as works:
            await context.serve(works)
            consumer = Consumer(
                context.bus,
                self.participant,
                context.replica,
                context.routes,
                concurrency=context.settings.slots_in_all,
                heartbeat=settings.heartbeat,
                max_deliveries=settings.max_deliveries,
                drain=settings.drain,
            )
            context.consumer = consumer

            async def resize(changed: S) -> None:
                consumer.resize(changed.slots_in_all)

            context.on_settings(resize)
            context.state = "ready"
            await context.announce()
            log.info("service.ready", streams=[work.stream for work in works])
            announcing_end = asyncio.create_task(_mark_draining(context, stop))
            await consumer.run(stop)
            await announcing_end
        log.info("service.stopped")


async def _mark_draining(context: Context[Any], stop: asyncio.Event) -> None:
    await stop.wait()
    context.state = "draining"
    with contextlib.suppress(BusUnavailable, TimeoutError):
        async with asyncio.timeout(1.0):
            await context.announce()


def run_main(run: Callable[[S, asyncio.Event], Awaitable[None]], participant: str, settings_cls: type[S]) -> None:
    """Loads settings, sets up logging and signals, runs a participant on uvloop."""
    import uvloop

    try:
        settings = settings_cls.load(participant)
        configure(settings.log_level, settings.log_format, participant=participant)
        # what was imported stays: to look through it now and then would hold up everything for 20 to 50 ms
        gc.freeze()
        try:
            uvloop.run(_until_told(run, settings))
        finally:
            if not tracing.stop(min(_FLUSH_SECONDS, settings.drain)):
                log.warning("tracing.not_all_sent")
    except* SettingsError as wrong:
        for exc in _leaves(wrong):
            print(f"local2: {exc}", file=sys.stderr)
        sys.exit(2)


async def _until_told(run: Callable[[S, asyncio.Event], Awaitable[None]], settings: S) -> None:
    """Runs a participant until it ends or a signal tells it to."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_unhandled)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running, told = asyncio.ensure_future(run(settings, stop)), asyncio.create_task(stop.wait())
    await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    patience = settings.drain + LEAVING_SECONDS if stop.is_set() else None
    _, late = await asyncio.wait({running}, timeout=patience)
    for task in late:
        # it waits for Redis, perhaps since its start
        log.warning("service.gave_up_waiting")
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _leaves(group: BaseExceptionGroup[SettingsError]) -> Iterator[BaseException]:
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(exc)
        else:
            yield exc
