"""What Redis keeps: bytes and keys by kind, and whether everything that should go has gone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from shared.bus import Bus
from shared.bus.keys import deleted_key
from shared.contracts import PREFIX

# Kinds of keys that stay however long nothing happens. All others have a time to live, or go when they are empty.
LASTING = frozenset(
    {
        "keys", "tools", "replicas", "replica", "settings", "settings-schema", "inbox", "janitor", "starts",
        "stream",
    }
)  # fmt: skip
# That a session was deleted is known for a week.
_DELETED = "deleted"
_STREAMS = re.compile(r"[a-z]+\.[a-z_.]+")


@dataclass(frozen=True)
class Level:
    """used: bytes that the server's allocator has given out."""

    used: int
    kinds: Counter[str]

    @property
    def transient(self) -> int:
        """Keys that are about queries, and must go in the end."""
        return sum(number for kind, number in self.kinds.items() if kind not in LASTING | {_DELETED})

    def shown(self) -> str:
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(self.kinds.items()) if kind not in LASTING)
        return f"{self.used:>12,} bytes   {self.transient:>6} keys of queries{f' ({kinds})' if kinds else ''}"


async def level(bus: Bus) -> Level:
    kinds: Counter[str] = Counter()
    async for raw in bus.scan(f"{PREFIX}*"):
        keys = [key.decode() for key in raw]
        kinds.update(kind_of(key) for key in keys)
    return Level(await used_bytes(bus), kinds)


async def used_bytes(bus: Bus) -> int:
    info = (await bus.link.call("INFO", "memory")).decode()
    return int(re.search(r"^used_memory:(\d+)", info, re.MULTILINE)[1])  # type: ignore[index]


def kind_of(key: str) -> str:
    if deleted_key.parts(key) is not None:
        return _DELETED
    name = key.removeprefix(PREFIX).partition(":")[0]
    return "stream" if _STREAMS.fullmatch(name) else name


async def everlasting(bus: Bus) -> list[str]:
    """Keys about queries that would never go: neither a lasting kind nor with a time to live."""
    found = []
    async for raw in bus.scan(f"{PREFIX}*"):
        keys = [key.decode() for key in raw]
        asked = [key for key in keys if kind_of(key) not in LASTING]
        lives = await bus.link.pipe([("PTTL", key) for key in asked]) if asked else []
        found += [key for key, left in zip(asked, lives, strict=True) if left == -1]
    return found
