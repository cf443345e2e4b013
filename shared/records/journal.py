"""The journal of one response: the stream that clients see live and that a new owner continues from.

A journal has one writer at a time. Entry ids are explicit, `{epoch}-{number}`; a new owner claims the next epoch with
its first entry, and Redis itself then refuses every later write of the old owner, because its ids are too small.
After the terminal entry other participants append with ids of the server's clock, which are larger than any epoch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from shared.bus import Bus, Command, Entry, OutOfMemory, ReplyError, Script, order
from shared.contracts import PREFIX
from shared.envelope import now_ms
from shared.errors import Fenced, Local2Error
from shared.telemetry import metrics


class EntryType(StrEnum):
    CLAIMED = "claimed"
    RESTARTED = "restarted"
    STATE = "state"
    THINKING = "thinking"
    ANSWER = "answer"
    MESSAGE = "message"
    NOTICE = "notice"
    TOOL_REQUEST = "tool.request"
    TOOL_RESULT = "tool.result"
    CONTEXT_TRUNCATED = "context.truncated"
    PERSONA_WORKING = "persona.working"
    PERSONA_DONE = "persona.done"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CRITIQUE = "critique"
    PAIRWISE = "pairwise"
    REWARD = "reward"


TERMINAL = frozenset({EntryType.COMPLETED, EntryType.FAILED, EntryType.CANCELLED})


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """`data` is the JSON text as written: it is passed on to clients byte for byte. `time` is in ms since the epoch."""

    id: str
    type: EntryType
    time: int
    data: bytes

    def value(self) -> dict[str, Any]:
        parsed: dict[str, Any] = orjson.loads(self.data)
        return parsed

    @staticmethod
    def parse(entry: Entry) -> JournalEntry:
        raw = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
        return JournalEntry(entry[0], EntryType(raw[b"type"].decode()), int(raw[b"time"]), raw[b"data"])


def journal_key(query_id: str, respondent_id: str) -> str:
    return f"{PREFIX}journal:{query_id}:{respondent_id}"


def response_id(query_id: str, respondent_id: str) -> str:
    """The id of one respondent's answer, and of its engram."""
    return f"{query_id}:{respondent_id}"


class JournalEnded(Local2Error):
    """The response is complete; its journal has no writer any more."""


class JournalWriter:
    """The only writer of a journal, until somebody else claims it. Every write may raise Fenced."""

    def __init__(self, bus: Bus, key: str, epoch: int, number: int) -> None:
        self._bus = bus
        self.key = key
        self._epoch = epoch
        self._number = number

    @classmethod
    async def claim(
        cls, bus: Bus, key: str, data: dict[str, Any], ttl: int, *, fresh: bool
    ) -> tuple[JournalWriter, list[JournalEntry]]:
        """Becomes the writer. Returns the entries written before, oldest first.

        ttl: seconds after which an abandoned journal disappears.
        fresh: nothing is expected to be there; a round trip is saved when that is so.
        Raises Fenced when another replica claims at the same time, JournalEnded when there is nothing left to write.
        """
        epoch = 1 if fresh else await cls._next_epoch(bus, key)
        writer = cls(bus, key, epoch, 0)
        try:
            await writer._write(EntryType.CLAIMED, data, [("EXPIRE", key, ttl)], create=True)
        except Fenced:
            if not fresh:
                raise
            return await cls.claim(bus, key, data, ttl, fresh=False)
        if epoch == 1:
            return writer, []
        before = await bus.range(key, "-", f"({epoch}-1")
        return writer, [JournalEntry.parse(entry) for entry in before]

    @staticmethod
    async def _next_epoch(bus: Bus, key: str) -> int:
        written = await read_journal(bus, key)
        if any(entry.type in TERMINAL for entry in written):
            raise JournalEnded(f"{key} has its terminal entry")
        return order(written[-1].id)[0] + 1 if written else 1

    @property
    def position(self) -> str:
        """The id of the last entry written."""
        return f"{self._epoch}-{self._number}"

    async def append(self, kind: EntryType, data: dict[str, Any], also: Sequence[Command] = ()) -> str:
        """The id of the new entry. Raises Fenced when the journal belongs to somebody else or has expired.

        also: commands sent behind it in the same write; they are carried out even when the entry is refused.
        """
        return await self._write(kind, data, also)

    async def append_all(self, items: Sequence[tuple[EntryType, dict[str, Any]]]) -> None:
        """Several entries in one write."""
        if not items:
            return
        first = self._number + 1
        commands = [self._command(kind, data) for kind, data in items]
        replies = await self._bus.link.pipe_raw(commands)
        for number, (command, reply) in enumerate(zip(commands, replies, strict=True), first):
            await self._confirm(f"{self._epoch}-{number}", command, reply)

    def _command(self, kind: EntryType, data: dict[str, Any], create: bool = False) -> Command:
        self._number += 1
        if (meter := metrics.meter()) is not None:
            meter.journal(kind.value)
        entry_id = f"{self._epoch}-{self._number}"
        # claims of the same replica at the same time must not look like each other
        flags, claim = ((), ("claim", uuid.uuid4().hex)) if create else (("NOMKSTREAM",), ())
        payload = orjson.dumps(data)
        return ("XADD", self.key, *flags, entry_id, *claim, "type", kind.value, "time", now_ms(), "data", payload)

    async def _write(
        self, kind: EntryType, data: dict[str, Any], also: Sequence[Command] = (), create: bool = False
    ) -> str:
        command = self._command(kind, data, create)
        entry_id = self.position
        replies = await self._bus.link.pipe_raw([command, *also])
        await self._confirm(entry_id, command, replies[0])
        return entry_id

    async def _confirm(self, entry_id: str, command: Command, reply: Any) -> None:
        if reply is None:
            raise Fenced(f"{self.key} has expired")
        if not isinstance(reply, ReplyError):
            return
        # a write repeated after a lost connection is refused too: then the entry is there, and it is ours
        if reply.code == "OOM":
            raise OutOfMemory(str(reply))
        found = await self._bus.range(self.key, entry_id, entry_id)
        written = command[command.index(entry_id) + 1 :]
        if found and found[0][1] == [part if isinstance(part, bytes) else str(part).encode() for part in written]:
            return
        raise Fenced(f"{self.key} belongs to another replica")


def closing(key: str, ttl: int) -> Command:
    """Lets a completed journal expire after `ttl` seconds."""
    return ("EXPIRE", key, ttl)


# Adds an entry behind the terminal one, once. KEYS: journal. ARGV: once, type, time, data, terminal types.
# Returns its id; 'open' while the response is being written: its writer's ids are smaller than the clock's, and such an
# entry would shut it out; 'gone' when the journal has expired.
_APPEND_AFTER = Script("""
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 500)
if #last == 0 then return 'gone' end
-- an entry that came behind the end proves it, however many there are
local ended = last[1][2][1] == 'once'
for _, entry in ipairs(last) do
  local f = {}
  for i = 1, #entry[2], 2 do f[entry[2][i]] = entry[2][i + 1] end
  if f['once'] == ARGV[1] then return entry[1] end
  for i = 5, #ARGV do
    if f['type'] == ARGV[i] then ended = true end
  end
end
if not ended then return 'open' end
return redis.call('XADD', KEYS[1], '*', 'once', ARGV[1], 'type', ARGV[2], 'time', ARGV[3], 'data', ARGV[4])
""")


async def append_after(
    bus: Bus, key: str, kind: EntryType, data: dict[str, Any], *, once: str, patience: float = 30.0
) -> str | None:
    """The id of an entry that another participant adds after completion (critique, pairwise, reward).

    once: a name under which it is added at most one time.
    patience: seconds to wait for a response that is still being written.
    None when the journal has expired or its response is not completed in time.
    """
    command = _APPEND_AFTER((key,), once, kind.value, now_ms(), orjson.dumps(data), *(t.value for t in TERMINAL))
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


async def read_journal(bus: Bus, key: str) -> list[JournalEntry]:
    """All entries, oldest first."""
    return [JournalEntry.parse(entry) for entry in await bus.range(key)]
