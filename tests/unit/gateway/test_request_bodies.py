"""How much of a body is kept, by whose it is, and what is read of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from services.gateway.auth import UserDep
from services.gateway.body import (
    MAX_DEPTH,
    MAX_FILE_BODY,
    MOST_VALUES,
    STRANGERS_BODY,
    AskRoute,
    ImageAskRoute,
    ImageRequest,
    JsonRequest,
    JsonRoute,
)
from services.gateway.errors import ApiError, install
from services.gateway.keys import Principal

PART = 65_536


class Keys:
    async def principal(self, key: str) -> Principal | None:
        return Principal("ann", "user") if key == "good" else None


READ: list[int] = []
STATE = SimpleNamespace(gateway=SimpleNamespace(keys=Keys(), settings=SimpleNamespace(auth="on")))


def posted(
    key: str,
    size: int,
    *,
    content: bytes = b" ",
    kind: type[JsonRequest] = ImageRequest,
    content_type: str | None = "application/json",
    cut: bool = False,
) -> JsonRequest:
    """A request with a body that comes in parts, each made when it is read: `content` again and again; `cut`: the
    connection closes before its end. `READ` gets what there is in memory at each."""
    left = size
    READ.clear()

    async def receive() -> dict[str, Any]:
        nonlocal left
        if tracemalloc.is_tracing():
            READ.append(tracemalloc.get_traced_memory()[0])
        part = content * max(1, min(PART, left) // len(content))
        left -= len(part)
        if cut and left <= 0:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": left > 0}

    headers = [(b"authorization", f"Bearer {key}".encode())]
    headers += [(b"content-type", content_type.encode())] if content_type is not None else []
    app = SimpleNamespace(state=STATE)
    return kind({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)


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
    assert caught.value.headers == {"WWW-Authenticate": "Bearer", "Connection": "close"}
    assert peak < 1_000_000
    # so much is thrown away, and no more
    assert len(READ) * PART <= 2 * MAX_FILE_BODY + 2 * PART


async def test_a_short_one_is_for_what_opens_a_link() -> None:
    assert len(await posted("", STRANGERS_BODY).body()) == STRANGERS_BODY


@pytest.mark.parametrize(("kind", "most"), [(JsonRequest, 4_194_304), (ImageRequest, 33_554_432)])
async def test_who_has_a_key_sends_as_much_as_the_route_takes(kind: type[JsonRequest], most: int) -> None:
    assert len(await posted("good", most, kind=kind).body()) == most
    for size in (most + 1, 3 * most):
        with pytest.raises(ApiError) as caught:
            await posted("good", size, kind=kind).body()
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
        assert caught.value.headers == {"Connection": "close"}


async def test_what_is_thrown_away_is_not_kept() -> None:
    class Small(JsonRequest):
        most = 2_000_000

    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            await posted("good", 3_900_000, kind=Small).body()
    finally:
        tracemalloc.stop()
    assert max(READ) > 1_500_000
    assert READ[-1] < 1_000_000


async def test_a_body_whose_connection_closes_is_told_so() -> None:
    with pytest.raises(ApiError) as caught:
        await posted("good", 100, cut=True).body()
    assert (caught.value.status_code, caught.value.code) == (400, "bad_request")


@pytest.mark.parametrize(
    ("content_type", "taken"),
    [
        ("application/json", True), ("Application/JSON ; charset=utf-8", True), ("application/problem+json", True),
        ("text/x+json", False), ("application/xml", False), ("", False), (None, False),
    ],
)  # fmt: skip
async def test_a_body_says_that_it_is_json_and_nothing_needs_to(content_type: str | None, taken: bool) -> None:
    assert await empty(content_type).body() == b""
    request = posted("good", 2, content=b"{}", content_type=content_type)
    if taken:
        # it is read once, however often it is asked for
        assert (await request.body(), await request.json()) == (b"{}", {})
    else:
        with pytest.raises(ApiError) as caught:
            await request.body()
        assert (caught.value.status_code, caught.value.code) == (415, "unsupported_media_type")


@pytest.mark.parametrize("nested", ["[", "{", "[{", "[s"])
async def test_a_body_is_as_deep_as_every_writer_takes(nested: str) -> None:
    def deep(levels: int) -> Any:
        value: Any = 1
        for level in range(levels):
            in_object = nested[level % len(nested)] == "{"
            # a text beside it is no deeper
            value = {"a": value} if in_object else [value, "s"] if nested == "[s" else [value]
        return value

    for levels in (1, MAX_DEPTH):
        said = orjson.dumps(deep(levels))
        assert await received(said).json() == deep(levels)
    with pytest.raises(ApiError) as caught:
        await received(orjson.dumps(deep(MAX_DEPTH + 1))).json()
    assert (caught.value.status_code, caught.value.code) == (400, "bad_json")
    # many values beside each other are none
    flat = [deep(2)] * 100
    assert await received(orjson.dumps(flat)).json() == flat


class Said(BaseModel):
    n: int


async def echo(request: Request, body: Said, user: UserDep) -> Response:
    return Response(f"{type(request).__name__} {body.n} {user.user_id}")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI(
        routes=[kind(f"/{kind.__name__}", echo, methods=["POST"]) for kind in (JsonRoute, AskRoute, ImageAskRoute)]
    )
    app.state.gateway = STATE.gateway
    install(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        http.headers["Authorization"] = "Bearer good"
        yield http


@pytest.mark.parametrize(("route", "kind"), [(AskRoute, JsonRequest), (ImageAskRoute, ImageRequest)])
async def test_a_route_reads_its_body_with_its_own_limits(
    route: type[JsonRoute], kind: type[JsonRequest], http: httpx.AsyncClient
) -> None:
    assert (await http.post(f"/{JsonRoute.__name__}", json={"n": 1})).text == "JsonRequest 1 ann"
    assert (await http.post(f"/{route.__name__}", json={"n": 2})).text == f"{kind.__name__} 2 ann"


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", {}),
        (b'{"n": 1', {}),
        (b'{"n": "one"}', {}),
        (b"[1]", {}),
        (b"null", {}),
        (b'{"n": 1}', {"Content-Type": "text/plain"}),
        (b'{"n": "one"}', {"Authorization": "Bearer wrong"}),
        (b'{"n": 1', {"Authorization": "Bearer wrong"}),
        (b"", {"Authorization": "Bearer wrong"}),
        (b"[" * 100 + b"]" * 100, {}),
    ],
)
async def test_a_question_is_refused_as_every_other_body_is(
    content: bytes, headers: dict[str, str], http: httpx.AsyncClient
) -> None:
    json = {"Content-Type": "application/json"}
    usual, asked = [
        await http.post(f"/{route.__name__}", content=content, headers=json | headers)
        for route in (JsonRoute, AskRoute)
    ]
    assert usual.status_code in (400, 401, 415, 422)
    assert (asked.status_code, asked.json()) == (usual.status_code, usual.json())
    refused = await http.get(f"/{AskRoute.__name__}")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("unit", [b"{},", b"[" * 3 + b"]" * 3 + b","])
async def test_a_body_of_too_many_values_is_not_even_read(unit: bytes) -> None:
    many, more = divmod(MOST_VALUES - 1, sum(map(unit.count, (b",", b"[", b"{"))))
    said = b"[" + unit * many + b"0," * more + b"0]"
    assert len(await received(said).json()) > 100_000
    with pytest.raises(ApiError) as caught:
        # would be no JSON
        await received(said + b",").json()
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


def received(content: bytes) -> JsonRequest:
    return posted("good", len(content), content=content)


def empty(content_type: str | None) -> JsonRequest:
    request = posted("good", 0, content_type=content_type)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    return JsonRequest(request.scope, receive)
