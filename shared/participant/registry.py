"""Who is alive: every replica keeps a key with a time to live, refreshed by its heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import orjson

from shared.bus import Bus, Command, Connection, ReplyError, create_group_command
from shared.bus.keys import KNOWN_TOOLS, REPLICAS, replica_key
from shared.bus.replies import NO_WRITES, checked
from shared.bus.streams import by_name
from shared.bus.visibility import Visibility, Watch
from shared.contracts import MCP, TOOL_REQUEST, is_untrusted
from shared.errors import TransientError
from shared.telemetry.logging import get_logger
from shared.telemetry.unread import not_understood

log = get_logger()

# The form of what a process keeps on the bus. Operators see it; 0.1.0 writes an older one too beside whoever has less.
RELEASE = 2
# A name that models and users can use. So many are remembered, those first that somebody serves.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_TOOLS = 1_000
# Unfinished requests of an untrusted worker's tool above which further calls are refused: the worker may not read them,
# and nothing that waits in a stream is ever removed.
MOST_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One running process. `facts` is what the participant says of itself (model, backend, …); times in ms.

    `release`: see RELEASE; 0 where a process does not know of it.
    """

    participant: str
    replica: str
    state: str
    started: int
    seen: int
    in_flight: int = 0
    concurrency: int = 0
    handled: int = 0
    tools: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    release: int = 0


def may_serve(participant: str, tool: object) -> bool:
    """Return whether a participant may announce a tool.

    An untrusted worker may announce its own tools only: a web worker the tool of its name, mcp those named
    `server__tool`.
    """
    if participant == MCP:
        return "__" in str(tool)
    return tool == participant or not is_untrusted(participant)


_FIELDS = frozenset(item.name for item in fields(ReplicaInfo))
# Of the others: numbers.
_KINDS: dict[str, type] = {"participant": str, "replica": str, "state": str, "tools": list, "facts": dict}


def _parsed(member: str, value: bytes) -> ReplicaInfo | None:
    """What a replica wrote under its own name, without what a newer version says in addition; None when it is not
    readable, or speaks of another replica: who may write under a name, Redis sees to."""
    try:
        written = orjson.loads(value)
        info = ReplicaInfo(**{name: written[name] for name in _FIELDS & written.keys()})
    except (orjson.JSONDecodeError, AttributeError, TypeError) as exc:
        not_understood(REPLICAS, member, f"not a replica: {exc}", value)
        return None
    # one that writes nonsense must not stop those who read it
    wrong = sorted(name for name in _FIELDS if not isinstance(getattr(info, name), _KINDS.get(name, int)))
    if not wrong and not all(isinstance(schema, dict) for schema in info.tools):
        wrong = ["tools"]
    if wrong:
        not_understood(REPLICAS, member, f"of a wrong type: {', '.join(wrong)}", value)
        return None
    if f"{info.participant}/{info.replica}" != member:
        not_understood(REPLICAS, member, "it speaks of another replica", value)
        return None
    return info


def announcing(info: ReplicaInfo, ttl_ms: int) -> list[Command]:
    """Says that a replica lives, for `ttl_ms`."""
    member = f"{info.participant}/{info.replica}"
    return [
        ("SET", replica_key(info.participant, info.replica), orjson.dumps(asdict(info)), "PX", ttl_ms),
        ("ZADD", REPLICAS, info.seen, member),
    ]


def still_there(participant: str, replica: str, ttl_ms: int) -> Command:
    """Lets what a replica said last count for another `ttl_ms` (whole seconds): possible in a full Redis too."""
    return ("EXPIRE", replica_key(participant, replica), -(-ttl_ms // 1000))


def leaving(participant: str, replica: str) -> list[Command]:
    """Takes a replica out; from the index whoever reads it does that too."""
    return [("DEL", replica_key(participant, replica)), ("ZREM", REPLICAS, f"{participant}/{replica}")]


async def repair_index(connection: Connection) -> None:
    """Remove an index whose key has another type; heartbeats write it again."""
    for key, kind in ((REPLICAS, b"zset"), (KNOWN_TOOLS, b"set")):
        if await connection.call("TYPE", key) not in (kind, b"none"):
            log.error("registry.index_overwritten", key=key)
            await connection.call("DEL", key)


# A stack has started after so many seconds; meanwhile its participants look so often who else is there.
SETTLING = 60.0
_SOON = 0.2
# Nobody's idea of the bus's time is so far (ms) ahead of it.
_AHEAD_MS = 60_000


class Registry:
    """The live replicas and their tools, as of half a heartbeat ago at most.

    While `run` runs, callers find the snapshot fresh and need not wait for two round trips. After an outage, the
    replicas of the last snapshot count as live until they had time to come back (see Watch) and to announce themselves.
    heartbeat: seconds between two announcements of a replica.
    """

    def __init__(self, bus: Bus, heartbeat: float) -> None:
        self._bus = bus
        self._freshness = heartbeat / 2
        self._visibility = Visibility(heartbeat)
        self._snapshot: list[ReplicaInfo] = []
        self._served: dict[str, dict[str, Any]] = {}
        self._offered: dict[str, dict[str, Any]] = {}
        self._overloaded: set[str] = set()
        self._taken = float("-inf")
        self._watch = Watch(self._visibility.gap_ms)
        self._lock = asyncio.Lock()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Keeps the snapshot fresh, as soon as somebody has asked for it once, until cancelled."""
        await self._wanted.wait()
        settled = time.monotonic() + SETTLING
        while True:
            # a fifth of the time is left for reading it; in a stack that starts, tools come one after the other
            pause = self._freshness * 0.8
            await asyncio.sleep(pause if time.monotonic() >= settled else min(pause, _SOON))
            with contextlib.suppress(TransientError, ReplyError):
                await self.replicas(fresh=True)

    async def replicas(self, *, fresh: bool = False) -> list[ReplicaInfo]:
        """Live replicas, by participant and age."""
        self._wanted.set()
        if fresh or self._stale:
            async with self._lock:
                if fresh or self._stale:
                    self._snapshot = self._merge_presumed_alive(*await self._read())
                    self._served = _served(self._snapshot)
                    self._offered = {
                        name: {"type": "function", "function": schema["function"]}
                        for name, schema in self._served.items()
                        if not schema.get("internal")
                    }
                    self._taken = time.monotonic()
                    await self._remember(sorted(self._served))
        return self._snapshot

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._taken > self._freshness

    def _merge_presumed_alive(self, found: list[ReplicaInfo], now: int, writes_refused: bool) -> list[ReplicaInfo]:
        """Add the replicas of the last snapshot as long as a live replica may not have renewed its entry yet."""
        if not writes_refused:
            self._watch.observe(now)
            if now >= self._watch.back + self._visibility.timeout_ms:
                return found
        there = {(info.participant, info.replica): info for info in (*self._snapshot, *found)}
        return sorted(there.values(), key=_place)

    async def _read(self) -> tuple[list[ReplicaInfo], int, bool]:
        """Return the live replicas in order, the server's time (ms), and whether Redis refuses all writes.

        Entries from before the server's clock went back are left out until they are renewed.
        """
        # An empty member never exists: this write changes nothing, but shows whether writes are refused.
        nothing, *replies = await self._bus.link.pipe_raw(
            [("ZADD", REPLICAS, "XX", 0, ""), ("ZRANGE", REPLICAS, 0, -1), ("TIME",)]
        )
        writes_refused = isinstance(nothing, ReplyError) and nothing.code in NO_WRITES
        index, (seconds, micros) = map(checked, replies)
        now = int(seconds) * 1000 + int(micros) // 1000
        raw = [member.decode(errors="replace") for member in index]
        members = [member for member in raw if "/" in member]
        for member in set(raw) - set(members):
            not_understood(REPLICAS, member, "not the name of a replica: participant/replica")
        if not members:
            return [], now, writes_refused
        values = await self._bus.link.pipe_raw([("GET", replica_key(*member.split("/", 1))) for member in members])
        gone = [member for member, value in zip(members, values, strict=True) if value is None]
        if gone:
            await self._bus.link.pipe_raw([("ZREM", REPLICAS, *gone)])
        found = [
            info
            for member, value in zip(members, values, strict=True)
            if isinstance(value, bytes) and (info := _parsed(member, value)) is not None and info.seen < now + _AHEAD_MS
        ]
        return sorted(found, key=_place), now, writes_refused

    async def _remember(self, names: Sequence[str]) -> None:
        """Store the names of tools for the time when no worker serves them: a tool worker may not write them itself.

        Also create the groups of untrusted workers, which may create none: Redis does not count the memory of group
        names. The same pipeline reads the number of waiting requests.
        """
        if not names:
            return
        participants = {info.participant for info in self._snapshot} - {MCP}
        # A web worker serves the tool of its name.
        workers = sorted(filter(is_untrusted, participants))
        tools = sorted({*workers, *filter(is_untrusted, names)})
        known, count, *replies = await self._bus.link.pipe_raw(
            [
                ("SMISMEMBER", KNOWN_TOOLS, *names),
                ("SCARD", KNOWN_TOOLS),
                *(create_group_command(TOOL_REQUEST.for_tool(worker).stream, worker) for worker in workers),
                *(("XINFO", "GROUPS", TOOL_REQUEST.for_tool(tool).stream) for tool in tools),
            ]
        )
        waiting = zip(tools, replies[len(workers) :], strict=True)
        self._overloaded = {tool for tool, groups in waiting if _unfinished(groups) > MOST_WAITING}
        if isinstance(known, ReplyError):
            if known.code == "WRONGTYPE":
                await repair_index(self._bus.link)
            return
        new = [name for name, there in zip(names, known, strict=True) if not there]
        if new and count + len(new) > _MOST_TOOLS:
            # the streams of those that are there are kept short by their names
            gone = [
                name
                for name in await self._bus.link.call("SMEMBERS", KNOWN_TOOLS)
                if name.decode(errors="replace") not in names
            ]
            await self._bus.link.pipe_raw([("SREM", KNOWN_TOOLS, name) for name in gone])
            count -= len(gone)
        if new and count + len(new) <= _MOST_TOOLS:
            await self._bus.link.pipe_raw([("SADD", KNOWN_TOOLS, *new)])

    async def live(self, participant: str) -> list[ReplicaInfo]:
        return [info for info in await self.replicas() if info.participant == participant]

    async def tools(self) -> dict[str, dict[str, Any]]:
        """Schemas (OpenAI form) of the tools that a live worker offers to models, by name."""
        await self.replicas()
        return self._offered

    def cached(self, tool: str) -> dict[str, Any] | None:
        """Return the schema that `served` would return, if the snapshot is fresh and has it."""
        return None if self._stale else self._served.get(tool)

    async def served(self, tool: str) -> dict[str, Any] | None:
        """The schema that a live worker of this tool announced, be it internal or not; None when there is none.

        Nobody is told that a tool is not there because its worker came a moment ago.
        """
        if self.cached(tool) is None:
            await self.replicas(fresh=tool not in self._served)
        return self._served.get(tool)

    def overloaded(self, tool: str) -> bool:
        """Return whether so many requests wait for a tool of an untrusted worker that further ones are refused."""
        return tool in self._overloaded

    async def has_worker(self, tool: str) -> bool:
        """Return whether a live replica has announced this tool, also one that starts or stops."""
        return any(_name(schema) == tool for info in await self.replicas() for schema in info.tools)

    async def known(self, tool: str) -> bool:
        """True when a worker of this tool was ever announced."""
        return bool(await self._bus.link.call("SISMEMBER", KNOWN_TOOLS, tool))


def _unfinished(groups: Any) -> int:
    """Return the largest number of unfinished entries of a group, from a reply of XINFO GROUPS."""
    rows = map(by_name, groups if isinstance(groups, list) else ())
    return max((row["pending"] + (row.get("lag") or 0) for row in rows), default=0)


def _place(info: ReplicaInfo) -> tuple[str, int, str]:
    return info.participant, info.started, info.replica


def _name(schema: dict[str, Any]) -> Any:
    function = schema.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _served(replicas: Sequence[ReplicaInfo]) -> dict[str, dict[str, Any]]:
    """Tool → its schema; of several workers' schemas the one of the worker that has been there longest."""
    found: dict[str, dict[str, Any]] = {}
    for info in replicas:
        for schema in info.tools if info.state == "ready" else ():
            name = _name(schema)
            own = may_serve(info.participant, name)
            if own and isinstance(name, str) and _NAME.fullmatch(name):
                found.setdefault(name, schema)
            else:
                why = "of another participant" if not own else "no name that a model can use"
                not_understood(REPLICAS, f"{info.participant}/{info.replica}", f"a tool is not offered: {why}",
                               repr(name).encode())  # fmt: skip
    return found
