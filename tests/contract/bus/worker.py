"""A consumer in a process of its own: `python -m contract.bus.worker '{"url": …, "name": …, …}'`.

seconds: how long each handler works.
suspend: whether the handler waits without a slot meanwhile.
last_effect: a further command to write with the acknowledgement.
The other options are those of surface.consuming.

A handler of an entry with the text DEADLY ends its process by SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from contract.bus.observing import DEADLY, Worker
from contract.bus.surface import Delivery, Replica, call, consuming, decode, suspended


async def main(
    url: str, name: str, seconds: float = 0.0, suspend: bool = False, last_effect: Sequence[Any] = (), **options: Any
) -> None:
    running: list[Replica] = []

    async def handle(delivery: Delivery) -> list[Any]:
        mark = f"{name}:{delivery.entry_id}"
        await call(running[0].bus, "RPUSH", Worker.STARTED, mark)
        if decode(delivery).text == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        async with suspended(delivery) if suspend else contextlib.nullcontext():
            await asyncio.sleep(seconds)
        return [("RPUSH", Worker.EFFECTS, mark), *([tuple(last_effect)] if last_effect else [])]

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with consuming(url, handle, name=name, **options) as replica:
        running.append(replica)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(main(**json.loads(sys.argv[1])))
