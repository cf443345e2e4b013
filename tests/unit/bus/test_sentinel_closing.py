"""The connections to sentinels are closed, whenever the caller stops waiting."""

from __future__ import annotations

import asyncio

import pytest
from support.scripted_redis import ScriptedRedis
from support.waiting import eventually

from shared.bus.server import Server


@pytest.mark.parametrize("turns", range(0, 40, 2))
async def test_sentinel_connection_is_closed_after_cancellation(turns: int) -> None:
    """turns: of the event loop from the sentinel's answer to the cancellation."""
    answered = asyncio.Event()

    def answer(*_parts: bytes) -> list[bytes]:
        answered.set()
        state = {"name": "mymaster", "ip": "127.0.0.1", "port": redis.port, "flags": "master"}
        state |= {"num-other-sentinels": 0, "config-epoch": 1}
        return [str(part).encode() for pair in state.items() for part in pair]

    # the same server is the sentinel and the master
    redis = ScriptedRedis(SENTINEL=answer)
    async with redis.listening() as url:
        server = Server(url.replace("redis:", "redis+sentinel:") + "/mymaster")
        connecting = asyncio.create_task(server.connect(within=30))
        await answered.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        if not connecting.cancelled():
            await connecting.result().disconnect()
        await eventually(lambda: not redis.connections)
