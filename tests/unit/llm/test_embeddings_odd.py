"""Whatever a server answers to texts: vectors, or one of our errors with a sentence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
import pytest
from support.loopback import listening

from shared.errors import ModelError
from shared.llm.defaults import embedding_model
from shared.llm.factory import Backend, open_embedding_model
from shared.llm.port import AccessRefused, ModelOverloaded, NotOffered
from shared.llm.vectors import unit_vectors

BACKENDS: tuple[Backend, ...] = ("ollama", "openai", "google_genai")


@contextlib.asynccontextmanager
async def answering(status: int, body: bytes, kind: str = "application/json") -> AsyncIterator[str]:
    """A server that gives every request the same answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
                told = (
                    f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close"
                )
                writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (told.encode(), len(body), body))
                await writer.drain()
        finally:
            writer.close()

    async with listening(answer) as port:
        yield f"http://127.0.0.1:{port}"


async def refused(backend: Backend, status: int, body: bytes, kind: str = "application/json") -> ModelError:
    async with answering(status, body, kind) as url:
        address = f"{url}/v1" if backend == "openai" else url
        model = open_embedding_model(backend, base_url=address, api_key="k")
        try:
            async with asyncio.timeout(30):
                with pytest.raises(ModelError) as caught:
                    await model.embed("m", ["one", "two"])
        finally:
            await model.aclose()
    assert str(caught.value)
    return caught.value


ODD = {
    "nothing": b"",
    "a page": b"<!doctype html><title>Sign in</title>",
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "no vectors": b'{"data": null, "embeddings": null}',
    "texts for vectors": b'{"data": ["a", "b"], "embeddings": ["a", "b"]}',
    "vectors of null": b'{"data": [{"embedding": [null]}, {"embedding": [null]}], "embeddings": [[null], [null]]}',
    "empty vectors": b'{"data": [{"embedding": []}, {"embedding": []}], "embeddings": [[], []]}',
    "one too few": b'{"data": [{"embedding": [1.0]}], "embeddings": [[1.0]]}',
    "nested": b'{"data": [{"embedding": [[1.0]]}, {"embedding": [[1.0]]}], "embeddings": [[[1.0]], [[1.0]]]}',
    "two lengths": b'{"data": [{"embedding": [1.0]}, {"embedding": [1, 0]}], "embeddings": [[1.0], [1.0, 0.0]]}',
    "half of it": b'{"data": [{"embedding": [0.1, 0.2',
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("odd", ODD, ids=list(ODD))
async def test_an_answer_without_vectors_is_a_model_error(backend: Backend, odd: str) -> None:
    await refused(backend, 200, ODD[odd], "text/html" if odd == "a page" else "application/json")


@pytest.mark.parametrize("backend", ["ollama", "openai"])
async def test_an_error_with_status_200_is_told_in_its_own_words(backend: Backend) -> None:
    error = await refused(backend, 200, b'{"error": {"message": "the card is overheated"}}')
    assert "the card is overheated" in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessRefused), (403, AccessRefused), (404, NotOffered), (405, NotOffered), (501, NotOffered),
     (429, ModelOverloaded), (503, ModelOverloaded), (500, ModelError)],
)  # fmt: skip
async def test_a_refusal_says_whether_it_is_for_good(backend: Backend, status: int, kind: type[ModelError]) -> None:
    assert type(await refused(backend, status, b"")) is kind


async def test_servers_that_do_not_number_their_vectors_keep_the_order() -> None:
    data = orjson.dumps({"data": [{"embedding": [3.0, 0.0]}, {"embedding": [0.0, 2.0]}]})
    async with answering(200, data) as url:
        model = open_embedding_model("openai", base_url=f"{url}/v1", api_key="k")
        assert await model.embed("m", ["one", "two"]) == [[1.0, 0.0], [0.0, 1.0]]
        await model.aclose()


def test_vectors_come_at_length_one_and_a_zero_stays() -> None:
    assert unit_vectors([[3.0, 4], [0.0, 0.0]], 2) == [[0.6, 0.8], [0.0, 0.0]]
    for wrong in ([[float("nan")]], [[float("inf")]], [[True]], [[10**400]], [["1"]], [{}]):
        with pytest.raises(ValueError, match="a vector"):
            unit_vectors(wrong, 1)


def test_each_backend_is_asked_for_a_model_that_it_may_have() -> None:
    assert embedding_model("ollama") == "nomic-embed-text"
    assert embedding_model("openai", "http://box:8000/v1") == "nomic-embed-text"
    assert embedding_model("openai", "https://api.openai.com/v1") == "text-embedding-3-small"
    assert embedding_model("google_genai") == "gemini-embedding-001"
