"""Request bodies: how much is read without a key, how slowly, and what JSON may contain."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Message

from services.gateway.http.auth import UserDep
from services.gateway.http.body import (
    MAX_DEPTH,
    MOST_VALUES,
    ImageRequest,
    ImageRoute,
    JsonRequest,
    JsonRoute,
    bounded,
)
from services.gateway.http.errors import ApiError, install
from services.gateway.http.keys import Principal
from services.gateway.http.request_guard import RequestGuard
from shared.contracts import MAX_FILE_BODY

PART = 65_536


class Keys:
    async def principal(self, key: str) -> Principal | None:
        return Principal("ann", "user") if key == "good" else None


STATE = SimpleNamespace(gateway=SimpleNamespace(keys=Keys(), settings=SimpleNamespace(auth="on", client_seconds=0.2)))


def posted(
    key: str,
    size: int,
    *,
    content: bytes = b" ",
    kind: type[JsonRequest] = ImageRequest,
    content_type: str | None = "application/json",
    cut: bool = False,
) -> JsonRequest:
    """Return a request whose body repeats `content`. cut: the client disconnects before its end."""
    left = size

    async def receive() -> dict[str, Any]:
        nonlocal left
        part = content * max(1, min(PART, left) // len(content))
        left -= len(part)
        if cut and left <= 0:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": left > 0}

    headers = [(b"authorization", f"Bearer {key}".encode())]
    headers += [(b"content-type", content_type.encode())] if content_type is not None else []
    app = SimpleNamespace(state=STATE)
    return kind({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)


@dataclass
class Sender:
    """A client of an application behind the guard. taken: bytes of the body that have been read."""

    size: int
    headers: dict[str, str]
    pause: float = 0.0
    part: int = PART
    taken: int = 0
    sent: list[Message] = field(default_factory=list)

    async def receive(self) -> Message:
        if self.taken >= self.size:
            return {"type": "http.disconnect"}
        await asyncio.sleep(self.pause)
        part = min(self.part, self.size - self.taken)
        self.taken += part
        return {"type": "http.request", "body": b" " * part, "more_body": self.taken < self.size}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def posts(self, most: int = MAX_FILE_BODY) -> tuple[int, str, str]:
        """Return status, code and the `Connection` header of the answer to the request."""
        app = FastAPI()
        app.state.gateway = STATE.gateway
        install(app)

        @app.post("/")
        async def read(request: Request) -> Response:
            return Response(str(sum([len(part) async for part in bounded(request, most)])))

        app.add_middleware(RequestGuard, gateway=STATE.gateway)
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers, "root_path": "",
        }  # fmt: skip
        await app(scope, self.receive, self.send)
        start, *parts = self.sent
        body = b"".join(part["body"] for part in parts)
        code = orjson.loads(body)["error"]["code"] if start["status"] >= 400 else body.decode()
        return start["status"], code, Headers(raw=start["headers"]).get("connection", "")


GOOD, CHUNKED = {"Authorization": "Bearer good"}, {"Transfer-Encoding": "chunked"}


def length(size: int) -> dict[str, str]:
    return {"Content-Length": str(size)}


@pytest.mark.parametrize(
    ("size", "headers", "answer", "read"),
    [
        pytest.param(100, CHUNKED, (200, "100", ""), 100, id="a stranger's short one"),
        pytest.param(65_536, length(65_536), (200, "65536", ""), 65_536, id="as much as allowed"),
        pytest.param(10**6, CHUNKED, (401, "unauthorized", "close"), 10**6, id="a stranger's longer one"),
        pytest.param(10**6, length(10**6), (401, "unauthorized", "close"), 10**6, id="a stranger's declared one"),
        pytest.param(10**6, GOOD | length(10**6), (200, "1000000", ""), 10**6, id="with a key"),
        pytest.param(10**6, GOOD | CHUNKED, (200, "1000000", ""), 10**6, id="in chunks, with a key"),
        pytest.param(2_000_001, GOOD | CHUNKED, (413, "body_too_large", ""), 2_000_001, id="above the limit"),
        pytest.param(2_000_001, GOOD | length(2_000_001), (413, "body_too_large", "close"), 2_000_001, id="declared"),
        # What is sent beyond is discarded up to a bound.
        pytest.param(10**9, GOOD | CHUNKED, (413, "body_too_large", "close"), 36_000_000, id="without an end"),
        pytest.param(10**9, CHUNKED, (401, "unauthorized", "close"), 34_000_000, id="a stranger's without an end"),
    ],
)  # fmt: skip
async def test_guard_bounds_a_body_by_its_key(
    size: int, headers: dict[str, str], answer: tuple[int, str, str], read: int
) -> None:
    sender = Sender(size, headers)
    tracemalloc.start()
    try:
        assert await sender.posts(2_000_000) == answer
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sender.taken <= read
    assert peak < 3_000_000


@pytest.mark.parametrize(
    ("pause", "part", "answer"),
    [
        pytest.param(1.0, PART, (408, "request_timeout", "close"), id="silent"),
        pytest.param(0.05, 100, (408, "request_timeout", "close"), id="slower than 8 kB a second"),
        pytest.param(0.05, 20_000, (200, "200000", ""), id="long, but fast enough"),
    ],
)
async def test_guard_refuses_a_silent_or_slow_body(pause: float, part: int, answer: tuple[int, str, str]) -> None:
    assert await Sender(200_000, GOOD | CHUNKED, pause, part).posts() == answer


@pytest.mark.parametrize(("kind", "most"), [(JsonRequest, 4_194_304), (ImageRequest, 33_554_432)])
async def test_body_has_at_most_the_bytes_of_its_route(kind: type[JsonRequest], most: int) -> None:
    assert len(await posted("good", most, kind=kind).body()) == most
    with pytest.raises(ApiError) as caught:
        await posted("good", most + 1, kind=kind).body()
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


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
    app = FastAPI(routes=[kind(f"/{kind.__name__}", echo, methods=["POST"]) for kind in (JsonRoute, ImageRoute)])
    app.state.gateway = STATE.gateway
    install(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        http.headers["Authorization"] = "Bearer good"
        yield http


async def test_a_route_reads_its_body_with_its_own_limits(http: httpx.AsyncClient) -> None:
    assert (await http.post("/JsonRoute", json={"n": 1})).text == "JsonRequest 1 ann"
    assert (await http.post("/ImageRoute", json={"n": 2})).text == "ImageRequest 2 ann"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 422),
        (b'{"n": 1', {}, 400),
        (b'{"n": "one"}', {}, 422),
        (b"[1]", {}, 422),
        (b"null", {}, 422),
        (b'{"n": 1}', {"Content-Type": "text/plain"}, 415),
        (b'{"n": "one"}', {"Authorization": "Bearer wrong"}, 401),
        (b"", {"Authorization": "Bearer wrong"}, 401),
        (b"[" * 100 + b"]" * 100, {}, 400),
    ],
)
async def test_wrong_body_is_refused_in_the_usual_shape(
    content: bytes, headers: dict[str, str], status: int, http: httpx.AsyncClient
) -> None:
    refused = await http.post("/JsonRoute", content=content, headers={"Content-Type": "application/json"} | headers)
    assert (refused.status_code, set(refused.json()["error"])) == (status, {"code", "message"})


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
