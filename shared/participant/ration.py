"""What untrusted workers leave in Redis has a quota, so that none can fill the server with junk for good.

Redis knows no quotas for its users: a captured worker may write what its user may write, until the server's memory is
at its limit and every write is refused. Nothing accepted is lost then, and the janitor makes room here. A request
stream is removed only while it has no entries: what is pending in one must be done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shared.bus import Bus, Command
from shared.bus.keys import OURS, REQUESTS, rationed
from shared.bus.scripts import DROP_EMPTY
from shared.contracts import DEAD_LETTER
from shared.participant.room import SCARCE, memory
from shared.telemetry.logging import get_logger

log = get_logger()

# While memory is scarce, the keys of one kind may have this share of the limit, and at least so many bytes: kinds that
# are smaller are not what fills the server.
_SHARE = 1 / 16
_AT_LEAST = 1_000_000
_PAGE = 1_000


async def ration(bus: Bus) -> int:
    """Remove what is above the quota of its kind, the largest keys first, while memory is scarce; return how many keys.

    Untrusted workers write all of it. Registry entries are written again by the next heartbeat, a result by a repeat of
    its call. Of dead letters the oldest go.
    """
    limits = [limit for used, limit in await memory(bus) if used >= SCARCE * limit]
    if not limits:
        return 0
    quota = max(int(min(limits) * _SHARE), _AT_LEAST)
    kinds: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    async for raw in bus.scan(OURS):
        found = [(kind, key) for key in raw if (kind := rationed(key)) is not None]
        for (kind, key), size in zip(found, await _sizes(bus, [key for _, key in found]), strict=True):
            kinds[kind].append((size, key))
    removed = 0
    for kind, sizes in kinds.items():
        if kind == REQUESTS:
            sizes = await _empty(bus, sizes)
        gone = _above(sizes, quota)
        if not gone:
            continue
        log.error("bus.ration_exceeded", kind=kind.decode(), keys=len(gone), bytes=sum(size for size, _ in gone))
        removed += len(gone)
        for start in range(0, len(gone), _PAGE):
            await bus.link.pipe([await _removal(bus, key) for _, key in gone[start : start + _PAGE]])
    return removed


async def _empty(bus: Bus, sizes: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return those of some streams that have no entries."""
    lengths = await bus.link.pipe_raw([("XLEN", key) for _, key in sizes]) if sizes else []
    return [one for one, length in zip(sizes, lengths, strict=True) if length == 0]


async def _sizes(bus: Bus, keys: Sequence[bytes]) -> list[int]:
    """The bytes that keys take; of one that has gone meanwhile 0."""
    if not keys:
        return []
    sizes = await bus.link.pipe_raw([("MEMORY", "USAGE", key) for key in keys])
    return [size if isinstance(size, int) else 0 for size in sizes]


def _above(sizes: list[tuple[int, bytes]], share: int) -> list[tuple[int, bytes]]:
    """The largest keys, so many that the others have no more bytes than their share."""
    total = sum(size for size, _ in sizes)
    gone = []
    for size, key in sorted(sizes, reverse=True):
        if total <= share:
            break
        gone.append((size, key))
        total -= size
    return gone


async def _removal(bus: Bus, key: bytes) -> Command:
    if key == DEAD_LETTER.stream.encode():
        # the older half: an operator may still want to see what the others say
        return ("XTRIM", key, "MAXLEN", int(await bus.link.call("XLEN", key)) // 2)
    if key.startswith(REQUESTS):
        return DROP_EMPTY((key.decode(errors="surrogateescape"),))
    return ("UNLINK", key)
