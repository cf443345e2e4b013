"""Fills Redis to its limit, or removes the data again: run inside the stack's network, `ballast.py fill` or `drop`.

`fill` ends above the limit: Redis stays full while other entries come and go. Before a command, Redis checks its limit
without the memory that the command will allocate.
"""

from __future__ import annotations

import asyncio
import os
import sys

from shared.bus import Bus

KEY = "local2:ballast"
MB = 1 << 20
# Bytes above the limit.
OVER = 24 * MB


async def memory(bus: Bus) -> dict[str, int]:
    """Return the figures of INFO memory, in bytes."""
    reply: bytes = await bus.link.call("INFO", "memory")
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: int(value) for name, _, value in lines if value.isdigit()}


async def fill(bus: Bus) -> None:
    if not (limit := (await memory(bus))["maxmemory"]):
        sys.exit("Redis has no limit")
    number = 0
    while (await memory(bus))["used_memory"] < limit - 2 * MB:
        number += 1
        await bus.link.call("SETRANGE", f"{KEY}:{number}", MB, "x")
    await bus.link.call("SETRANGE", f"{KEY}:0", OVER, "x")


async def drop(bus: Bus) -> None:
    async for keys in bus.scan(f"{KEY}:*"):
        if keys:
            await bus.link.call("DEL", *keys)


async def main() -> None:
    async with Bus(os.environ["LOCAL2_REDIS_URL"], "ballast/1") as bus:
        await {"fill": fill, "drop": drop}[sys.argv[1]](bus)


if __name__ == "__main__":
    asyncio.run(main())
