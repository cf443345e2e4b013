"""Plain redis-py: the same two hops with three commands, and no promises.

Tuned: hiredis parser, one connection that writes and one that reads in each process, all writes of a loop tick in one
flush, 64 entries a read, one reply stream with one reader. Replies and acknowledgement of a batch share a flush.
There are no stored results, claims, heartbeats, deadlines or reconnects.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
from bus_port import tool_work
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

GROUP = "bare"
COUNT = 64
KEPT = 10_000


class Flushing:
    """Commands without a waiting caller; those of one loop tick leave in one write."""

    def __init__(self) -> None:
        self._commands: list[tuple[Any, ...]] = []
        self._arrived = asyncio.Event()

    def add(self, *command: Any) -> None:
        self._commands.append(command)
        self._arrived.set()

    async def run(self, write: Callable[[list[tuple[Any, ...]]], Awaitable[None]]) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            commands, self._commands = self._commands, []
            await write(commands)


class BareBus:
    name = "plain redis-py"
    promises = "none: XADD, XREADGROUP, XADD + XACK, XREAD"

    def __init__(self, url: str) -> None:
        self.requests, self.replies = (f"{type(self).__name__}:{kind}" for kind in ("requests", "replies"))
        self._redis = Redis.from_url(url, protocol=2, socket_timeout=None, retry=Retry(NoBackoff(), 0))
        self._waiting: dict[bytes, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._writes = Flushing()

    async def start_worker(self) -> None:
        await self._redis.xgroup_create(self.requests, GROUP, mkstream=True)
        await self._start(self._work())

    async def start_requester(self) -> None:
        await self._start(self._collect())

    async def _start(self, reading: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(self._writes.run(self._write)), asyncio.create_task(reading)]

    async def call(self, args: dict[str, Any]) -> str:
        number = b"%d" % next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writes.add("XADD", self.requests, "MAXLEN", "~", KEPT, "*", "id", number, "payload", orjson.dumps(args))
        return await future

    async def _write(self, commands: list[tuple[Any, ...]]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        await pipe.execute()

    async def _requests(self) -> list[Any]:
        found = await self._redis.xreadgroup(GROUP, "one", {self.requests: ">"}, count=COUNT, block=0)
        return [(entry_id, fields[b"id"], fields[b"payload"]) for entry_id, fields in found[0][1]]

    async def _replies(self, after: bytes | str) -> list[Any]:
        found = await self._redis.xread({self.replies: after}, count=512, block=0)
        return [(entry_id, fields[b"id"], fields[b"payload"]) for entry_id, fields in found[0][1]]

    async def _work(self) -> None:
        while True:
            entries = await self._requests()
            for _, number, payload in entries:
                answer = orjson.dumps({"result": tool_work(orjson.loads(payload))})
                self._writes.add("XADD", self.replies, "MAXLEN", "~", KEPT, "*", "id", number, "payload", answer)
            self._writes.add("XACK", self.requests, GROUP, *(entry_id for entry_id, _, _ in entries))

    async def _collect(self) -> None:
        after: bytes | str = "0"
        while True:
            entries = await self._replies(after)
            for _, number, payload in entries:
                self._waiting.pop(number).set_result(orjson.loads(payload)["result"])
            after = entries[-1][0]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()
