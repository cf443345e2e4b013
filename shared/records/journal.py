"""The journal of one response: the stream that clients see live and that a new owner continues from.

A journal has one writer at a time. Entry ids are explicit, `{epoch}-{number}`; a new owner claims the next epoch with
its first entry, and Redis itself then refuses every later write of the old owner, because its ids are too small.
After the terminal entry other participants append with ids of the server's clock, which are larger than any epoch.
Every entry is also published on the journal's channel, so that followers have it at once (`shared.bus.subscriber`).

Readers are tolerant: a newer release may write unknown types and fields, and any writer malformed entries.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shared.bus import FULL, Bus, BusFull, Command, Entry, ReplyError, next_page, order
from shared.bus.replies import checked
from shared.bus.streams import entries, event_length
from shared.contracts import Outgoing
from shared.envelope import now_ms
from shared.errors import Fenced, Local2Error
from shared.records.events import LATE as LATE
from shared.records.events import TERMINAL as TERMINAL
from shared.records.events import (
    Claimed,
    Event,
    FilesSent,
    KnownEvent,
    Noticed,
    ToolAnswered,
    Truncated,
    decode,
    encode,
    shown,
)
from shared.records.events import Entry as TypedEntry
from shared.records.events import EntryType as EntryType
from shared.records.lua import script
from shared.records.response_state import EMPTY, apply, replay
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger
from shared.telemetry.unread import not_understood

log = get_logger()


# A tool's result with more bytes is kept in its own entry alone, and read there.
LARGE_RESULT = 65_536
_KNOWN = {kind.value.encode(): kind for kind in EntryType}
# A first look from the end finds the terminal entry, and what came behind it.
_LAST = 4
_PAGE = 256


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """`data` is the JSON text as written: it is passed on to clients byte for byte. `time` is in ms since the epoch.

    type: of a kind that this release does not know, its name. told: of a terminal entry, what a result tells of those
    before it, as JSON. token: of a tool's request, what its answer proves itself by; no client is shown it.
    """

    id: str
    type: EntryType | str
    time: int
    data: bytes
    told: bytes = b""
    token: str = ""

    def typed(self) -> TypedEntry:
        """The entry with its data as an event."""
        return decode(self.id, self.type, self.time, self.data, self.token)

    def value(self) -> dict[str, Any]:
        """The data as an object; empty when it is none."""
        try:
            parsed = orjson.loads(self.data)
        except orjson.JSONDecodeError as exc:
            not_understood("a journal", self.id, f"{self.type}: its data is no JSON: {exc}", self.data)
            return {}
        return parsed if isinstance(parsed, dict) else {}

    def earlier(self) -> list[JournalEntry] | None:
        """What is told of the entries before a terminal one, without the data of those that are read at their place;
        None when nothing is."""
        try:
            return [
                JournalEntry(str(entry_id), _known(str(kind)), int(time), b"" if value is None else orjson.dumps(value))
                for entry_id, kind, time, value in orjson.loads(self.told)
            ]
        except (ValueError, TypeError):
            return None

    @staticmethod
    def parse(entry: Entry) -> JournalEntry:
        """Of any fields; what is missing is empty."""
        fields = entry[1]
        if len(fields) == 6 and fields[0] == b"type" and fields[2] == b"time" and fields[4] == b"data":
            kind, time, data, told, token = fields[1], fields[3], fields[5], b"", b""
        else:
            raw = dict(zip(fields[::2], fields[1::2], strict=False))
            kind, time, data = raw.get(b"type", b""), raw.get(b"time", b""), raw.get(b"data", b"{}")
            told, token = raw.get(b"told", b""), raw.get(b"token", b"")
        known = _KNOWN.get(kind) or kind.decode(errors="backslashreplace")
        number = int(time) if time.isdigit() else 0
        return JournalEntry(entry[0], known, number, data, told, token.decode(errors="replace"))


def _known(kind: str) -> EntryType | str:
    return _KNOWN.get(kind.encode(), kind)


def response_id(query_id: str, respondent_id: str) -> str:
    """The id of one respondent's answer, and of its engram."""
    return f"{query_id}:{respondent_id}"


Events = Sequence[KnownEvent]


@dataclass(slots=True)
class Sent:
    """Entries on their way."""

    events: Events
    commands: Sequence[Command]
    replies: asyncio.Future[list[Any]]

    @property
    def written(self) -> bool:
        """Of what was answered, whether it is in the journal for certain."""
        if self.replies.cancelled() or self.replies.exception() is not None:
            return False
        return all(isinstance(reply, bytes) for reply in self.replies.result())


class JournalEnded(Local2Error):
    """The response is complete; its journal has no writer any more."""


class JournalWriter:
    """The only writer of a journal, until somebody else claims it. Every write may raise Fenced."""

    def __init__(self, bus: Bus, key: str, epoch: int, number: int) -> None:
        self._bus = bus
        self.key = key
        self._epoch = epoch
        self._number = number
        # What the end names of earlier entries, so that a result is read without thousands of pieces: of notices their
        # data; of entries that may be large, none.
        self._told: list[tuple[str, str, int, dict[str, Any] | None]] = []
        # large results: the entry of each, by call id
        self.large: dict[str, str] = {}
        # the response as far as it is written, or on its way
        self.state = EMPTY

    @classmethod
    async def begin(
        cls, bus: Bus, key: str, claimed: Claimed, ttl: int, then: Events = (), messages: Sequence[Outgoing] = ()
    ) -> JournalWriter | None:
        """Claim a journal that is expected to be new; return None if another writer has claimed it.

        ttl: seconds after which an abandoned journal disappears. then: entries written with the claim.
        messages: published in the same write.
        """
        writer = cls(bus, key, 1, 0)
        return writer if await writer._claim([claimed, *then], ttl, messages) else None

    @classmethod
    async def claim(cls, bus: Bus, key: str, claimed: Claimed, ttl: int) -> tuple[JournalWriter, list[JournalEntry]]:
        """Becomes the writer of a journal that may be there. Returns the entries written before, oldest first.

        Raises Fenced when another replica claims at the same time, JournalEnded when there is nothing left to write.
        """
        epoch = await cls._next_epoch(bus, key)
        writer = cls(bus, key, epoch, 0)
        if not await writer._claim([claimed], ttl):
            raise Fenced(f"{key} belongs to another replica")
        if epoch == 1:
            return writer, []
        before = [entry async for page in pages(bus, key, f"({epoch}-1") for entry in page]
        typed = [entry.typed() for entry in before]
        for entry, (entry_id, time, event, _) in zip(before, typed, strict=True):
            writer._tell(entry_id, time, event, len(entry.data))
        writer.state = apply(replay(typed), TypedEntry(writer.position, now_ms(), claimed))
        return writer, before

    @staticmethod
    async def _next_epoch(bus: Bus, key: str) -> int:
        end = await read_end(bus, key)
        if any(entry.type in TERMINAL for entry in end):
            raise JournalEnded(f"{key} has its terminal entry")
        return order(end[-1].id)[0] + 1 if end else 1

    @property
    def position(self) -> str:
        """The id of the last entry written."""
        return f"{self._epoch}-{self._number}"

    @property
    def next_position(self) -> str:
        """The id of the entry that comes next."""
        return f"{self._epoch}-{self._number + 1}"

    async def append(
        self, event: KnownEvent, also: Sequence[Command] = (), *, messages: Sequence[Outgoing] = ()
    ) -> str:
        """The id of the new entry. Raises Fenced when the journal belongs to somebody else or has expired.

        also: commands sent behind it in the same write; they are carried out even when the entry is refused.
        messages: published behind it in the same way.
        """
        command = self._command(event)
        publishing = [self._bus.publishing(message) for message in messages]
        replies = await self._bus.link.pipe_raw([command, *also, *publishing])
        return await self._confirm(event, command, replies[0])

    async def publish(self, messages: Sequence[Outgoing], also: Sequence[Command] = ()) -> None:
        """Publish messages of the response and carry out further commands, in one write. Raises the first error among
        the replies, except WRONGTYPE on a stream that only observers read."""
        commands = [*(self._bus.publishing(message) for message in messages), *also]
        replies = await self._bus.link.pipe_raw(commands)
        for number, reply in enumerate(replies):
            watched = number < len(messages) and event_length(messages[number].envelope.subject) is not None
            if watched and isinstance(reply, ReplyError) and reply.code == "WRONGTYPE":
                log.error("bus.not_a_stream", stream=messages[number].envelope.subject, error=str(reply))
            else:
                checked(reply)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    async def append_all(self, events: Events, tokens: Sequence[str] | None = None) -> None:
        """Several entries in one write; of tools' requests with their tokens."""
        if events:
            await self.confirm(self.send(events, tokens))

    def send(self, events: Events, tokens: Sequence[str] | None = None) -> Sent:
        """Write entries without waiting for it; `confirm` waits."""
        known = [""] * len(events) if tokens is None else tokens
        commands = [self._command(event, token) for event, token in zip(events, known, strict=True)]
        return Sent(events, commands, asyncio.ensure_future(self._bus.link.submit(commands, True)))

    async def confirm(self, sent: Sent) -> None:
        """Returns when the entries are written. Raises as `append`."""
        for event, command, reply in zip(sent.events, sent.commands, await sent.replies, strict=True):
            await self._confirm(event, command, reply)

    def _arguments(self, event: KnownEvent, token: str = "") -> tuple[str, EntryType, int, bytes]:
        """Count a new entry; return its id, type, time and JSON text."""
        self._number += 1
        entry = TypedEntry(self.position, now_ms(), event, token)
        self.state = apply(self.state, entry)
        kind, data = encode(event)
        if (meter := metrics.meter()) is not None:
            meter.journal(kind)
        return entry.id, kind, entry.time, data

    def _command(self, event: KnownEvent, token: str = "") -> Command:
        extra: tuple[str | bytes, ...] = ("token", token) if token else ()
        if event.type is EntryType.COMPLETED:
            extra = ("told", orjson.dumps(self._told))
        return _WRITE((self.key,), *self._arguments(event, token), *extra)

    async def _claim(self, events: Events, ttl: int, messages: Sequence[Outgoing] = ()) -> bool:
        """Write the first entries of this writer; return False if another writer has claimed the journal before."""
        # A random value tells two claims of one replica at the same time apart.
        claim = os.urandom(16).hex()
        entries: list[Any] = [value for event in events for value in self._arguments(event)]
        publishing = [self._bus.publishing(message) for message in messages]
        reply, *_ = await self._bus.link.pipe_raw([_CLAIM((self.key,), ttl, claim, *entries), *publishing])
        try:
            await self._check(reply, *entries[:4], "claim", claim)
        except Fenced:
            return False
        return True

    async def _confirm(self, event: KnownEvent, command: Command, reply: Any) -> str:
        if reply is None:
            raise Fenced(f"{self.key} has expired")
        entry_id, _, time, payload, *_ = command[_ARGUMENTS:]
        await self._check(reply, *command[_ARGUMENTS:])
        self._tell(str(entry_id), time, event, len(payload))
        return str(entry_id)

    async def _check(
        self, reply: Any, entry_id: str, kind: str, time: int, payload: bytes, *extra: str | bytes
    ) -> None:
        """Raises what an error in an entry's place means."""
        if not isinstance(reply, ReplyError):
            return
        if reply.code in FULL:
            raise BusFull(str(reply))
        # a write repeated after a lost connection is refused too: then the entry is there, and it is ours
        written = ["type", kind, "time", time, "data", payload, *extra]
        found = await self._bus.range(self.key, entry_id, entry_id)
        if not found or found[0][1] != [p if isinstance(p, bytes) else str(p).encode() for p in written]:
            raise Fenced(f"{self.key} belongs to another replica")

    def _tell(self, entry_id: str, time: int, event: Event, size: int) -> None:
        """Keeps what the end is to tell of an entry; `size`: bytes of its data."""
        match event:
            case Noticed():
                self._told.append((entry_id, event.type, time, shown(event)))
            case FilesSent() | Truncated():
                self._told.append((entry_id, event.type, time, None))
            case ToolAnswered() if size > LARGE_RESULT:
                self._told.append((entry_id, event.type, time, None))
                self.large[event.call_id] = entry_id


_CLAIM = script("claim_journal", "publish_entry")

_WRITE = script("append_entry", "publish_entry")
# Where they begin in a call of a script with one key.
_ARGUMENTS = 4


def closing(key: str, ttl: int) -> Command:
    """Lets a completed journal expire after `ttl` seconds."""
    return ("EXPIRE", key, ttl)


_APPEND_AFTER = script("append_after_end", "publish_entry")


async def append_after(bus: Bus, key: str, event: KnownEvent, *, once: str, patience: float = 30.0) -> str | None:
    """The id of an entry that another participant adds after completion (critique, pairwise, reward).

    once: a name under which it is added at most one time.
    patience: seconds to wait for a response that is still being written.
    None when the journal has expired or its response is not completed in time.
    """
    kind, data = encode(event)
    command = _APPEND_AFTER((key,), once, kind.value, now_ms(), data, *(t.value for t in TERMINAL))
    until = asyncio.get_running_loop().time() + patience
    pause = 0.02
    while True:
        said = (await bus.link.call(*command)).decode()
        if said != "open":
            return None if said == "gone" else said
        if asyncio.get_running_loop().time() >= until:
            return None
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)


async def pages(bus: Bus, key: str, end: str = "+") -> AsyncIterator[list[JournalEntry]]:
    """All entries, oldest first, so many at a time that nobody is kept waiting; none when the key is no journal."""
    after, count = "-", _LAST
    while True:
        try:
            found = await bus.range(key, after, end, count)
        except ReplyError as exc:
            _complain(key, exc)
            return
        if not found:
            return
        yield [JournalEntry.parse(entry) for entry in found]
        if len(found) < count:
            return
        after, count = f"({found[-1][0]}", min(_PAGE, next_page(found, count))


async def read_journal(bus: Bus, key: str) -> list[JournalEntry]:
    """All entries, oldest first."""
    return [entry async for page in pages(bus, key) for entry in page]


async def read_end(bus: Bus, key: str) -> list[JournalEntry]:
    """The newest entries, oldest first: from the terminal one on, or just a few while there is none."""
    newest: list[JournalEntry] = []
    before, count = "+", _LAST
    while True:
        try:
            found = await bus.latest(key, count, before=before)
        except ReplyError as exc:
            _complain(key, exc)
            return []
        for raw in found:
            entry = JournalEntry.parse(raw)
            newest.append(entry)
            if entry.type in TERMINAL:
                return newest[::-1]
        # what is not the writer's may lie behind the end, however much of it there is
        if len(found) < count or not all(e.type in LATE or not isinstance(e.type, EntryType) for e in newest):
            return newest[::-1]
        before, count = f"({found[-1][0]}", min(_PAGE, count * 8)


async def read_result(bus: Bus, key: str) -> AsyncIterator[list[JournalEntry]]:
    """What a result is made of, oldest first: of a completed response what its end tells, of any other everything."""
    end = await read_end(bus, key)
    earlier = end[0].earlier() if end and end[0].type is EntryType.COMPLETED else None
    if earlier is not None:
        yield await _whole(bus, key, earlier) + end
        return
    async for page in pages(bus, key):
        yield page


async def _whole(bus: Bus, key: str, told: Sequence[JournalEntry]) -> list[JournalEntry]:
    """The same entries, those that are told of without their data as they stand in the journal."""
    reads = [("XRANGE", key, entry.id, entry.id) for entry in told if not entry.data]
    if not reads:
        return list(told)
    # whoever wrote there: what cannot be read stays without
    replies = [reply for reply in await bus.link.pipe_raw(reads) if not isinstance(reply, ReplyError)]
    found = {one[0]: JournalEntry.parse(one) for reply in replies for one in entries(reply)}
    return [found.get(entry.id, entry) for entry in told]


def _complain(key: str, exc: ReplyError) -> None:
    log.error("journal.unreadable", key=key, error=str(exc))
