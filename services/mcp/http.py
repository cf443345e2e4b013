"""A server behind an address: streamable HTTP, with a limit on what is read."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

import httpx2
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client

from services.mcp.stdio import MOST_BYTES, Trouble

_CONNECT_SECONDS = 10.0
# Of silence: the server may keep a stream open on which it has nothing to say.
_SILENCE_SECONDS = 300.0
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class _Bounded(httpx2.AsyncByteStream):
    """A plain answer, or events of which each is bounded."""

    def __init__(self, stream: httpx2.AsyncByteStream, trouble: Trouble, *, events: bool) -> None:
        self._stream = stream
        self._trouble = trouble
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, tail = 0, b""
        async for chunk in self._stream:
            size += len(chunk)
            if self._events:
                tail += chunk
                # an empty line ends an event, however the server ends lines
                ended = max(tail.rfind(end) + len(end) if end in tail else 0 for end in _EVENT_ENDS)
                size = len(tail) - ended if ended else size
                tail = tail[-3:]
            if size > MOST_BYTES:
                self._trouble.text = f"it sent more than {MOST_BYTES // 1_000_000} MB in one answer"
                # the first is what the SDK gives a call of an event stream up for
                raise httpx2.SSEError(self._trouble.text) if self._events else httpx2.ReadError(self._trouble.text)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.asynccontextmanager
async def connected(url: str, headers: Mapping[str, str], trouble: Trouble) -> AsyncIterator[Transport]:
    """The transport to the server at `url`, as long as the block lasts."""

    async def bound(response: httpx2.Response) -> None:
        if response.is_error:
            trouble.refused = response.status_code
        if response.headers.get("content-encoding", "identity") != "identity":
            # a few bytes may stand for any number
            raise httpx2.DecodingError("it sent a compressed answer, which was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = _Bounded(response.stream, trouble, events=events)

    async with httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_SILENCE_SECONDS),
        event_hooks={"response": [bound]},
    ) as client:
        yield streamable_http_client(url, http_client=client, max_sse_event_size=None)
