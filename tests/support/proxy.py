"""A TCP proxy on loopback between a client and Redis that loses replies, cuts connections and waits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit


def once(words: bytes, act: Callable[[], Awaitable[None]]) -> Callable[[bytes], Awaitable[None]]:
    """Return a value for `before` that awaits `act` before the first chunk that contains the words."""
    done = False

    async def before(data: bytes) -> None:
        nonlocal done
        if not done and words in data:
            done = True
            await act()

    return before


@dataclass(eq=False)
class _Path:
    """One connection through the proxy. lost: its bytes are thrown away. held: it is not read."""

    client: asyncio.StreamWriter
    lost: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Forwards to a Redis URL; `url` is its own.

    drop_every: the n-th chunk of replies (over all connections) is thrown away, each n.
    latency: seconds that each reply waits.
    rate: bytes a second that get through in each direction of each connection; 0: as many as come.
    before: awaited with each chunk of commands before it is passed on; OSError breaks the connection. A test may
        replace the attribute at any time.
    window: bytes of each client that wait in the proxy, in its receive buffer; 0: the system's default.
    tls: the context by which the proxy speaks TLS with its clients.
    most: bytes of commands that a connection carries before it breaks; 0: any number.
    """

    def __init__(
        self,
        upstream: str,
        *,
        drop_every: int = 0,
        latency: float = 0.0,
        rate: int = 0,
        before: Callable[[bytes], Awaitable[None]] | None = None,
        window: int = 0,
        tls: ssl.SSLContext | None = None,
        most: int = 0,
    ) -> None:
        self._upstream = urlsplit(upstream)
        self._window = window
        self._tls = tls
        self._most = most
        self.drop_every = drop_every
        self.latency = latency
        self.rate = rate
        self.before = before
        self.connections = 0
        self.dropped = 0
        self._chunks = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paths: set[_Path] = set()
        self._lose_next = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Self:
        listener = socket.socket()
        if self._window:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._window)
        listener.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(
            self._serve, sock=listener, ssl=self._tls, limit=self._window or 65_536
        )
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

    def lose_next_reply(self) -> None:
        """The next chunk of replies, of whichever connection, is thrown away."""
        self._lose_next = True

    def lose_connections(self) -> None:
        """Every byte of the connections that are open now is thrown away; they stay open, and new ones work."""
        for path in self._paths:
            path.lost = True

    def inject(self, data: bytes) -> None:
        """Send bytes to every client, as if they were a reply."""
        for path in self._paths:
            path.client.write(data)

    def hold_connections(self) -> None:
        """The connections that are open now are not read until `release`; they stay open, and new ones work."""
        for path in self._paths:
            path.open.clear()

    def release(self) -> None:
        """Passes on what the held connections still have."""
        for path in self._paths:
            path.open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        path = _Path(writer)
        path.open.set()
        self._paths.add(path)
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
                        both.create_task(self._pump(reader, there_out, path, replies=False))
                        both.create_task(self._pump(there_in, writer, path, replies=True))
                except* (OSError, EOFError):
                    pass
                finally:
                    for end in (writer, there_out):
                        end.transport.abort()
                    self._open -= {writer, there_out}
        finally:
            writer.transport.abort()
            self._paths.discard(path)
            self._tasks.discard(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, path: _Path, *, replies: bool
    ) -> None:
        carried = 0
        while data := await source.read(65_536):
            carried += len(data)
            if self._most and not replies and carried > self._most:
                break
            await self._flowing.wait()
            await path.open.wait()
            if path.lost:
                continue
            if replies:
                self._chunks += 1
                if self._lose_next:
                    self._lose_next = False
                    self.dropped += 1
                    continue
                if self.drop_every and self._chunks % self.drop_every == 0:
                    self.dropped += 1
                    continue
                if self.latency:
                    await asyncio.sleep(self.latency)
            elif self.before is not None:
                await self.before(data)
            if self.rate:
                await asyncio.sleep(len(data) / self.rate)
            sink.write(data)
            await sink.drain()
        raise EOFError
