"""Memory beside servers that embed nothing, or otherwise than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from support.memories import MemoryClient, remembering, response
from support.waiting import eventually

from services.memory import reembed
from shared.contracts import DEAD_LETTER
from shared.testing.catalog import embedding
from shared.testing.model_server import ScriptedModelServer

REFUSALS: dict[str, tuple[int, Any]] = {
    "llama.cpp": (501, {"error": {"code": 501, "message": "This server does not support embeddings."}}),
    "vLLM": (404, {"detail": "Not Found"}),
    "no such model": (404, {"error": "model 'nomic-embed-text' not found"}),
    "no key": (401, {"error": "unauthorized"}),
    "check of the Host": (403, None),
    "refuses every text": (400, {"error": "the input cannot be embedded"}),
}


class EmbeddingServer(ScriptedModelServer):
    """A model server that refuses to embed. refusal: (status, body), None: it embeds. longer: by how many numbers a
    vector is longer than usual. asked: how often it was asked to embed."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: tuple[int, Any] | None = None
        self.longer = 0
        self.asked = 0
        usual = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] != "/api/embed":
                await usual(scope, receive, send)
                return
            self.asked += 1
            response = self._refused() or self._embedded(await Request(scope, receive).json())
            await response(scope, receive, send)

        self.app = app  # type: ignore[assignment]

    def _refused(self) -> Response | None:
        if self.refusal is None:
            return None
        status, body = self.refusal
        return Response(status_code=status) if body is None else JSONResponse(body, status)

    def _embedded(self, body: dict[str, Any]) -> Response:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        return JSONResponse({"embeddings": [embedding(text) + [0.0] * self.longer for text in texts]})


@pytest.fixture
def embeddings() -> EmbeddingServer:
    return EmbeddingServer()


async def similar(client: MemoryClient, query: str) -> dict[str, bool]:
    """What is found: the answer or content of each hit, and whether its vector was compared."""
    hits = (await client.manage("search", query=query))["hits"]
    return {hit["content"] or hit["answer"]: hit["why"]["similarity"] is not None for hit in hits}


async def degraded(client: MemoryClient) -> str:
    return str((await client.facts()).get("degraded") or "")


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=list(REFUSALS))
async def test_without_embeddings_everything_is_found_by_its_words(
    redis_url: str, tmp_path: Path, embeddings: EmbeddingServer, refusal: tuple[int, Any]
) -> None:
    embeddings.refusal = refusal
    async with remembering(redis_url, tmp_path, model_server=embeddings, embedding_stand_in=False) as client:
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


@pytest.mark.slow
async def test_server_that_embeds_again_gives_everything_a_vector(
    redis_url: str, tmp_path: Path, embeddings: EmbeddingServer
) -> None:
    """Memory asks the server again after ten seconds."""
    embeddings.refusal = REFUSALS["no key"]
    async with remembering(redis_url, tmp_path, model_server=embeddings, embedding_stand_in=False) as client:
        await client.publish(*[response(f"Question {n}?", "Yes.") for n in range(10)])
        await client.idle()
        assert not any((await similar(client, "question")).values())
        embeddings.refusal = None

        async def whole() -> bool:
            return await degraded(client) == "" and all((await similar(client, "question")).values())

        await eventually(whole, 40, "everything has a vector")
        assert len(await client.engrams()) == 10


@pytest.mark.model
async def test_the_built_in_model_finds_what_shares_no_word(
    redis_url: str, tmp_path: Path, embeddings: EmbeddingServer
) -> None:
    embeddings.refusal = REFUSALS["llama.cpp"]
    async with remembering(redis_url, tmp_path, model_server=embeddings) as client:
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

        await eventually(moved, 40, "the server makes the vectors")
        await eventually(lambda: _all(client, "coffee oat milk"), 20, "the old one too")


async def _all(client: MemoryClient, query: str) -> bool:
    found = await similar(client, query)
    return bool(found) and all(found.values())


@pytest.mark.model
async def test_vectors_of_the_server_are_kept_for_a_while_when_it_stops_embedding(
    redis_url: str, tmp_path: Path, embeddings: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remembering(redis_url, tmp_path, model_server=embeddings) as client:
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
    redis_url: str, tmp_path: Path, embeddings: EmbeddingServer, stopped: bool
) -> None:
    async with remembering(redis_url, tmp_path, model_server=embeddings) as client:
        await client.publish(response("Where is the harbour?", "In Bergen."))
        await client.idle()
        assert await similar(client, "harbour") == {"In Bergen.": True}
        embeddings.longer = 256
        if not stopped:
            await eventually(lambda: _all(client, "where harbour"), 20, "it can be compared again")
            return
    async with remembering(redis_url, tmp_path, model_server=embeddings) as client:
        await eventually(lambda: _all(client, "where harbour"), 20, "it can be compared again")
        assert list(await client.engrams())


@pytest.mark.parametrize(
    "odd",
    [(200, None), (200, {"error": "overheated"}), (200, {"embeddings": None}), (200, {"embeddings": [[None]]}),
     (200, []), (500, {"error": "x"}), (429, {"error": "x"}), (503, None)],
    ids=str,
)  # fmt: skip
async def test_an_odd_answer_delays_what_comes_and_loses_nothing(
    redis_url: str, tmp_path: Path, embeddings: EmbeddingServer, odd: tuple[int, Any]
) -> None:
    embeddings.refusal = odd
    async with remembering(redis_url, tmp_path, model_server=embeddings) as client:
        await client.publish(response("Where is the harbour?", "In Bergen."))

        async def told() -> bool:
            return "embedding model nomic-embed-text" in await degraded(client)

        await eventually(told, 10, "the memory says what is wrong")
        assert await client.engrams() == {}
        embeddings.refusal = None
        await client.idle()
        assert await similar(client, "harbour") == {"In Bergen.": True}
        assert await client.bus.link.call("XLEN", DEAD_LETTER.stream) == 0
