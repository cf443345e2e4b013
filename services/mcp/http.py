"""A server behind an address: streamable HTTP, with a limit on what is read."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

import httpx2
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client

from services.mcp.stdio import MOST_BYTES

_CONNECT_SECONDS = 10.0
# Of silence: the server may keep a stream open on which it has nothing to say.
_SILENCE_SECONDS = 300.0


class _Bounded(httpx2.AsyncByteStream):
    """The events of a stream are bounded by the SDK; a plain answer is bounded here."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MOST_BYTES:
                raise httpx2.ReadError(f"it sent more than {MOST_BYTES // 1_000_000} MB in one answer")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        # a few bytes may stand for any number
        raise httpx2.DecodingError("it sent a compressed answer, which was not asked for")
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream)


@contextlib.asynccontextmanager
async def connected(url: str, headers: Mapping[str, str]) -> AsyncIterator[Transport]:
    """The transport to the server at `url`, as long as the block lasts."""
    async with httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_SILENCE_SECONDS),
        event_hooks={"response": [_bound]},
    ) as client:
        yield streamable_http_client(url, http_client=client, max_sse_event_size=MOST_BYTES)
