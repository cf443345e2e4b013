"""FastStream: a Redis stream with a consumer group, replies over a channel for each request."""

from __future__ import annotations

from typing import Any

from bus_port import CONCURRENCY, tool_work
from faststream.redis import RedisBroker, StreamSub

STREAM = "faststream:requests"


class FastStreamBus:
    name = "FastStream"
    promises = "a consumer group, acknowledgement; the reply is not stored"

    def __init__(self, url: str) -> None:
        # one connection for each request that is in flight, and those of the reads
        self._broker = RedisBroker(url, logger=None, max_connections=3 * CONCURRENCY)

    async def start_worker(self) -> None:
        requests = StreamSub(STREAM, group="bench", consumer="one", max_records=CONCURRENCY)

        @self._broker.subscriber(stream=requests, max_workers=CONCURRENCY)
        async def echo(args: dict[str, Any]) -> str:
            return tool_work(args)

        await self._broker.start()

    async def start_requester(self) -> None:
        await self._broker.start()

    async def call(self, args: dict[str, Any]) -> str:
        reply = await self._broker.request(args, stream=STREAM, timeout=30)
        answer: str = await reply.decode()
        return answer

    async def close(self) -> None:
        await self._broker.stop()
