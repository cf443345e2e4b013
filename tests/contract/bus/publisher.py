"""A process that publishes messages under idempotency keys: `python -m contract.bus.publisher URL KEY COUNT`.

It adds its id to the list KEY when it is connected, begins when KEY:now exists, and prints the ids of the entries.
"""

from __future__ import annotations

import asyncio
import os
import sys

from contract.bus.surface import call, note, open_bus


async def publish(url: str, key: str, count: int) -> None:
    async with open_bus(url, f"publisher/{os.getpid()}") as bus:
        await call(bus, "RPUSH", key, os.getpid())
        while not await call(bus, "EXISTS", f"{key}:now"):
            await asyncio.sleep(0.001)
        ids = [await bus.publish(note(str(number), once=str(number))) for number in range(count)]
        print(ids)


if __name__ == "__main__":
    asyncio.run(publish(sys.argv[1], sys.argv[2], int(sys.argv[3])))
