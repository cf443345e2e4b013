"""Memory beside servers that embed nothing, or otherwise than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from support.memories import MemoryClient, remembering, response
from support.waiting import eventually

from services.memory import embedding, reembed
from shared.contracts import DEAD_LETTER
from shared.testing import catalog

REFUSALS: dict[str, tuple[int, Any]] = {
    "llama.cpp": (501, {"error": {"code": 501, "message": "This server does not support embeddings."}}),
    "vLLM": (404, {"detail": "Not Found"}),
    "no such model": (404, {"error": "model 'nomic-embed-text' not found"}),
    "no key": (401, {"error": "unauthorized"}),
    "check of the Host": (403, None),
    "refuses every text": (400, {"error": "the input cannot be embedded"}),
}


class Embedding:
    """What the scripted server does with texts to embed; `refusal` is (status, body)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusal: tuple[int, Any] | None = None
        self.asked = 0
        usual = catalog.Catalog._embed

        async def embed(own: catalog.Catalog, request: Request) -> Response:
            self.asked += 1
            if self.refusal is None:
                return await usual(own, request)
            status, body = self.refusal
            return Response(status_code=status) if body is None else JSONResponse(body, status)

        monkeypatch.setattr(catalog.Catalog, "_embed", embed)
        monkeypatch.setattr(embedding, "_PROBE_SECONDS", 0.1)
        monkeypatch.setattr(embedding, "_LONGEST_PROBE", 0.2)


@pytest.fixture(autouse=True)
def _nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that are missing are looked for at once, and not every few seconds."""
    monkeypatch.setattr(reembed, "_PAUSE", 0.1)


@pytest.fixture
def embeddings(monkeypatch: pytest.MonkeyPatch) -> Embedding:
    return Embedding(monkeypatch)


async def similar(client: MemoryClient, query: str) -> dict[str, bool]:
    """What is found: the answer or content of each hit, and whether its vector was compared."""
    hits = (await client.manage("search", query=query))["hits"]
    return {hit["content"] or hit["answer"]: hit["why"]["similarity"] is not None for hit in hits}


async def degraded(client: MemoryClient) -> str:
    return str((await client.facts()).get("degraded") or "")


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=list(REFUSALS))
async def test_without_embeddings_everything_is_found_by_its_words(
    redis_url: str, tmp_path: Path, embeddings: Embedding, refusal: tuple[int, Any]
) -> None:
    embeddings.refusal = refusal
    async with remembering(redis_url, tmp_path, embedding_stand_in=False) as client:
        said = [response("Where is the harbour?", "In Bergen."), response("word " * 2_000, "A long one.")]
        await client.publish(*said)
        await client.idle()
        assert (await client.tool("save_memory", content="The meeting is in Leipzig.")).result == "Memory saved."
        assert len(await client.engrams()) == 3
        assert await similar(client, "Bergen harbour") == {"In Bergen.": False}
        assert await similar(client, "meeting Leipzig") == {"The meeting is in Leipzig.": False}
        assert await client.bus.link.call("XLEN", DEAD_LETTER.stream) == 0

        async def told() -> bool:
            return "found by their words alone" in await degraded(client)

        await eventually(told, 10, "the memory says what is missing")
        asked = embeddings.asked
        await client.publish(*[response(f"Question {n}?", "Yes.") for n in range(10)])
        await client.idle()
        # only the look now and then
        assert embeddings.asked - asked < 10
        embeddings.refusal = None

        async def whole() -> bool:
            return await degraded(client) == "" and all((await similar(client, "Bergen harbour")).values())

        await eventually(whole, 20, "everything has a vector")
        assert len(await client.engrams()) == 13


@pytest.mark.model
async def test_the_built_in_model_finds_what_shares_no_word(
    redis_url: str, tmp_path: Path, embeddings: Embedding
) -> None:
    embeddings.refusal = REFUSALS["llama.cpp"]
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(response("What do I like to drink?", "You love coffee with oat milk."))
        await client.idle()
        assert await similar(client, "favourite beverage espresso latte") == {"You love coffee with oat milk.": True}

        async def told() -> bool:
            return "the small built-in model all-minilm" in await degraded(client)

        await eventually(told, 10, "the memory says who stands in")
        embeddings.refusal = None

        async def moved() -> bool:
            facts = await client.facts()
            return facts["embedding_in_use"] == "nomic-embed-text" and facts["reembedding"] == 0

        await eventually(moved, 20, "the server makes the vectors")
        await eventually(lambda: _all(client, "coffee oat milk"), 20, "the old one too")


async def _all(client: MemoryClient, query: str) -> bool:
    found = await similar(client, query)
    return bool(found) and all(found.values())


@pytest.mark.model
async def test_vectors_of_the_server_are_kept_for_a_while_when_it_stops_embedding(
    redis_url: str, tmp_path: Path, embeddings: Embedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(response("Where is the harbour?", "In Bergen."))
        await client.idle()
        embeddings.refusal = REFUSALS["vLLM"]
        await client.publish(response("Where is the station?", "In Oslo."))
        await client.idle()
        assert await similar(client, "where harbour station") == {"In Bergen.": False, "In Oslo.": True}
        monkeypatch.setattr(reembed, "_KEPT_SECONDS", 0.0)
        await eventually(lambda: _all(client, "where harbour"), 20, "it has a vector of the built-in model")


@pytest.mark.parametrize("stopped", [True, False], ids=["while stopped", "while running"])
async def test_another_dimension_of_the_same_model_loses_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(response("Where is the harbour?", "In Bergen."))
        await client.idle()
        assert await similar(client, "harbour") == {"In Bergen.": True}
        if not stopped:
            monkeypatch.setattr(catalog, "DIMENSIONS", 2 * catalog.DIMENSIONS)
            await eventually(lambda: _all(client, "where harbour"), 20, "it can be compared again")
            return
    monkeypatch.setattr(catalog, "DIMENSIONS", 2 * catalog.DIMENSIONS)
    async with remembering(redis_url, tmp_path) as client:
        await eventually(lambda: _all(client, "where harbour"), 20, "it can be compared again")
        assert list(await client.engrams())


@pytest.mark.parametrize(
    "odd",
    [(200, None), (200, {"error": "overheated"}), (200, {"embeddings": None}), (200, {"embeddings": [[None]]}),
     (200, []), (500, {"error": "x"}), (429, {"error": "x"}), (503, None)],
    ids=str,
)  # fmt: skip
async def test_an_odd_answer_delays_what_comes_and_loses_nothing(
    redis_url: str, tmp_path: Path, embeddings: Embedding, odd: tuple[int, Any]
) -> None:
    embeddings.refusal = odd
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(response("Where is the harbour?", "In Bergen."))

        async def told() -> bool:
            return "embedding model nomic-embed-text" in await degraded(client)

        await eventually(told, 10, "the memory says what is wrong")
        assert await client.engrams() == {}
        embeddings.refusal = None
        await client.idle()
        assert await similar(client, "harbour") == {"In Bergen.": True}
        assert await client.bus.link.call("XLEN", DEAD_LETTER.stream) == 0
