"""The public surface of the bus, as the contract suite uses it: a renamed name is adapted here and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import redis

from shared.bus import (
    START,
    Bus,
    BusFull,
    ConnectionLost,
    Consumer,
    Delivery,
    Follower,
    ReplyError,
    Route,
    StreamTailer,
    open_subscriber,
)
from shared.bus.dead_letters import drop, replay
from shared.bus.keys import journal_key, result_key
from shared.contracts import (
    DEAD_LETTER,
    PREFIX,
    QUERY_CANCEL,
    QUERY_RECEIVED,
    TOOL_REQUEST,
    TOOL_RESULT,
    DeadLetter,
    Outgoing,
    Payload,
    QueryCancel,
    QueryReceived,
    Subject,
    ToolRequest,
    ToolResultMessage,
    encode,
)
from shared.envelope import Envelope
from shared.errors import BusUnavailable, DecodeError, Fenced, PermanentError, SettingsError, TransientError
from shared.participant.service import Context, open_context
from shared.participant.tool_client import Caller, ToolClient
from shared.records.journal import (
    EntryType,
    JournalEnded,
    JournalEntry,
    JournalWriter,
    append_after,
    closing,
    read_journal,
    read_result,
)
from shared.records.lanes import Accepted, accept

__all__ = [
    "ATOMIC_IN_CLUSTER",
    "DEAD_LETTER",
    "DEAD_LETTERS",
    "GROUP",
    "PREFIX",
    "QUERY_CANCEL",
    "QUERY_RECEIVED",
    "START",
    "STREAM",
    "SUBJECT",
    "TOOL_REQUEST",
    "TOOL_RESULT",
    "VISIBILITY_TIMEOUT",
    "Bus",
    "BusFull",
    "BusUnavailable",
    "Caller",
    "ConnectionLost",
    "Context",
    "DeadLetter",
    "DecodeError",
    "Delivery",
    "EntryType",
    "Feed",
    "Fenced",
    "Follower",
    "JournalEnded",
    "JournalEntry",
    "JournalWriter",
    "Note",
    "Outgoing",
    "PermanentError",
    "Place",
    "QueryCancel",
    "Replica",
    "ReplyError",
    "Route",
    "SettingsError",
    "ToolClient",
    "ToolRequest",
    "ToolResultMessage",
    "TransientError",
    "absent_groups",
    "accept_query",
    "append_after",
    "call",
    "call_all",
    "closing",
    "connected",
    "consuming",
    "dead_letters",
    "decode",
    "drop",
    "effect",
    "encode",
    "fields_of",
    "follow_journals",
    "follow_streams",
    "journal_key",
    "key",
    "load_scripts",
    "note",
    "open_bus",
    "open_context",
    "read_journal",
    "read_result",
    "replay",
    "result_key",
    "route",
    "stream",
    "subject",
    "suspended",
    "transact",
    "trim",
    "url_of",
]  # fmt: skip

GROUP = "workers"
# Seconds after which an entry of a dead consumer is taken over.
VISIBILITY_TIMEOUT = 0.6
# Whether effects and acknowledgement are one transaction on a server in cluster mode too.
ATOMIC_IN_CLUSTER = True

Command = tuple[Any, ...]
Handler = Callable[[Delivery], Awaitable[Sequence[Command]]]
OnDeadLetter = Callable[[Delivery, str], Awaitable[Sequence[Command]]]


class Place(Protocol):
    """A server (servers.Server), or the network before it (servers.Network)."""

    clustered: bool

    @property
    def addresses(self) -> list[tuple[str, int]]: ...


class Note(Payload):
    """The payload of the suite's own subjects."""

    text: str


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


def key(name: str) -> str:
    """Return a key of the tests' own that a handler's effects may write, in the hash slot of STREAM."""
    return f"{PREFIX}test:{{{STREAM}}}:{name}"


def stream(name: str) -> str:
    """Return the stream of a subject."""
    return subject(name).stream


def subject(name: str, *, kind: Any = "work", **options: Any) -> Subject[Note]:
    return Subject(name, Note, kind=kind, **options)


SUBJECT = subject("work")
STREAM = SUBJECT.stream
DEAD_LETTERS = DEAD_LETTER.stream


def url_of(place: Place) -> str:
    """Return the URL that a participant is configured with."""
    if place.clustered and "{" not in PREFIX:
        raise RuntimeError("a server in cluster mode needs one hash slot: set LOCAL2_KEY_PREFIX={local2}: for this run")
    names = ",".join(f"{host}:{port}" for host, port in place.addresses)
    return f"redis+cluster://{names}/" if place.clustered else f"redis://{names}/0"


# ── the bus ──────────────────────────────────────────────────────────────────────────────────────────────────────


def open_bus(place: Place | str, source: str = "test/1", *, timeout: float = 5.0, **options: Any) -> Bus:
    """Return a bus, to be opened by `async with`. place: a server, a network or a URL."""
    return Bus(place if isinstance(place, str) else url_of(place), source, timeout=timeout, **options)


def note(text: str = "x", of: Subject[Note] = SUBJECT, **headers: Any) -> Any:
    """Return a message to publish."""
    return of.of(Note(text=text), **headers)


def effect(bus: Bus, message: Any) -> Command:
    """Return the command that publishes a message, for a handler to return."""
    return bus.publishing(message)


async def call(bus: Bus, *command: Any, repeat: bool = True) -> Any:
    """Send one command. repeat: send it again if the connection breaks before its reply; else raise ConnectionLost."""
    return await bus.link.call(*command, retry=repeat)


async def connected(bus: Bus) -> None:
    """Wait until the bus has all its connections: a fault that is made before may hit one that is still being made."""
    for link in (bus.link, bus.heartbeat_link, bus.reader):
        await link.connected.wait()


async def call_all(bus: Bus, commands: Sequence[Command]) -> list[Any]:
    """Send several commands together and return their replies."""
    return await bus.link.pipe(commands)


async def transact(bus: Bus, commands: Sequence[Command]) -> list[Any]:
    """Carry out all of these commands, or none."""
    return await bus.link.commit(commands)


async def trim(bus: Bus, of: Subject[Any], *, spare_ms: int = 0, abandoned: Container[str] = ()) -> int:
    return await bus.trim(of, spare_ms=spare_ms, abandoned=abandoned)


async def absent_groups(bus: Bus, of: Subject[Any], silent_ms: int) -> list[str]:
    """Return the groups without a sign of life for `silent_ms`."""
    return await bus.idle_groups(of, silent_ms)


async def load_scripts(bus: Bus) -> None:
    """Load the scripts that the server has lost, as each participant does with every heartbeat."""
    await bus.load_scripts()


# ── consumers ────────────────────────────────────────────────────────────────────────────────────────────────────


def route(handler: Handler, on_dead_letter: OnDeadLetter | None = None, limit: Any = None) -> Route:
    return Route(handler, on_dead_letter, limit)


def suspended(delivery: Delivery) -> contextlib.AbstractAsyncContextManager[None]:
    """Release the slot of an entry while its handler waits for something else."""
    return delivery.suspended()


def decode(delivery: Delivery) -> Note:
    """Return an entry's payload. Raises DecodeError."""
    return SUBJECT.decode(Envelope.parse(SUBJECT.name, delivery.entry_id, delivery.fields))


def fields_of(delivery: Delivery) -> list[bytes]:
    """Return an entry's fields and values in their order, as bytes."""
    return list(delivery.fields)


class Replica:
    """A running consumer with a bus of its own."""

    def __init__(self, bus: Bus, consumer: Consumer, stop: asyncio.Event, task: asyncio.Task[None]) -> None:
        self.bus = bus
        self._consumer = consumer
        self._stop = stop
        self.task = task

    def resize(self, concurrency: int) -> None:
        self._consumer.resize(concurrency)

    async def add(self, streams: Mapping[str, Route]) -> None:
        """Read further streams from now on."""
        await self._consumer.add(streams)

    def begin_stop(self) -> None:
        """Stop as on SIGTERM: release the entries that are not finished within `drain` seconds."""
        self._stop.set()

    async def stop(self) -> None:
        self.begin_stop()
        await self.task


@contextlib.asynccontextmanager
async def consuming(
    place: Place | str,
    handler: Handler | Mapping[str, Route],
    on_dead_letter: OnDeadLetter | None = None,
    *,
    name: str = "r1",
    group: str = GROUP,
    concurrency: int = 4,
    visibility_timeout: float = VISIBILITY_TIMEOUT,
    max_deliveries: int = 5,
    drain: float = 1.0,
    timeout: float = 5.0,
) -> AsyncIterator[Replica]:
    """Run a consumer of STREAM, or of several streams by their routes, and stop it at the end of the block.

    timeout: seconds after which a connection without a reply is replaced.
    """
    routes = handler if isinstance(handler, Mapping) else {STREAM: route(handler, on_dead_letter)}
    async with open_bus(place, f"test/{name}", timeout=timeout) as bus:
        consumer = Consumer(
            bus,
            group,
            name,
            routes,
            concurrency=concurrency,
            heartbeat=visibility_timeout / 3,
            max_deliveries=max_deliveries,
            drain=drain,
        )
        stop = asyncio.Event()
        replica = Replica(bus, consumer, stop, asyncio.create_task(consumer.run(stop)))
        try:
            yield replica
        finally:
            await replica.stop()


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────


def dead_letters(client: redis.Redis) -> list[DeadLetter]:
    """Return all dead letters, oldest first, as an independent client reads them."""
    return [DeadLetter(**json.loads(fields["payload"])) for _, fields in client.xrange(DEAD_LETTERS)]


# ── following ────────────────────────────────────────────────────────────────────────────────────────────────────


class Feed(Protocol):
    """Gives the entries of streams to their followers."""

    def follow(self, stream: str, after: str = START) -> Follower: ...


@contextlib.asynccontextmanager
async def follow_streams(bus: Bus) -> AsyncIterator[Feed]:
    """Follow event streams until the block ends."""
    tail = StreamTailer(bus)
    running = asyncio.create_task(tail.run())
    try:
        yield tail
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def follow_journals(bus: Bus) -> contextlib.AbstractAsyncContextManager[Feed]:
    """Follow journals until the block ends."""
    return open_subscriber(bus)


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def accept_query(bus: Bus, once: str, session_id: str) -> Accepted | None:
    """Accept a query of a session under an idempotency key, as a gateway does."""
    query = QueryReceived(session_id=session_id, user_id="u", query="q", mode="chat")
    message = QUERY_RECEIVED.of(query, once=once, session_id=session_id)
    return await accept(
        bus, message, {"query": "q"}, left=60, seconds=600, session_id=session_id, respondents=("A",), limit=100
    )
