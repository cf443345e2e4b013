"""Publishing, reading state and retention: the bus as one object."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import AsyncExitStack, suppress
from functools import lru_cache
from typing import Any

from shared.bus.clock import BusClock
from shared.bus.connection import Connection
from shared.bus.keys import KNOWN_TOOLS, once_key, stream_key
from shared.bus.replies import Command, ConnectionLost, Reply, ReplyError
from shared.bus.scripts import DROP_EXCESS, PUBLISH_ONCE, REMOVE_IDLE_CONSUMERS, UNOWNED_CONSUMER, UNREAD, load_scripts
from shared.bus.server import Server
from shared.contracts import DEAD_LETTER, SUBJECTS, TOOL_REQUEST, TOOL_RESULT, Outgoing, Subject
from shared.envelope import order
from shared.telemetry.logging import get_logger

log = get_logger()

RETENTION = 86_400
# Idempotency keys live at least this long (seconds): a message may be repeated until its first delivery is finished.
_MIN_ONCE_S = 60
# Retention budget per stream, in bytes, for entries that every group has acknowledged.
_RETENTION_BYTES = 32_000_000
# Trim an event stream with every 32nd entry, or sooner after large ones: trimming costs Redis as much as an entry. An
# entry of this many bytes counts twice.
_TRIM_INTERVAL = 32
_TRIM_INTERVAL_BYTES = 10_000
# Finished entries of a work stream that stay for observers, at most.
MAX_OBSERVED = 1_000
# The server's clock gives ids, in ms: none is this large before the year 5138. A larger one was chosen by a writer, so
# that Redis accepts no further entries.
_POISONED_MS = 10**14
BEFORE_POISONED = f"({_POISONED_MS}-0"
# No lease is longer (ms).
_MAX_LEASE_MS = 60_000

# Calls of DROP_EXCESS for one group at a time; each removes at most a hundred consumers.
_EXCESS_STEPS = 100
# Keys per call of SCAN.
_SCAN_COUNT = 1_000

Entry = tuple[str, list[bytes]]


class Bus:
    """A process's access to Redis, over three connections however many queries or clients the process serves.

    link: for commands. heartbeat_link: for heartbeats, which must not wait behind a long message. reader: for blocking
    group reads. Each further blocking read has a `dedicated` connection.
    """

    def __init__(self, url: str, source: str, *, timeout: float = 5.0, retention: int = RETENTION) -> None:
        """Raises SettingsError when the URL has none of the known forms."""
        self.source = source
        self._retention = retention
        self.timeout = timeout
        # Seconds that a blocking read waits. A lost reply of it is noticed this much later.
        self.block = min(2.0, 2 * timeout)
        self._clock = BusClock()
        self.server = Server(url)
        # Whether the URL names one of the server's users; a server without users permits everything.
        self.users = self.server.username not in (None, "default")
        self.link = Connection(self.server, name=f"{source}:commands", timeout=timeout, clock=self._clock)
        self.heartbeat_link, self.reader = self.dedicated("heartbeats"), self.dedicated("groups")
        # event stream → entries since this process trimmed it, a large one counted as several; the first one trims
        self._untrimmed: dict[str, int] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Bus:
        for link in (self.link, self.heartbeat_link, self.reader):
            await self._stack.enter_async_context(link)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def unblock_reader(self) -> bool:
        """End the group read in progress. Return False when it does not block in Redis."""
        return bool(await self.heartbeat_link.call("CLIENT", "UNBLOCK", self.reader.client_id))

    def dedicated(self, kind: str) -> Connection:
        """Return a further connection, for a read that blocks; `async with` opens it."""
        return self.link.dedicated(f"{self.source}:{kind}")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def now_ms(self) -> int:
        """Return milliseconds since the epoch by Redis' clock, for times that processes compare."""
        return self._clock.now_ms()

    def left(self, deadline: int, stamped: str | int) -> float:
        """Return the seconds until a deadline (ms, by Redis' clock), also after that clock went forward.

        stamped: an id or a time (ms) by the clock that the deadline was set by. Other values mean now.
        """
        return self._clock.left(deadline, stamped) / 1000

    async def learn_time(self) -> None:
        """Read Redis' time. Does nothing when the connection is lost: the next one reads the time."""
        asked = time.monotonic()
        with suppress(ConnectionLost):
            self._clock.learn(await self.heartbeat_link.call("TIME", retry=False), asked)

    async def server_time(self) -> int:
        """Read Redis' time, in ms since the epoch. No id that Redis gives from now on is smaller."""
        seconds, micros = await self.link.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def lease(self, key: str, holder: str, ms: int) -> bool:
        """Acquire or renew the lease `key`; return whether `holder` has it for the next `ms` milliseconds.

        A holder renews its lease even while Redis is full. An abandoned lease expires after its time, or after a minute
        when the server's clock has gone back meanwhile. Raises ReplyError and BusFull.
        """
        held = await self.link.call("GET", key)
        if held is None:
            if await self.link.call("SET", key, holder, "NX", "PX", ms):
                return True
            # A SET that was repeated after a lost connection finds its own value.
            held = await self.link.call("GET", key)
        if held != holder.encode():
            await self.link.call("PEXPIRE", key, max(ms, _MAX_LEASE_MS), "LT")
            return False
        return bool(await self.link.call("PEXPIRE", key, ms))

    async def load_scripts(self) -> None:
        """Load the scripts that Redis has lost, also for users that may not load any (see Script)."""
        await load_scripts(self.heartbeat_link.pipe_raw)

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────

    def publishing(self, message: Outgoing) -> Command:
        """Return the command that publishes a message."""
        envelope = message.envelope
        stream, keep = _stream_and_length(envelope.subject)
        trim = () if keep is None else self._trim_arguments(stream, keep, len(envelope.payload))
        fields = envelope.fields(self.source)
        if message.once is None:
            return ("XADD", stream, *trim, "*", *fields)
        keys = (stream, once_key(stream, message.once))
        return PUBLISH_ONCE(keys, self._once_seconds(message), *trim, "*", *fields)

    def _trim_arguments(self, stream: str, keep: int, size: int) -> Command:
        """Return the arguments of an XADD that trim an event stream by length and bytes; none when not due."""
        count = self._untrimmed.get(stream, _TRIM_INTERVAL) + 1 + size // _TRIM_INTERVAL_BYTES
        self._untrimmed[stream] = count if count < _TRIM_INTERVAL else 0
        if count < _TRIM_INTERVAL:
            return ()
        return ("MAXLEN", "~", min(keep, max(1, _RETENTION_BYTES // (size or 1))))

    def _once_seconds(self, message: Outgoing) -> int:
        """Return the lifetime of a message's idempotency key: its query's records live as long."""
        deadline = message.envelope.deadline
        ahead = 0 if deadline is None else max(0, deadline - self.now_ms()) // 1000
        return ahead + max(self._retention, _MIN_ONCE_S)

    async def publish(self, *messages: Outgoing) -> list[str]:
        """Publish messages and return the ids of their entries.

        After a lost connection the send is repeated, and may add an entry twice, unless the message has `once`.
        """
        return [reply.decode() for reply in await self.link.pipe([self.publishing(m) for m in messages])]

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────

    async def subjects(self) -> list[Subject[Any]]:
        """Return all subjects with fixed names, and those of every announced tool."""
        tools = sorted(name.decode(errors="replace") for name in await self.link.call("SMEMBERS", KNOWN_TOOLS))
        return [*SUBJECTS, *(base.for_tool(name) for name in tools for base in (TOOL_REQUEST, TOOL_RESULT))]

    async def backlog(self, stream: str, group: str) -> int:
        """Return how many entries the group has not finished, unread or in flight; 0 if the key is not a stream."""
        if row := (await self.groups(stream)).get(group):
            lag = row.get("lag")
            if lag is None:
                lag = await self.link.call(*UNREAD((stream,), row["last-delivered-id"]))
            return int(lag + row["pending"])
        try:
            return int(await self.link.call("XLEN", stream))
        except ReplyError as exc:
            if exc.code != "WRONGTYPE":
                raise
            log.error("bus.not_a_stream", stream=stream, error=str(exc))
            return 0

    async def finished(self, stream: str, group: str, entry_id: str) -> bool:
        """Return whether the group has read and acknowledged the entry, or does not exist."""
        row = (await self.groups(stream)).get(group)
        if row is None:
            return True
        if order(entry_id) > order(row["last-delivered-id"].decode()):
            return False
        (pending,) = await self.link.pipe_raw([("XPENDING", stream, group, entry_id, entry_id, 1)])
        return isinstance(pending, ReplyError) or not pending

    async def groups(self, stream: str) -> dict[str, dict[str, Any]]:
        """Return the rows of XINFO GROUPS by group name; none if the key is not a stream."""
        (rows,) = await self.link.pipe_raw([("XINFO", "GROUPS", stream)])
        return {} if isinstance(rows, ReplyError) else {row["name"].decode(): row for row in map(by_name, rows)}

    async def scan(self, pattern: str | bytes) -> AsyncIterator[list[bytes]]:
        """Yield pages of the keys that match. A page may be empty, and a key may come twice."""
        cursor = b"0"
        while True:
            cursor, keys = await self.link.call("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
            yield keys
            if cursor == b"0":
                break

    async def range(self, stream: str, start: str = "-", end: str = "+", count: int | None = None) -> list[Entry]:
        """Return the entries between two ids, both included unless prefixed by `(`."""
        limit = () if count is None else ("COUNT", count)
        return entries(await self.link.call("XRANGE", stream, start, end, *limit))

    async def latest(self, stream: str, count: int, *, before: str = "+") -> list[Entry]:
        """Return the newest entries up to an id, newest first. The id is excluded when prefixed by `(`."""
        return entries(await self.link.call("XREVRANGE", stream, before, "-", "COUNT", count))

    async def newest(self, stream: str) -> str:
        """Return the cursor for reading only new entries: `0-0` if the stream is empty or the key has another type."""
        try:
            found = await self.latest(stream, 1)
        except ReplyError as exc:
            log.error("bus.not_a_stream", stream=stream, error=str(exc))
            found = []
        return found[0][0] if found else "0-0"

    # ── retention ────────────────────────────────────────────────────────────────────────────────────────────

    async def trim(self, subject: Subject[Any], *, spare_ms: int = 0, abandoned: Container[str] = ()) -> int:
        """Remove finished entries of a work stream, or old entries of an event stream; return how many.

        An entry is finished when every group has acknowledged it. Dead letters are never removed.
        spare_ms: younger finished entries stay for observers, up to MAX_OBSERVED entries and the retention budget.
        abandoned: groups whose unfinished entries are not needed. A stream without other groups is trimmed by length
        and bytes.
        """
        now = self.now_ms()
        if subject.kind == "event":
            if subject.name == DEAD_LETTER.name:
                return 0
            return await self._trim_in_steps(subject.stream, "MINID", now - self._retention * 1000)
        holding = [row for name, row in (await self.groups(subject.stream)).items() if name not in abandoned]
        if not holding:
            _, keep = await self._bound(subject.stream, subject.keep)
            return await self._trim_in_steps(subject.stream, "MAXLEN", keep)
        bounds = [await self._unfinished(subject.stream, row) for row in holding]
        oldest = min(bounds, key=order)
        if spare_ms:
            length, keep = await self._bound(subject.stream, MAX_OBSERVED)
            if length <= keep:
                oldest = min(oldest, f"{now - spare_ms}-0", key=order)
        removed = await self._trim_in_steps(subject.stream, "MINID", oldest)
        return removed + int(await self.link.call("XTRIM", subject.stream, "MINID", "=", oldest))

    async def reset_exhausted_ids(self, stream: str) -> bool:
        """Create a stream again if it has a poisoned id; return whether it had one. For streams without groups.

        A writer may choose an entry's id, and Redis accepts no smaller id later, even after XDEL. The new stream has
        all entries with valid ids. Raises ReplyError.
        """
        last = ("XRANGE", stream, f"{_POISONED_MS}-0", "+", "COUNT", 1)
        late, length = await self.heartbeat_link.pipe_raw([last, ("XLEN", stream)])
        # Only for an empty stream: XINFO returns the first and the last entry, however large.
        if isinstance(late, ReplyError) or (not late and length):
            return False
        (about,) = await self.heartbeat_link.pipe_raw([("XINFO", "STREAM", stream)])
        if isinstance(about, ReplyError) or order(by_name(about)["last-generated-id"].decode())[0] < _POISONED_MS:
            return False
        kept = await self.range(stream, "-", BEFORE_POISONED)
        await self.link.commit(
            [
                ("DEL", stream),
                # Creates the stream also when it has no valid entry.
                ("XGROUP", "CREATE", stream, "temporary", "0", "MKSTREAM"),
                ("XGROUP", "DESTROY", stream, "temporary"),
                *(("XADD", stream, entry_id, *fields) for entry_id, fields in kept),
                # Ids are not given twice: readers continue after the last one that they have seen.
                ("XSETID", stream, max([f"{self.now_ms()}-0", *(entry_id for entry_id, _ in kept)], key=order)),
            ]
        )
        log.error("bus.stream_unblocked", stream=stream, kept=len(kept))
        return True

    async def _bound(self, stream: str, keep: int) -> tuple[int, int]:
        """Return a stream's length, and how many entries may stay: `keep`, or fewer when they are large."""
        length, size = await self.link.pipe([("XLEN", stream), ("MEMORY", "USAGE", stream)])
        if size:
            keep = min(keep, max(1, length * _RETENTION_BYTES // size))
        return length, keep

    async def _trim_in_steps(self, stream: str, strategy: str, bound: str | int) -> int:
        """Remove entries beyond a bound, at most a hundred per call; return how many.

        A single large removal would keep Redis from serving other clients.
        """
        removed = 0
        while found := int(await self.link.call("XTRIM", stream, strategy, "~", bound, "LIMIT", 100)):
            removed += found
        return removed

    async def idle_groups(self, subject: Subject[Any], silent_ms: int) -> list[str]:
        """Return the groups whose consumers were all idle for `silent_ms`.

        Idle consumers without entries are removed.
        """
        names = list(await self.groups(subject.stream))
        active = await self.link.pipe_raw([REMOVE_IDLE_CONSUMERS((subject.stream,), name, silent_ms) for name in names])
        return [name for name, count in zip(names, active, strict=True) if count == 0]

    async def drop_excess_consumers(self, stream: str) -> None:
        """Remove excess consumers (see DROP_EXCESS); any replica may claim their entries at once."""
        for group in await self.groups(stream):
            for _ in range(_EXCESS_STEPS):
                if not await self.link.call(*DROP_EXCESS((stream,), group, UNOWNED_CONSUMER)):
                    break

    async def _unfinished(self, stream: str, row: dict[str, Any]) -> str:
        """Return the lowest id that a group has not finished."""
        if row["pending"]:
            summary = await self.link.call("XPENDING", stream, row["name"])
            if summary[1] is not None:
                return str(summary[1].decode())
        ms, seq = order(row["last-delivered-id"].decode())
        return f"{ms}-{seq + 1}"


def create_group_command(stream: str, group: str) -> Command:
    """Return the command that creates a group at id 0: earlier entries are work, too."""
    return ("XGROUP", "CREATE", stream, group, "0", "MKSTREAM")


def event_length(subject: str) -> int | None:
    """Return the maximum length of an event stream; None for a work stream."""
    return TOOL_RESULT.keep if subject.startswith(_OF_A_TOOL) else _EVENTS.get(subject)


@lru_cache(maxsize=4096)
def _stream_and_length(subject: str) -> tuple[str, int | None]:
    """Return a subject's stream and its maximum length."""
    return stream_key(subject), event_length(subject)


_OF_A_TOOL = TOOL_RESULT.name + "."
_EVENTS = {subject.name: subject.keep for subject in SUBJECTS if subject.kind == "event"}


def entries(reply: Reply) -> list[Entry]:
    return [(entry_id.decode(), fields) for entry_id, fields in reply or ()]


def drop_poisoned_ids(found: list[Entry]) -> list[Entry]:
    """Return the entries with valid ids (see Bus.reset_exhausted_ids)."""
    if not found or order(found[-1][0])[0] < _POISONED_MS:
        return found
    return [entry for entry in found if order(entry[0])[0] < _POISONED_MS]


def size_of(entry: Entry) -> int:
    """Return the size of an entry's fields in bytes."""
    return sum(map(len, entry[1]))


def by_name(row: Sequence[Any]) -> dict[str, Any]:
    """Return the values of an XINFO reply by their names."""
    return {key.decode(): value for key, value in zip(row[::2], row[1::2], strict=True)}
