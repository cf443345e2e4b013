"""How much of a body is kept, by whose it is."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.body import MAX_FILE_BODY, MOST_VALUES, STRANGERS_BODY, ImageRequest
from services.gateway.errors import ApiError
from services.gateway.keys import Principal

PART = 65_536


class Keys:
    async def principal(self, key: str) -> Principal | None:
        return Principal("ann", "user") if key == "good" else None


def posted(key: str, size: int, *, content: bytes = b" ") -> ImageRequest:
    """A request with a body that comes in parts, each made when it is read: `content` again and again."""
    left = size

    async def receive() -> dict[str, Any]:
        nonlocal left
        part = content * max(1, min(PART, left) // len(content))
        left -= len(part)
        return {"type": "http.request", "body": part, "more_body": left > 0}

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    app = SimpleNamespace(state=SimpleNamespace(gateway=SimpleNamespace(keys=Keys())))
    return ImageRequest({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)


@pytest.mark.parametrize("size", [STRANGERS_BODY + 1, 3 * MAX_FILE_BODY])
async def test_a_strangers_body_is_not_kept(size: int) -> None:
    request = posted("wrong", size)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            await request.body()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.status_code, caught.value.code) == (401, "unauthorized")
    assert peak < 1_000_000


async def test_a_short_one_is_for_what_opens_a_link() -> None:
    assert len(await posted("", STRANGERS_BODY).body()) == STRANGERS_BODY


async def test_who_has_a_key_sends_as_much_as_the_route_takes() -> None:
    assert len(await posted("good", MAX_FILE_BODY).body()) == MAX_FILE_BODY
    with pytest.raises(ApiError) as caught:
        await posted("good", MAX_FILE_BODY + 1).body()
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("unit", [b"{},", b"[" * 3 + b"]" * 3 + b","])
async def test_a_body_of_too_many_values_is_not_even_read(unit: bytes) -> None:
    said = b"[" + unit * (MOST_VALUES // sum(map(unit.count, (b",", b"[", b"{"))) - 1) + b"0]"
    assert len(await received(said).json()) > 100_000
    with pytest.raises(ApiError) as caught:
        # would be no JSON
        await received(said + unit * 2).json()
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


def received(content: bytes) -> ImageRequest:
    return posted("good", len(content), content=content)
