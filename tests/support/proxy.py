"""A TCP proxy on loopback between a client and Redis that loses replies, cuts connections and waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self
from urllib.parse import unquote, urlsplit


class Proxy:
    """Forwards to a Redis URL; `url` is its own.

    drop_every: the n-th chunk of replies (over all connections) is thrown away, each n.
    latency: seconds that each reply waits.
    rate: bytes a second that get through in each direction of each connection; 0: as many as come.
    before: called before each chunk of commands is passed on.
    """

    def __init__(
        self,
        upstream: str,
        *,
        drop_every: int = 0,
        latency: float = 0.0,
        rate: int = 0,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._upstream = urlsplit(upstream)
        self.drop_every = drop_every
        self.latency = latency
        self.rate = rate
        self._before = before
        self.connections = 0
        self.dropped = 0
        self._chunks = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Breaks every open connection."""
        for writer in list(self._open):
            writer.transport.abort()

    def freeze(self) -> None:
        """Nothing gets through in either direction until `thaw`; connections stay open."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            # the loop's stream server cannot bear a task that ends as cancelled
            with contextlib.suppress(OSError, asyncio.CancelledError):
                if self._upstream.scheme == "unix":
                    there_in, there_out = await asyncio.open_unix_connection(unquote(self._upstream.path))
                else:
                    there_in, there_out = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
                self._open |= {writer, there_out}
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._pump(reader, there_out, replies=False))
                        both.create_task(self._pump(there_in, writer, replies=True))
                except* (OSError, EOFError):
                    pass
                finally:
                    for end in (writer, there_out):
                        end.transport.abort()
                    self._open -= {writer, there_out}
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, replies: bool) -> None:
        while data := await source.read(65_536):
            await self._flowing.wait()
            if replies:
                self._chunks += 1
                if self.drop_every and self._chunks % self.drop_every == 0:
                    self.dropped += 1
                    continue
                if self.latency:
                    await asyncio.sleep(self.latency)
            else:
                self._before()
            if self.rate:
                await asyncio.sleep(len(data) / self.rate)
            sink.write(data)
            await sink.drain()
        raise EOFError
