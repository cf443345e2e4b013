"""One HTTP exchange with a search service; its failures become texts that say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from shared.errors import ToolError


async def fetch_json(
    http: httpx.AsyncClient,
    request: httpx.Request,
    timeout: float,
    advice: Mapping[int, str],
) -> dict[str, Any]:
    """The JSON object that answers `request`. `advice` says what to do about a status code. Raises ToolError.

    The time-out covers the whole exchange; redirects are never followed.
    """
    try:
        async with asyncio.timeout(timeout):
            response = await http.send(request, follow_redirects=False)
    except (TimeoutError, httpx.TimeoutException) as exc:
        raise ToolError(f"search timeout after {timeout:g}s") from exc
    except httpx.TransportError as exc:
        where = request.url.copy_with(username=None, password=None, raw_path=b"/")
        raise ToolError(f"search failed: no connection to {where}") from exc
    if response.status_code != 200:
        hint = advice.get(response.status_code)
        raise ToolError(f"search failed: {response.status_code}" + (f" ({hint})" if hint else ""))
    try:
        answer = response.json()
    except ValueError as exc:
        raise ToolError("search failed: the answer is not JSON") from exc
    if not isinstance(answer, dict):
        raise ToolError("search failed: the answer is not a JSON object")
    return answer


def objects(value: object) -> list[dict[str, Any]]:
    """The JSON objects in a list that a service sent; anything else in it is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
