"""A server on loopback whose connections are handled by a test."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(
    handle: Handler, *, tls: ssl.SSLContext | None = None, path: Path | None = None
) -> AsyncIterator[int]:
    """Yields its port (0 where it is a unix socket at `path`); at the end, what is still being handled is cancelled."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # a client that goes away is its own matter
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await handle(reader, writer)
                writer.close()
                await writer.wait_closed()
            finally:
                writer.transport.abort()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if path is None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    else:
        server = await asyncio.start_unix_server(connected, path)
    try:
        yield 0 if path else server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
