"""Which hash slot of a Redis Cluster a command belongs to, and which commands may change places."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from functools import lru_cache

from shared.bus.port import Command

SLOTS = 16_384

# Where the first key stands, for commands that do not have it directly behind their name.
_SECOND = frozenset({"XGROUP", "XINFO", "OBJECT", "MEMORY", "DEBUG"})
_THIRD = frozenset({"EVAL", "EVALSHA", "FCALL"})
_STREAMS = frozenset({"XREAD", "XREADGROUP"})
# Without a key: the node of this slot is asked.
KEYLESS_SLOT = 0
_KEYLESS = frozenset({"INFO", "PING", "TIME"})
# Reads give the same answers in any order; so do deletions.
_READS = frozenset(
    {
        *("EXISTS", "GET", "HGET", "HGETALL", "HLEN", "HMGET", "HKEYS", "LRANGE", "PTTL", "SCARD", "SISMEMBER"),
        *("SMEMBERS", "STRLEN", "TTL", "TYPE", "XINFO", "XLEN", "XPENDING", "XRANGE", "XREAD", "XREVRANGE"),
        *("ZCARD", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE", "ZSCORE"),
    }
)
_DELETIONS = frozenset({"DEL", "UNLINK"})
# What says that something is done must not be sent before everything before it is confirmed.
_CLOSING = frozenset({"XACK", "XDEL"})


@lru_cache(maxsize=4096)
def slot_of_key(key: str | bytes) -> int:
    """CRC16 of the key, or of the part in its first braces when that is not empty."""
    raw = key.encode() if isinstance(key, str) else key
    start = raw.find(b"{")
    if start >= 0:
        end = raw.find(b"}", start + 1)
        if end > start + 1:
            raw = raw[start + 1 : end]
    return crc_hqx(raw, 0) % SLOTS


def name_of(command: Command) -> str:
    return str(command[0]).upper()


def slot_of(command: Command) -> int:
    """The slot of a command's first key."""
    name = name_of(command)
    if name in _KEYLESS:
        return KEYLESS_SLOT
    if name in _STREAMS:
        place = next(n for n, part in enumerate(command) if part in ("STREAMS", b"STREAMS")) + 1
    else:
        place = 3 if name in _THIRD else 2 if name in _SECOND else 1
    key = command[place]
    return slot_of_key(key if isinstance(key, str | bytes) else str(key))


def stages(commands: Sequence[Command]) -> Iterator[list[int]]:
    """The places of commands that may be under way at the same time; each stage waits for the one before.

    Commands of one slot reach one server in their order. Between slots there is no order, and a redirection can turn
    it round even within one server: so a stage ends where the slot changes, and before an acknowledgement.
    """
    stage: list[int] = []
    # what all of the stage have in common: their slot, or what they do
    common: set[int | str | None] = set()
    for place, command in enumerate(commands):
        name = name_of(command)
        kind = "read" if name in _READS else "deletion" if name in _DELETIONS else None
        own = {slot_of(command), kind} - {None}
        if stage and (name in _CLOSING or not common & own):
            yield stage
            stage = []
        common = common & own if stage else own
        stage.append(place)
    if stage:
        yield stage
