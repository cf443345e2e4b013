"""What an import of memories keeps of its body while it reads it."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import orjson

from services.gateway.http.keys import Principal
from services.gateway.operations.memory_routes import import_memory


async def test_of_a_body_of_wrong_lines_a_hundred_complaints_are_kept_and_all_are_counted() -> None:
    part, parts = b"x\n" * 2_000, 20

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(parts):
            yield part

    request = cast(Any, SimpleNamespace(stream=stream))
    tracemalloc.start()
    try:
        answer = await import_memory(request, cast(Any, None), Principal("ann", "user"))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = orjson.loads(answer.body)
    assert (found["imported"], found["failed"], len(found["errors"])) == (0, 2_000 * parts, 100)
    # of one part, not of them all
    assert most < 1_000_000
