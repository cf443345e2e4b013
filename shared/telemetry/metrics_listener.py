"""`GET /metrics` on a port of its own: HTTP/1.1 as far as a scraper needs it, one answer per connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.errors import SettingsError
from shared.telemetry.logging import get_logger

log = get_logger()

_SECONDS = 10.0
_MOST_BYTES = 16_384
_MOST_CONNECTIONS = 16

# The whole text in Prometheus' format.
Text = Callable[[], Awaitable[bytes]]


@contextlib.asynccontextmanager
async def listening(host: str, port: int, content_type: str, text: Text) -> AsyncIterator[str]:
    """Serves until the block ends; gives the address, `host:port`. Raises SettingsError when it cannot be had."""
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            async with asyncio.timeout(_SECONDS):
                if len(open_now) > _MOST_CONNECTIONS:
                    writer.write(_answer("503 Service Unavailable", "text/plain", b"too many scrapes at once\n"))
                else:
                    writer.write(await _answered(reader, content_type, text))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that went, or never asked
        except Exception:
            log.exception("metrics.scrape_failed")
        finally:
            open_now.discard(writer)
            writer.close()

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = await asyncio.start_server(serve, host.strip("[]"), port, family=family, limit=_MOST_BYTES)
    except OSError as exc:
        raise SettingsError(
            f"metrics: cannot listen on {host}:{port}: {exc.strerror or exc}; 0 takes a free port"
        ) from exc
    async with server:
        try:
            yield f"{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            # a slow scraper must not keep the participant from ending
            for writer in list(open_now):
                writer.transport.abort()


async def _answered(reader: asyncio.StreamReader, content_type: str, text: Text) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _answer("405 Method Not Allowed", "text/plain", b"only GET\n")
    if path != b"/metrics":
        return _answer("404 Not Found", "text/plain", b"there is only /metrics\n")
    return _answer("200 OK", content_type, await text(), body=method == b"GET")


def _answer(status: str, content_type: str, content: bytes, *, body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")
