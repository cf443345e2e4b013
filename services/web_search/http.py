"""One HTTP exchange with a search service; its failures become texts that say what to do."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from typing import Any

import httpx

from shared.errors import ToolError

# Twenty hits with their snippets take some 50 KB, whole pages among them (Tavily) some 500.
MAX_ANSWER = 2_000_000

# Takes gzip and zlib, whichever the data are.
_EITHER = zlib.MAX_WBITS | 32


async def fetch_json(
    http: httpx.AsyncClient,
    request: httpx.Request,
    timeout: float,
    advice: Mapping[int, str],
) -> dict[str, Any]:
    """The JSON object that answers `request`. `advice` says what to do about a status code. Raises ToolError.

    The time-out covers the whole exchange; redirects are never followed.
    """
    request.headers["Accept-Encoding"] = "gzip"
    try:
        async with asyncio.timeout(timeout):
            response = await http.send(request, stream=True, follow_redirects=False)
            try:
                _check_status(response, advice)
                body = await _body(response)
            finally:
                await response.aclose()
    except (TimeoutError, httpx.TimeoutException) as exc:
        raise ToolError(f"search timeout after {timeout:g}s") from exc
    except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol) as exc:
        raise ToolError(f"search failed: no connection to {_origin(request.url)}") from exc
    except httpx.TransportError as exc:
        raise ToolError(f"search failed: the answer of {_origin(request.url)} broke off") from exc
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise ToolError("search failed: the answer is not JSON") from exc
    if not isinstance(answer, dict):
        raise ToolError("search failed: the answer is not a JSON object")
    return answer


def _check_status(response: httpx.Response, advice: Mapping[int, str]) -> None:
    status = response.status_code
    if status == 200:
        return
    hint = advice.get(status)
    if response.has_redirect_location:
        hint = "it redirects elsewhere, which is not followed: set the address that answers itself"
    raise ToolError(f"search failed: {status}" + (f" ({hint})" if hint else ""))


async def _body(response: httpx.Response) -> bytes:
    """The body, unpacked here: httpx would unpack a whole chunk of it before its size is known."""
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise ToolError(f"search failed: the content encoding {coding[:40]!r} is not supported")
    inflater = None if coding in ("identity", "") else zlib.decompressobj(_EITHER)
    body, wire = bytearray(), 0
    async for chunk in response.aiter_raw():
        wire += len(chunk)
        try:
            body += inflater.decompress(chunk, MAX_ANSWER + 1) if inflater else chunk
        except zlib.error as exc:
            raise ToolError("search failed: the answer's compression is broken") from exc
        if max(len(body), wire) > MAX_ANSWER:
            raise ToolError(f"search failed: the answer is larger than {MAX_ANSWER // 1_000_000} MB")
    if inflater and not inflater.eof:
        raise ToolError(f"search failed: the answer of {_origin(response.url)} broke off")
    return bytes(body)


def _origin(url: httpx.URL) -> httpx.URL:
    """The address without what may be private in it."""
    return url.copy_with(username=None, password=None, raw_path=b"/", fragment=None)


def objects(value: object) -> list[dict[str, Any]]:
    """The JSON objects in a list that a service sent; anything else in it is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
