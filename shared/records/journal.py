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


# A larger result of a tool (bytes) is stored in its own entry only.
LARGE_RESULT = 65_536
_KNOWN = {kind.value.encode(): kind for kind in EntryType}
# Entries of the first read from the end, which usually has the terminal entry and the later ones.
_LAST = 4
_PAGE = 256
# More digits are no time in ms, and `int` refuses thousands of them.
_TIME_DIGITS = 15


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An entry as it is stored.

    type: the name of a type, also of one that only a newer release has. time: in ms since the epoch. data: the JSON
    text as written, which clients get byte for byte. told: in a `completed` entry, a JSON list of the earlier entries
    that a result needs. token: the secret of a tool's request, which its answer repeats; no client is shown it.
    """

    id: str
    type: EntryType | str
    time: int
    data: bytes
    told: bytes = b""
    token: str = ""

    def typed(self) -> TypedEntry:
        """Return the entry with its data as an event."""
        return decode(self.id, self.type, self.time, self.data, self.token)

    def value(self) -> dict[str, Any]:
        """Return the data as an object; an empty one if the data is not an object."""
        try:
            parsed = orjson.loads(self.data)
        except orjson.JSONDecodeError as exc:
            not_understood("a journal", self.id, f"{self.type}: its data is no JSON: {exc}", self.data)
            return {}
        return parsed if isinstance(parsed, dict) else {}

    def earlier(self) -> list[JournalEntry] | None:
        """Return the earlier entries in `told`; None if it is missing or malformed.

        Large entries have no data there: `_whole` reads it.
        """
        try:
            found = [
                JournalEntry(str(entry_id), _known(str(kind)), int(time), b"" if value is None else orjson.dumps(value))
                for entry_id, kind, time, value in orjson.loads(self.told)
            ]
            for entry in found:
                order(entry.id)
        except (ValueError, TypeError):
            return None
        return found

    @staticmethod
    def parse(entry: Entry) -> JournalEntry:
        """Read an entry with any fields; missing fields are empty."""
        fields = entry[1]
        if len(fields) == 6 and fields[0] == b"type" and fields[2] == b"time" and fields[4] == b"data":
            kind, time, data, told, token = fields[1], fields[3], fields[5], b"", b""
        else:
            raw = dict(zip(fields[::2], fields[1::2], strict=False))
            kind, time, data = raw.get(b"type", b""), raw.get(b"time", b""), raw.get(b"data", b"{}")
            told, token = raw.get(b"told", b""), raw.get(b"token", b"")
        known = _KNOWN.get(kind) or kind.decode(errors="backslashreplace")
        number = int(time) if time.isdigit() and len(time) <= _TIME_DIGITS else 0
        return JournalEntry(entry[0], known, number, data, told, token.decode(errors="replace"))


def _known(kind: str) -> EntryType | str:
    return _KNOWN.get(kind.encode(), kind)


def response_id(query_id: str, respondent_id: str) -> str:
    """Return the id of one respondent's answer, and of its engram."""
    return f"{query_id}:{respondent_id}"


Events = Sequence[KnownEvent]


@dataclass(slots=True)
class Sent:
    """Entries that have been sent. replies: Redis' replies to the commands."""

    events: Events
    commands: Sequence[Command]
    replies: asyncio.Future[list[Any]]

    @property
    def written(self) -> bool:
        """Return whether all answered commands have certainly written their entries."""
        if self.replies.cancelled() or self.replies.exception() is not None:
            return False
        return all(isinstance(reply, bytes) for reply in self.replies.result())


class JournalEnded(Local2Error):
    """The response is complete; its journal has no writer any more."""


class JournalWriter:
    """The only writer of a journal, until another replica claims it. Every write may raise Fenced."""

    def __init__(self, bus: Bus, key: str, epoch: int, number: int) -> None:
        self._bus = bus
        self.key = key
        self._epoch = epoch
        self._number = number
        # The field `told` of `completed`: a result is then read without the thousands of pieces. Entries that may be
        # large have no data here.
        self._told: list[tuple[str, str, int, dict[str, Any] | None]] = []
        # the entries of large results, by call id
        self.large: dict[str, str] = {}
        # the state after all entries that were sent
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
        """Claim a journal that may exist. Return its writer and the earlier entries, oldest first.

        Raises Fenced when another replica claims it at the same time, and JournalEnded when it has its terminal entry.
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
            writer._add_told(entry_id, time, event, len(entry.data))
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
        """The id of the last entry that was sent."""
        return f"{self._epoch}-{self._number}"

    @property
    def next_position(self) -> str:
        """The id of the entry that comes next."""
        return f"{self._epoch}-{self._number + 1}"

    async def append(
        self, event: KnownEvent, also: Sequence[Command] = (), *, messages: Sequence[Outgoing] = ()
    ) -> str:
        """Write an entry and return its id. Raises Fenced when another replica owns the journal or it has expired.

        also: commands sent after it in the same write; Redis runs them even when it refuses the entry.
        messages: published after them in the same way.
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
        """Write several entries at once. tokens: one for each entry, of tools' requests."""
        if events:
            await self.confirm(self.send(events, tokens))

    def send(self, events: Events, tokens: Sequence[str] | None = None) -> Sent:
        """Send entries without waiting for the replies; `confirm` waits for them."""
        known = [""] * len(events) if tokens is None else tokens
        commands = [self._command(event, token) for event, token in zip(events, known, strict=True)]
        return Sent(events, commands, asyncio.ensure_future(self._bus.link.submit(commands, True)))

    async def confirm(self, sent: Sent) -> None:
        """Wait until the entries are written. Raises as `append`."""
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
        # A random value, because one replica may claim a journal twice at the same time.
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
        self._add_told(str(entry_id), time, event, len(payload))
        return str(entry_id)

    async def _check(
        self, reply: Any, entry_id: str, kind: str, time: int, payload: bytes, *extra: str | bytes
    ) -> None:
        """Raise BusFull or Fenced if the reply to a write is an error and the entry was not written."""
        if not isinstance(reply, ReplyError):
            return
        if reply.code in FULL:
            raise BusFull(str(reply))
        # Redis also refuses a write that was repeated after a lost connection: the stored entry is then this one.
        written = ["type", kind, "time", time, "data", payload, *extra]
        found = await self._bus.range(self.key, entry_id, entry_id)
        if not found or found[0][1] != [p if isinstance(p, bytes) else str(p).encode() for p in written]:
            raise Fenced(f"{self.key} belongs to another replica")

    def _add_told(self, entry_id: str, time: int, event: Event, size: int) -> None:
        """Add an entry to `told` of the terminal entry, if a result needs it. size: bytes of its data."""
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
# The index of the first argument in a call of a script with one key.
_ARGUMENTS = 4


def closing(key: str, ttl: int) -> Command:
    """Return the command that lets a completed journal expire after `ttl` seconds."""
    return ("EXPIRE", key, ttl)


_APPEND_AFTER = script("append_after_end", "publish_entry")


async def append_after(bus: Bus, key: str, event: KnownEvent, *, once: str, patience: float = 30.0) -> str | None:
    """Append an entry of another participant (critique, pairwise, reward) after the terminal one; return its id.

    once: an idempotency key. patience: seconds to wait for a response that is still being written.
    Returns None when the journal has expired, or its response is not completed in time.
    """
    kind, data = encode(event)
    command = _APPEND_AFTER((key,), once, kind.value, now_ms(), data, *(t.value for t in TERMINAL))
    until = asyncio.get_running_loop().time() + patience
    pause = 0.02
    while True:
        outcome = (await bus.link.call(*command)).decode()
        if outcome != "open":
            return None if outcome == "gone" else outcome
        if asyncio.get_running_loop().time() >= until:
            return None
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)


async def pages(bus: Bus, key: str, end: str = "+") -> AsyncIterator[list[JournalEntry]]:
    """Yield all entries in pages, oldest first; none when the key is not a stream."""
    after, count = "-", _LAST
    while True:
        try:
            found = await bus.range(key, after, end, count)
        except ReplyError as exc:
            _log_unreadable(key, exc)
            return
        if not found:
            return
        yield [JournalEntry.parse(entry) for entry in found]
        if len(found) < count:
            return
        after, count = f"({found[-1][0]}", min(_PAGE, next_page(found, count))


async def read_journal(bus: Bus, key: str) -> list[JournalEntry]:
    """Return all entries, oldest first."""
    return [entry async for page in pages(bus, key) for entry in page]


async def read_end(bus: Bus, key: str) -> list[JournalEntry]:
    """Return the newest entries, oldest first: from the terminal one on, or a few if there is none."""
    newest: list[JournalEntry] = []
    before, count = "+", _LAST
    while True:
        try:
            found = await bus.latest(key, count, before=before)
        except ReplyError as exc:
            _log_unreadable(key, exc)
            return []
        for raw in found:
            entry = JournalEntry.parse(raw)
            newest.append(entry)
            if entry.type in TERMINAL:
                return newest[::-1]
        # Other participants may have appended any number of entries after the terminal one.
        if len(found) < count or not all(e.type in LATE or not isinstance(e.type, EntryType) for e in newest):
            return newest[::-1]
        before, count = f"({found[-1][0]}", min(_PAGE, count * 8)


async def read_result(bus: Bus, key: str) -> AsyncIterator[list[JournalEntry]]:
    """Yield pages of the entries that a result needs, oldest first.

    A completed response lists them in its terminal entry; of any other, all entries are read.
    """
    end = await read_end(bus, key)
    earlier = end[0].earlier() if end and end[0].type is EntryType.COMPLETED else None
    if earlier is not None:
        yield await _whole(bus, key, earlier) + end
        return
    async for page in pages(bus, key):
        yield page


async def _whole(bus: Bus, key: str, told: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Return the entries, with those without data read from the journal."""
    reads = [("XRANGE", key, entry.id, entry.id) for entry in told if not entry.data]
    if not reads:
        return list(told)
    # An entry that cannot be read stays without data.
    replies = [reply for reply in await bus.link.pipe_raw(reads) if not isinstance(reply, ReplyError)]
    found = {one[0]: JournalEntry.parse(one) for reply in replies for one in entries(reply)}
    return [found.get(entry.id, entry) for entry in told]


def _log_unreadable(key: str, exc: ReplyError) -> None:
    log.error("journal.unreadable", key=key, error=str(exc))
