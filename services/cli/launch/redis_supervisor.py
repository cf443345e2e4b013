"""The supervision of the embedded Redis: a server that dies is started again, on the same URL."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from services.cli.launch.child import Backoff
from services.cli.launch.embedded_redis import EmbeddedRedis
from services.cli.launch.redis_servers import EmbeddedRedisError

_LOOK = 0.1


class RedisSupervisor:
    def __init__(
        self,
        server: EmbeddedRedis,
        say: Callable[[str], None],
        *,
        backoff: Backoff | None = None,
    ) -> None:
        self._server = server
        self._say = say
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()
        # A cancelled start goes on in its thread; the stop must come after it.
        self._turn = threading.Lock()
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._server.pid

    async def start(self) -> str:
        """The URL, once the server answers. Raises EmbeddedRedisError."""
        url = await asyncio.to_thread(self._start)
        self.starts += 1
        return url

    async def run(self) -> None:
        """Starts the server again whenever it has died, until `stop`."""
        loop = asyncio.get_running_loop()
        began, failures = loop.time(), 0
        while not await self._stopped_within(_LOOK):
            if self._server.pid is not None:
                continue
            failures = 1 if loop.time() - began >= self._backoff.good else failures + 1
            pause = self._backoff.after(failures)
            self._say(f"the Redis server died; starting again in {pause:g} s")
            if await self._stopped_within(pause):
                return
            began = loop.time()
            try:
                await self.start()
            except EmbeddedRedisError as exc:
                self._say(str(exc))

    async def stop(self) -> None:
        """Stops the server after it has written its data out."""
        self._stopping.set()
        await asyncio.to_thread(self._stop)

    def _start(self) -> str:
        with self._turn:
            return self._server.start()

    def _stop(self) -> None:
        with self._turn:
            self._server.stop()

    def ask_to_stop(self) -> None:
        """Lets `run` return; the server runs on until `stop`."""
        self._stopping.set()

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()
