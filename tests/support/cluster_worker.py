"""A replica on a server in cluster mode, as a process: the key prefix is read from the environment when it starts.

Usage: cluster_worker.py URL. It appends the payload of each entry of the stream `work` to the list `effects`.
"""

from __future__ import annotations

import asyncio
import sys

from shared.bus import Bus, Command, Consumer, Delivery, Route
from shared.contracts import PREFIX


async def handle(delivery: Delivery) -> list[Command]:
    fields = dict(zip(delivery.fields[::2], delivery.fields[1::2], strict=True))
    return [("RPUSH", f"{PREFIX}effects", fields[b"payload"])]


async def main(url: str) -> None:
    async with Bus(url, "test/r1", timeout=0.5) as bus:
        routes = {f"{PREFIX}work": Route(handle)}
        consumer = Consumer(
            bus, "workers", "r1", routes, concurrency=4, heartbeat=0.2, max_deliveries=5, drain=1.0
        )  # fmt: skip
        await consumer.run(asyncio.Event())


asyncio.run(main(sys.argv[1]))
