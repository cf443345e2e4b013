"""A consumer in a process of its own: `python -m contract.bus.worker '{"url": …, "name": …, …}'`.

seconds: how long each handler works. The other options are those of surface.consuming.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import uvloop
from contract.bus.observing import Worker
from contract.bus.surface import Delivery, Replica, call, consuming


async def main(url: str, name: str, seconds: float = 0.0, **options: Any) -> None:
    running: list[Replica] = []

    async def handle(delivery: Delivery) -> list[Any]:
        mark = f"{name}:{delivery.entry_id}"
        await call(running[0].bus, "RPUSH", Worker.STARTED, mark)
        await asyncio.sleep(seconds)
        return [("RPUSH", Worker.EFFECTS, mark)]

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with consuming(url, handle, name=name, **options) as replica:
        running.append(replica)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(main(**json.loads(sys.argv[1])))
