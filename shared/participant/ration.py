"""What tool workers leave in Redis has a share of it, so that none can fill the server with junk for good.

Redis knows no quotas for its users: somebody who has taken over a worker may write what its user may write, until the
server's memory is at its limit and it refuses everybody's writes. Nothing accepted is lost then, and here the room is
made again. While there is room enough nobody is counted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shared.bus import Bus, Command
from shared.bus.keys import OURS, rationed
from shared.contracts import DEAD_LETTER, TOOL_REQUEST, Subject
from shared.participant.registry import outside
from shared.telemetry.logging import get_logger

log = get_logger()

# From this part of the server's limit on it is looked what there is, and each kind of key may have such a share of it.
_SCARCE = 0.75
_SHARE = 1 / 16
_PAGE = 1_000
# What waits for a worker outside, and the names of those who read it, are never more than so many bytes: whoever looks
# at a stream is told all names.
_WAITING = 16_000_000


async def ration(bus: Bus) -> int:
    """Removes what is above the share of its kind, the largest keys first, while memory is scarce; how many went.

    All that workers write is written anew or can be done without: registry entries and indexes by the next heartbeat,
    results by running a call again, requests by their callers' time-outs. Of dead letters the oldest go.
    """
    told = (await bus.link.call("INFO", "memory")).decode()
    used, limit = (_figure(told, name) for name in ("used_memory", "maxmemory"))
    if not limit or used < _SCARCE * limit:
        return 0
    kinds: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    async for raw in bus.scan(OURS):
        found = [(kind, key) for key in raw if (kind := rationed(key)) is not None]
        for (kind, key), size in zip(found, await _sizes(bus, [key for _, key in found]), strict=True):
            kinds[kind].append((size, key))
    removed = 0
    for kind, sizes in kinds.items():
        gone = _above(sizes, int(limit * _SHARE))
        if not gone:
            continue
        log.error("bus.ration_exceeded", kind=kind.decode(), keys=len(gone), bytes=sum(size for size, _ in gone))
        removed += len(gone)
        for start in range(0, len(gone), _PAGE):
            await bus.link.pipe([await _removal(bus, key) for _, key in gone[start : start + _PAGE]])
    return removed


async def bound_requests(bus: Bus, subjects: Sequence[Subject[Any]]) -> None:
    """Removes what waits for workers outside when it is too much; the registry's readers make their groups anew."""
    streams = [s.stream for s in subjects if outside(s.name.removeprefix(f"{TOOL_REQUEST.name}."))]
    for stream, size in zip(streams, await _sizes(bus, [stream.encode() for stream in streams]), strict=True):
        if size > _WAITING:
            log.error("bus.requests_removed", stream=stream, bytes=size)
            await bus.link.call("UNLINK", stream)


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
    return ("UNLINK", key)


def _figure(told: str, name: str) -> int:
    found = re.search(rf"^{name}:(\d+)", told, re.MULTILINE)
    return int(found[1]) if found else 0
