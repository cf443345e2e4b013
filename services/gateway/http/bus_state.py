"""The bus as metrics and operators see it, read when they ask: a few round trips, however many streams there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.bus import Bus, Command, ReplyError
from shared.bus.keys import starts_key
from shared.bus.scripts import UNREAD
from shared.bus.streams import by_name
from shared.contracts import DEAD_LETTER
from shared.envelope import order


@dataclass(frozen=True, slots=True)
class GroupReading:
    """handled: entries finished since the group was made; None where Redis has lost count.

    lost: whether Redis has lost count of what is unread, so that scalers see none of it; `lag` is counted then.
    oldest: seconds since the oldest entry was written that the group has not finished; 0 when there is none.
    served: seconds since one of its consumers gave a sign of life; None when it has none.
    """

    stream: str
    group: str
    consumers: int
    pending: int
    lag: int
    lost: bool
    handled: int | None
    oldest: float
    served: float | None


@dataclass(frozen=True, slots=True)
class BusReading:
    """lengths, ages: of each stream; ages in seconds. dead, dead_total: dead letters now, and since the stream exists.

    redis: what the server says of its memory and clients.
    """

    lengths: dict[str, int]
    ages: dict[str, float]
    groups: list[GroupReading]
    dead: int
    dead_total: int
    redis: dict[str, float] = field(default_factory=dict)


async def read_starts(bus: Bus, participants: Sequence[str]) -> dict[str, int]:
    """How many replicas of each were ever started."""
    counts = await bus.link.pipe_raw([("GET", starts_key(name)) for name in participants])
    return {name: _number(count) for name, count in zip(participants, counts, strict=True)}


async def read_bus(bus: Bus) -> BusReading:
    """Raises BusUnavailable."""
    streams = list(dict.fromkeys(subject.stream for subject in await bus.subjects()))
    asked: list[Command] = []
    for stream in streams:
        asked += [
            ("XLEN", stream),
            ("XRANGE", stream, "-", "+", "COUNT", 1),
            ("XINFO", "GROUPS", stream),
        ]
    tail: list[Command] = [
        ("XLEN", DEAD_LETTER.stream),
        ("XINFO", "STREAM", DEAD_LETTER.stream),
        ("INFO", "memory"),
        ("INFO", "clients"),
    ]
    replies = await bus.link.pipe_raw([*asked, *tail])
    now = bus.now_ms()
    lengths: dict[str, int] = {}
    ages: dict[str, float] = {}
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, stream in enumerate(streams):
        length, first, groups = replies[3 * number : 3 * number + 3]
        found = [by_name(row) for row in _listed(groups)]
        if not isinstance(length, int) or not (length or found):
            continue
        lengths[stream] = length
        ages[stream] = _age(now, _first_id(first))
        rows += [(stream, row) for row in found]
    dead, about, memory, clients = replies[len(asked) :]
    dead_letters = by_name(_listed(about))
    return BusReading(
        lengths=lengths,
        ages=ages,
        groups=await _groups(bus, rows, now),
        dead=dead if isinstance(dead, int) else 0,
        dead_total=_number(dead_letters.get("entries-added")),
        redis={**_figures(memory, _MEMORY), **_figures(clients, _CLIENTS)},
    )


async def _groups(bus: Bus, rows: Sequence[tuple[str, dict[str, Any]]], now: int) -> list[GroupReading]:
    asked: list[Command] = []
    for stream, row in rows:
        last = row["last-delivered-id"].decode()
        asked += [
            ("XPENDING", stream, row["name"]),
            ("XRANGE", stream, f"({last}", "+", "COUNT", 1),
            ("XLEN", stream) if row.get("lag") is not None else UNREAD((stream,), last),
            ("XINFO", "CONSUMERS", stream, row["name"]),
        ]
    replies = await bus.link.pipe_raw(asked) if asked else []
    found = []
    for number, (stream, row) in enumerate(rows):
        summary, unread, counted, consumers = replies[4 * number : 4 * number + 4]
        lowest = _listed(summary)[1] if _listed(summary) else None
        waiting = [one for one in (lowest.decode() if lowest else None, _first_id(unread)) if one is not None]
        lag = row.get("lag")
        read = row.get("entries-read")
        found.append(
            GroupReading(
                stream=stream,
                group=row["name"].decode(),
                consumers=row["consumers"],
                pending=row["pending"],
                lag=_number(counted) if lag is None else lag,
                lost=lag is None,
                handled=None if read is None else max(0, read - row["pending"]),
                oldest=_age(now, min(waiting, key=order, default=None)),
                served=min([by_name(one)["idle"] / 1000 for one in _listed(consumers)], default=None),
            )
        )
    return found


# Names in Redis' own report, and ours.
_MEMORY = {"used_memory": "used", "maxmemory": "max", "total_system_memory": "system"}
_CLIENTS = {"connected_clients": "clients"}


def _figures(report: Any, names: Mapping[str, str]) -> dict[str, float]:
    """Nothing when the user of the bus may not ask for it."""
    if not isinstance(report, bytes):
        return {}
    lines = dict(line.split(":", 1) for line in report.decode(errors="replace").splitlines() if ":" in line)
    return {ours: float(lines[name]) for name, ours in names.items() if lines.get(name, "").isdigit()}


def _listed(reply: Any) -> list[Any]:
    return [] if reply is None or isinstance(reply, ReplyError) else list(reply)


def _number(value: Any) -> int:
    if isinstance(value, bytes) and value.isdigit():
        return int(value)
    return value if isinstance(value, int) else 0


def _first_id(reply: Any) -> str | None:
    listed = _listed(reply)
    return listed[0][0].decode() if listed else None


def _age(now: int, entry_id: str | None) -> float:
    return 0.0 if entry_id is None else max(0, now - order(entry_id)[0]) / 1000
