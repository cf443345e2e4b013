"""Publishing, reading state and retention: the bus as one object."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import AsyncExitStack, suppress
from functools import lru_cache
from typing import Any

from shared.bus.clock import BusClock
from shared.bus.keys import KNOWN_TOOLS, once_key, stream_key
from shared.bus.link import Connection
from shared.bus.port import Command, ConnectionLost, Reply, ReplyError
from shared.bus.scripts import DROP_EXCESS, PUBLISH_ONCE, REMOVE_IDLE_CONSUMERS, UNOWNED_CONSUMER, UNREAD, load_scripts
from shared.bus.server import Server
from shared.contracts import DEAD_LETTER, SUBJECTS, TOOL_REQUEST, TOOL_RESULT, Outgoing, Subject
from shared.telemetry.logging import get_logger

log = get_logger()

RETENTION = 86_400
# A message may come again as long as its first delivery is not finished; no retention is shorter than that.
_ONCE_AT_LEAST = 60
# What is kept for whoever may look at it, beyond what somebody still needs, takes about so many bytes of a stream.
_KEPT_BYTES = 32_000_000
# Every so many entries of an event stream cut it, and each that makes up a good part of so many times this size:
# looking at the beginning each time costs Redis as much as the entry itself.
_UNCUT = 32
_UNCUT_BYTES = 10_000
# The most entries of a work stream that stay a while though they are finished.
OBSERVED = 1_000
# Ids are given by the server's clock, in ms: none is this large before the year 5138. One that is was chosen by
# somebody who wants no further ones to come.
_TOO_LATE = 10**14
BEFORE_TOO_LATE = f"({_TOO_LATE}-0"
# Every holder renews its lease more often (ms).
_MAX_LEASE_MS = 60_000

# Calls of DROP_EXCESS for one group at a time; each removes at most a hundred consumers.
_EXCESS_STEPS = 100
# Keys that a look through all of them takes at once.
_SCAN = 1_000

Entry = tuple[str, list[bytes]]


class Bus:
    """A process's access to Redis, over three connections however many queries or clients the process serves.

    link: for commands. pulse: for heartbeats, which must not wait behind a long message. reader: for blocking group
    reads. Each further read that blocks has a `dedicated` connection.
    """

    def __init__(self, url: str, source: str, *, timeout: float = 5.0, retention: int = RETENTION) -> None:
        """Raises SettingsError when the URL has none of the known forms."""
        self.source = source
        self._retention = retention
        self.timeout = timeout
        # Seconds that a blocking read waits: its lost reply is noticed this much later than another one.
        self.block = min(2.0, 2 * timeout)
        self._clock = BusClock()
        self.server = Server(url)
        # Whether the URL names one of the server's users; a server without users permits everything.
        self.users = self.server.username not in (None, "default")
        self.link = Connection(self.server, name=f"{source}:commands", timeout=timeout, clock=self._clock)
        self.pulse, self.reader = self.dedicated("pulse"), self.dedicated("groups")
        # event stream → entries since this process cut it, a large one counted as several; its first always cuts
        self._uncut: dict[str, int] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Bus:
        for link in (self.link, self.pulse, self.reader):
            await self._stack.enter_async_context(link)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def unblock(self) -> bool:
        """End the group read in progress. Return False when it does not block in Redis."""
        return bool(await self.pulse.call("CLIENT", "UNBLOCK", self.reader.client_id))

    def dedicated(self, kind: str) -> Connection:
        """Return a further connection, for a read that blocks; `async with` opens it."""
        return self.link.dedicated(f"{self.source}:{kind}")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def now_ms(self) -> int:
        """Milliseconds since the epoch by Redis' clock: for what processes compare with each other."""
        return self._clock.now_ms()

    def left(self, deadline: int, stamped: str | int) -> float:
        """Seconds until a deadline (ms, by Redis' clock); also after that clock went forward. stamped: an id, or a time
        (ms), by the clock that the deadline was set by; what is neither is of now."""
        return self._clock.left(deadline, stamped) / 1000

    async def tell_time(self) -> None:
        """Asks Redis for its time. A lost connection tells it when it is there again."""
        asked = time.monotonic()
        with suppress(ConnectionLost):
            self._clock.learn(await self.pulse.call("TIME", retry=False), asked)

    async def server_time(self) -> int:
        """Redis' time, asked for: no id that it gives from now on is smaller. Milliseconds since the epoch."""
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

    async def keep_scripts(self) -> None:
        """Load the scripts that Redis has lost, also for users that may not load any (see Script)."""
        await load_scripts(self.pulse.pipe_raw)

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────

    def publishing(self, message: Outgoing) -> Command:
        """The command that publishes a message, to be sent together with others."""
        envelope = message.envelope
        stream, keep = _where(envelope.subject)
        cut = () if keep is None else self._cutting(stream, keep, len(envelope.payload))
        fields = envelope.fields(self.source)
        if message.once is None:
            return ("XADD", stream, *cut, "*", *fields)
        keys = (stream, once_key(stream, message.once))
        return PUBLISH_ONCE(keys, self._once_seconds(message), *cut, "*", *fields)

    def _cutting(self, stream: str, keep: int, size: int) -> Command:
        """The part of an XADD that cuts an event stream, by length and by bytes, when that is due."""
        self._uncut[stream] = uncut = self._uncut.get(stream, _UNCUT) + 1 + size // _UNCUT_BYTES
        if uncut < _UNCUT:
            return ()
        self._uncut[stream] = 0
        return ("MAXLEN", "~", min(keep, max(1, _KEPT_BYTES // (size or 1))))

    def _once_seconds(self, message: Outgoing) -> int:
        """How long a message is known: as long as what is kept of its query."""
        deadline = message.envelope.deadline
        ahead = 0 if deadline is None else max(0, deadline - self.now_ms()) // 1000
        return ahead + max(self._retention, _ONCE_AT_LEAST)

    async def publish(self, *messages: Outgoing) -> list[str]:
        """The ids of the entries. A repeated send after a lost connection may add an entry twice: a message for
        which that matters carries `once`."""
        return [reply.decode() for reply in await self.link.pipe([self.publishing(m) for m in messages])]

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────

    async def subjects(self) -> list[Subject[Any]]:
        """Every subject with a fixed name and those of every tool that has been announced."""
        tools = sorted(name.decode(errors="replace") for name in await self.link.call("SMEMBERS", KNOWN_TOOLS))
        return [*SUBJECTS, *(base.for_tool(name) for name in tools for base in (TOOL_REQUEST, TOOL_RESULT))]

    async def backlog(self, stream: str, group: str) -> int:
        """Entries that the group has not finished: unread and in flight. Of what is no stream none."""
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
        """True when the group has read and acknowledged the entry."""
        row = (await self.groups(stream)).get(group)
        if row is None:
            return True
        if order(entry_id) > order(row["last-delivered-id"].decode()):
            return False
        (pending,) = await self.link.pipe_raw([("XPENDING", stream, group, entry_id, entry_id, 1)])
        return isinstance(pending, ReplyError) or not pending

    async def groups(self, stream: str) -> dict[str, dict[str, Any]]:
        """What Redis tells of a stream's groups, by their names; of what is no stream nothing."""
        (rows,) = await self.link.pipe_raw([("XINFO", "GROUPS", stream)])
        return {} if isinstance(rows, ReplyError) else {row["name"].decode(): row for row in map(named, rows)}

    async def scan(self, pattern: str | bytes) -> AsyncIterator[list[bytes]]:
        """Yield pages of the keys that match. A page may be empty, and a key may come twice."""
        cursor = b"0"
        while True:
            cursor, keys = await self.link.call("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN)
            yield keys
            if cursor == b"0":
                break

    async def range(self, stream: str, start: str = "-", end: str = "+", count: int | None = None) -> list[Entry]:
        """Entries between two ids, both included unless prefixed by `(`."""
        limit = () if count is None else ("COUNT", count)
        return entries(await self.link.call("XRANGE", stream, start, end, *limit))

    async def latest(self, stream: str, count: int, *, before: str = "+") -> list[Entry]:
        """The newest entries, newest first; of those up to an id, which is left out when prefixed by `(`."""
        return entries(await self.link.call("XREVRANGE", stream, before, "-", "COUNT", count))

    async def newest(self, stream: str) -> str:
        """The id after which only entries written from now on come; of what is no stream, of an empty one."""
        try:
            found = await self.latest(stream, 1)
        except ReplyError as exc:
            log.error("bus.not_a_stream", stream=stream, error=str(exc))
            found = []
        return found[0][0] if found else "0-0"

    # ── retention ────────────────────────────────────────────────────────────────────────────────────────────

    async def trim(self, subject: Subject[Any], *, spare_ms: int = 0, abandoned: Container[str] = ()) -> int:
        """Removes what every group of a work stream has finished, and what is old of an event stream; the number of
        entries removed.

        spare_ms: finished entries that are younger stay, so that whoever looks now and then sees them too; not when
        there are more than OBSERVED of them, or they are too large.
        abandoned: groups that hold nothing back any more. A stream that no other group reads is bounded by length and
        bytes. Dead letters wait for an operator.
        """
        now = self.now_ms()
        if subject.kind == "event":
            if subject.name == DEAD_LETTER.name:
                return 0
            return await self._cut(subject.stream, "MINID", now - self._retention * 1000)
        holding = [row for name, row in (await self.groups(subject.stream)).items() if name not in abandoned]
        if not holding:
            _, keep = await self._bound(subject.stream, subject.keep)
            return await self._cut(subject.stream, "MAXLEN", keep)
        bounds = [await self._unfinished(subject.stream, row) for row in holding]
        oldest = min(bounds, key=order)
        if spare_ms:
            length, keep = await self._bound(subject.stream, OBSERVED)
            if length <= keep:
                oldest = min(oldest, f"{now - spare_ms}-0", key=order)
        removed = await self._cut(subject.stream, "MINID", oldest)
        return removed + int(await self.link.call("XTRIM", subject.stream, "MINID", "=", oldest))

    def sane(self, found: list[Entry]) -> list[Entry]:
        """Entries of a stream, without those with an id behind which nothing would ever come."""
        if not found or order(found[-1][0])[0] < _TOO_LATE:
            return found
        return [entry for entry in found if order(entry[0])[0] < _TOO_LATE]

    async def unblock_stream(self, stream: str) -> bool:
        """Whether a stream that nobody reads as a group had an id that leaves no room for further ones; it has gone.

        Whoever may write to a stream may choose an id, and Redis takes no smaller one any more, also when that entry is
        deleted. So the stream is made anew, with the entries that were there before. Raises ReplyError.
        """
        last = ("XRANGE", stream, f"{_TOO_LATE}-0", "+", "COUNT", 1)
        late, length = await self.pulse.pipe_raw([last, ("XLEN", stream)])
        # XINFO repeats the first and the last entry, however large: it is asked where nothing else can tell
        if isinstance(late, ReplyError) or (not late and length):
            return False
        (about,) = await self.pulse.pipe_raw([("XINFO", "STREAM", stream)])
        if isinstance(about, ReplyError) or order(named(about)["last-generated-id"].decode())[0] < _TOO_LATE:
            return False
        kept = await self.range(stream, "-", BEFORE_TOO_LATE)
        await self.link.commit(
            [
                ("DEL", stream),
                # it is there, also when nothing is left of it
                ("XGROUP", "CREATE", stream, "nobody", "0", "MKSTREAM"),
                ("XGROUP", "DESTROY", stream, "nobody"),
                *(("XADD", stream, entry_id, *fields) for entry_id, fields in kept),
                # no id that has been given comes again: what was seen up to one stays seen
                ("XSETID", stream, max([f"{self.now_ms()}-0", *(entry_id for entry_id, _ in kept)], key=order)),
            ]
        )
        log.error("bus.stream_unblocked", stream=stream, kept=len(kept))
        return True

    async def _bound(self, stream: str, keep: int) -> tuple[int, int]:
        """A stream's length, and how many of its entries may stay: `keep`, or fewer where they are large."""
        length, size = await self.link.pipe([("XLEN", stream), ("MEMORY", "USAGE", stream)])
        if size:
            keep = min(keep, max(1, length * _KEPT_BYTES // size))
        return length, keep

    async def _cut(self, stream: str, way: str, bound: str | int) -> int:
        """Removes what is beyond a bound, up to a node, a hundred entries at a time, so that nobody waits for long; how
        many there were."""
        removed = 0
        while found := int(await self.link.call("XTRIM", stream, way, "~", bound, "LIMIT", 100)):
            removed += found
        return removed

    async def absent(self, subject: Subject[Any], silent_ms: int) -> list[str]:
        """The groups of a stream of which no consumer has given a sign of life for so long. Silent consumers that
        hold nothing are removed."""
        names = list(await self.groups(subject.stream))
        heard = await self.link.pipe_raw([REMOVE_IDLE_CONSUMERS((subject.stream,), name, silent_ms) for name in names])
        return [name for name, count in zip(names, heard, strict=True) if count == 0]

    async def drop_excess_consumers(self, stream: str) -> None:
        """Remove excess consumers (see DROP_EXCESS); any replica may claim their entries at once."""
        for group in await self.groups(stream):
            for _ in range(_EXCESS_STEPS):
                if not await self.link.call(*DROP_EXCESS((stream,), group, UNOWNED_CONSUMER)):
                    break

    async def _unfinished(self, stream: str, row: dict[str, Any]) -> str:
        """The lowest id that a group still needs."""
        if row["pending"]:
            summary = await self.link.call("XPENDING", stream, row["name"])
            if summary[1] is not None:
                return str(summary[1].decode())
        ms, seq = order(row["last-delivered-id"].decode())
        return f"{ms}-{seq + 1}"


def grouping(stream: str, group: str) -> Command:
    """Makes a group. From id 0: what was written before it existed, or after a flush, is work too."""
    return ("XGROUP", "CREATE", stream, group, "0", "MKSTREAM")


def event_length(subject: str) -> int | None:
    """How many entries an event stream keeps; None for a work stream, which is trimmed by what is finished."""
    return TOOL_RESULT.keep if subject.startswith(_OF_A_TOOL) else _EVENTS.get(subject)


@lru_cache(maxsize=4096)
def _where(subject: str) -> tuple[str, int | None]:
    """A subject's stream, and how many entries that keeps."""
    return stream_key(subject), event_length(subject)


_OF_A_TOOL = TOOL_RESULT.name + "."
_EVENTS = {subject.name: subject.keep for subject in SUBJECTS if subject.kind == "event"}


def order(entry_id: str) -> tuple[int, int]:
    """A stream id as a value that compares like Redis compares ids."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


def entries(reply: Reply) -> list[Entry]:
    return [(entry_id.decode(), fields) for entry_id, fields in reply or ()]


def size_of(entry: Entry) -> int:
    """The bytes of an entry's fields."""
    return sum(map(len, entry[1]))


def named(row: Sequence[Any]) -> dict[str, Any]:
    """What XINFO tells of something, by name."""
    return {key.decode(): value for key, value in zip(row[::2], row[1::2], strict=True)}
