"""What the routes of files ask of the memory, and how they pass on what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.gateway.http.auth import authenticated
from services.gateway.http.gateway import gateway_of
from services.gateway.http.keys import Principal
from services.gateway.operations import file_routes as routes

FILE = {"id": "file-1", "name": "a.txt"}


class Memory:
    """Remembers what it is asked; `new`, `found` are its answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.new = True
        self.found: dict[str, Any] = {}

    async def add(self, user_id: str, data: AsyncIterator[bytes], *, name: str, content_type: str) -> Any:
        self.asked.append((user_id, b"".join([part async for part in data]), name, content_type))
        return self.new, FILE

    async def operate(self, user_id: str, **args: Any) -> dict[str, Any]:
        self.asked.append((user_id, args))
        return self.found

    @asynccontextmanager
    async def opened(self, user_id: str, file_id: str) -> AsyncIterator[Any]:
        self.asked.append((user_id, file_id))
        yield {"type": "text/plain", "size": 6, "name": "a ö/b.txt"}, self

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        for piece in (b"one", b"two"):
            yield piece


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()

    @asynccontextmanager
    async def memory_files(gateway: object) -> AsyncIterator[Memory]:
        assert gateway == "the gateway"
        yield memory

    monkeypatch.setattr(routes, "memory_files", memory_files)
    return memory


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.include_router(routes.router)

    async def ann() -> Principal:
        return Principal("ann", "user")

    async def gateway() -> str:
        return "the gateway"

    app.dependency_overrides = {authenticated: ann, gateway_of: gateway}
    return app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        yield http


async def test_a_file_is_added_under_its_name_and_type(http: httpx.AsyncClient, memory: Memory) -> None:
    answer = await http.post("/files?name=a.txt", content=b"words", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json(), answer.headers["location"]) == (201, FILE, "/files/file-1")
    memory.new = False
    answer = await http.post("/files", content=b"words")
    assert (answer.status_code, answer.json(), answer.headers["location"]) == (200, FILE, "/files/file-1")
    assert memory.asked == [("ann", b"words", "a.txt", "text/plain"), ("ann", b"words", "file", "")]
    assert (await http.post("/files", params={"name": "x" * 1_001}, content=b"words")).status_code == 422


async def test_a_file_is_as_large_as_the_gateway_takes(
    http: httpx.AsyncClient, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_FILE_BODY", 10)

    async def parts(*sizes: int) -> AsyncIterator[bytes]:
        for size in sizes:
            yield b"x" * size

    assert (await http.post("/files", content=parts(6, 4))).status_code == 201
    refused = await http.post("/files", content=parts(6, 5))
    assert refused.status_code == 413
    assert memory.asked == [("ann", b"x" * 10, "file", "")]


async def test_a_file_whose_connection_closes_is_told_so(app: FastAPI, memory: Memory) -> None:
    async def cut(scope: Any, receive: Any, send: Any) -> None:
        async def disconnected() -> Any:
            return {"type": "http.disconnect"}

        await app(scope, disconnected, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(cut), base_url="http://127.0.0.1") as http:
        assert (await http.post("/files", content=b"words")).status_code == 400
    assert memory.asked == []


async def test_files_are_listed_page_by_page(http: httpx.AsyncClient, memory: Memory) -> None:
    memory.found = {"files": [FILE], "total": 1, "cursor": None}
    answer = await http.get("/files")
    assert (answer.status_code, answer.json()) == (200, memory.found)
    for params in ({"limit": 1, "cursor": 0}, {"limit": 500, "cursor": 2**62 - 1}):
        assert (await http.get("/files", params=params)).status_code == 200
    assert memory.asked == [
        ("ann", {"op": "list", "limit": limit, "cursor": cursor})
        for limit, cursor in ((100, None), (1, 0), (500, 2**62 - 1))
    ]
    for params in ({"limit": 0}, {"limit": 501}, {"cursor": -1}, {"cursor": 2**62}):
        assert (await http.get("/files", params=params)).status_code == 422


async def test_a_file_is_passed_on_as_it_comes_and_nothing_runs_in_it(http: httpx.AsyncClient, memory: Memory) -> None:
    answer = await http.get("/files/file-1")
    assert (answer.status_code, answer.content) == (200, b"onetwo")
    assert dict(answer.headers) == {
        "content-type": "text/plain", "content-length": "6",
        "content-disposition": "attachment; filename*=UTF-8''a%20%C3%B6%2Fb.txt",
        "content-security-policy": "sandbox; default-src 'none'", "x-content-type-options": "nosniff",
        "cache-control": "private, no-store",
    }  # fmt: skip
    assert memory.asked == [("ann", "file-1")]


async def test_a_file_is_removed_once(http: httpx.AsyncClient, memory: Memory) -> None:
    for found, status in ((True, 200), (False, 404)):
        memory.found = {"found": found}
        answer = await http.delete("/files/file-1")
        assert answer.status_code == status
        if found:
            assert answer.json() == {"id": "file-1", "deleted": True}
    assert memory.asked == [("ann", {"op": "delete", "id": "file-1"})] * 2


async def test_documents_are_searched_and_told_with_their_question(http: httpx.AsyncClient, memory: Memory) -> None:
    memory.found = {"hits": [], "text": "nothing"}
    answer = await http.get("/documents", params={"query": "x"})
    assert (answer.status_code, answer.json()) == (200, {"query": "x", "hits": [], "text": "nothing"})
    for limit in (1, 50):
        assert (await http.get("/documents", params={"query": "y" * 4_000, "limit": limit})).status_code == 200
    assert memory.asked == [
        ("ann", {"op": "search", "query": query, "limit": limit})
        for query, limit in (("x", 5), ("y" * 4_000, 1), ("y" * 4_000, 50))
    ]
    wrong: list[dict[str, Any]] = [{"query": ""}, {"query": "y" * 4_001}, {}]
    for params in (*wrong, {"query": "x", "limit": 0}, {"query": "x", "limit": 51}):
        assert (await http.get("/documents", params=params)).status_code == 422


def test_the_description_says_that_a_file_is_the_body(app: FastAPI) -> None:
    adding = app.openapi()["paths"]["/files"]["post"]
    assert adding["requestBody"]["required"] is True
    assert set(adding["responses"]) == {"200", "201", "400", "401", "408", "413", "415", "422", "429", "503"}
