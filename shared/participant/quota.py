"""Quotas for data of untrusted workers in Redis, so that none can fill the server for good.

Redis has no quotas for its users. A captured worker may write to the keys of its user until the server's memory is at
its limit and Redis refuses every write. No accepted data is lost then, and the janitor makes room here. It removes a
request stream only while the stream has no entries: pending requests must run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from shared.bus import Bus, Command
from shared.bus.keys import ALL_KEYS, REPLICAS, inbox_key, once_key, replica_key, result_key, schema_key, starts_key
from shared.bus.scripts import DROP_EMPTY
from shared.contracts import DEAD_LETTER, TOOL_REQUEST, TOOL_RESULT, TOOL_SCHEMA, is_untrusted
from shared.participant.room import SCARCE, memory
from shared.telemetry.logging import get_logger

log = get_logger()

# While memory is scarce, the keys of one kind may have this share of the limit, and at least this many bytes: smaller
# kinds do not fill the server.
_QUOTA_SHARE = 1 / 16
_MIN_QUOTA_BYTES = 1_000_000
_PAGE = 1_000
# Prefixes of keys that untrusted workers may write.
_QUOTA_KINDS = tuple(
    key.encode()
    for key in (
        inbox_key.pattern.partition("<")[0],
        TOOL_SCHEMA.stream,
        DEAD_LETTER.stream,
        REPLICAS,
    )
)
# The prefix of the request streams of tools. Only trusted participants write entries to them.
_REQUESTS = f"{TOOL_REQUEST.stream}.".encode()
# Prefixes of keys with the name of a tool or a participant: untrusted workers may write those with an untrusted name.
_QUOTA_KINDS_BY_NAME = tuple(
    key.encode()
    for key in (
        *(family.pattern.partition("<")[0] for family in (result_key, replica_key, schema_key, starts_key)),
        f"{TOOL_RESULT.stream}.",
        _REQUESTS.decode(),
        once_key(DEAD_LETTER.stream, f"{TOOL_REQUEST.stream}."),
    )
)


async def enforce_quota(bus: Bus) -> int:
    """Remove keys above the quota of their kind, the largest first, while memory is scarce; return their number.

    Only keys that untrusted workers may write. The next heartbeat writes registry entries again, a repeated call its
    result. Of dead letters the oldest are removed.
    """
    usage = await memory(bus)
    if usage is None or usage[0] < SCARCE * usage[1]:
        return 0
    quota = max(int(usage[1] * _QUOTA_SHARE), _MIN_QUOTA_BYTES)
    kinds: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    async for raw in bus.scan(ALL_KEYS):
        found = [(kind, key) for key in raw if (kind := quota_kind(key)) is not None]
        for (kind, key), size in zip(found, await _sizes(bus, [key for _, key in found]), strict=True):
            kinds[kind].append((size, key))
    removed = 0
    for kind, sizes in kinds.items():
        if kind == _REQUESTS:
            sizes = await _empty(bus, sizes)
        gone = largest_above(sizes, quota)
        if not gone:
            continue
        log.error("bus.quota_exceeded", kind=kind.decode(), keys=len(gone), bytes=sum(size for size, _ in gone))
        removed += len(gone)
        for start in range(0, len(gone), _PAGE):
            await bus.link.pipe([await _removal(bus, key) for _, key in gone[start : start + _PAGE]])
    return removed


def quota_kind(key: bytes) -> bytes | None:
    """Return the prefix of a key's kind; None for a key that no untrusted worker may write."""
    if kind := next((kind for kind in _QUOTA_KINDS if key.startswith(kind)), None):
        return kind
    kind = next((kind for kind in _QUOTA_KINDS_BY_NAME if key.startswith(kind)), None)
    if kind is None:
        return None
    name = re.split(rb"[:}]", key[len(kind) :], maxsplit=1)[0]
    return kind if is_untrusted(name.decode(errors="replace")) else None


async def _empty(bus: Bus, sizes: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return those of some streams that have no entries."""
    lengths = await bus.link.pipe_raw([("XLEN", key) for _, key in sizes]) if sizes else []
    return [one for one, length in zip(sizes, lengths, strict=True) if length == 0]


async def _sizes(bus: Bus, keys: Sequence[bytes]) -> list[int]:
    """Return the bytes that each key takes; 0 for a key that is gone."""
    if not keys:
        return []
    sizes = await bus.link.pipe_raw([("MEMORY", "USAGE", key) for key in keys])
    return [size if isinstance(size, int) else 0 for size in sizes]


def largest_above(sizes: list[tuple[int, bytes]], quota: int) -> list[tuple[int, bytes]]:
    """Return the largest keys, so many that the others together stay within the quota."""
    total = sum(size for size, _ in sizes)
    gone = []
    for size, key in sorted(sizes, reverse=True):
        if total <= quota:
            break
        gone.append((size, key))
        total -= size
    return gone


async def _removal(bus: Bus, key: bytes) -> Command:
    if key == DEAD_LETTER.stream.encode():
        # The older half: an operator may still need the rest.
        return ("XTRIM", key, "MAXLEN", int(await bus.link.call("XLEN", key)) // 2)
    if key.startswith(_REQUESTS):
        return DROP_EMPTY((key.decode(errors="surrogateescape"),))
    return ("UNLINK", key)
