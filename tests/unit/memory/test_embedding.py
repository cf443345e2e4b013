"""Batches, patience and prefixes of the embedder, and who stands in for a server that does not embed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from services.memory.embedding import BUILT_IN, Embedder, open_embedder
from services.memory.throttle import Pace
from services.memory.vectors import NO_VECTOR, Space, Vector
from shared.errors import ModelError
from shared.llm.port import (
    AccessRefused,
    ContextOverflow,
    ModelMissing,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    NotOffered,
)


async def nobody() -> bool:
    """No user is being answered."""
    return False


class Backend:
    """A vector says how long its text was. `refusal` is raised for every text, or for those longer than `most`."""

    def __init__(self, dimension: int = 1) -> None:
        self.calls: list[list[str]] = []
        self.refusal: Exception | None = None
        self.most: int | None = None
        self.dimension = dimension
        self.gate: asyncio.Event | None = None

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        if self.gate is not None:
            await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        if self.most is not None and any(len(text) > self.most for text in texts):
            raise ModelRejected("too long")
        self.calls.append(list(texts))
        return [[float(len(text))] * self.dimension for text in texts]

    async def aclose(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def opened(
    backend: Backend, model: str = "all-minilm", stand_in: Backend | None = None
) -> AsyncIterator[Embedder]:
    async with (
        asyncio.timeout(60),
        open_embedder(backend, model, batch=4, pace=Pace(nobody), stand_in=stand_in) as embedder,
    ):
        yield embedder


def of(model: str, *lengths: float) -> list[Vector]:
    return [Vector(model, [length]) for length in lengths]


async def test_texts_that_come_while_a_call_runs_share_the_next_one() -> None:
    backend = Backend()
    async with opened(backend) as embedder:
        await embedder.documents(["first"])
        backend.calls.clear()
        backend.gate = asyncio.Event()
        waiting = [asyncio.create_task(embedder.documents([f"{n}" * (n + 1)])) for n in range(9)]
        while embedder.waiting < 9:
            await asyncio.sleep(0)
        backend.gate.set()
        found = await asyncio.gather(*waiting)
    assert found == [of("all-minilm", n + 1) for n in range(9)]
    assert len(backend.calls) <= 4
    assert max(map(len, backend.calls)) == 4


@pytest.mark.parametrize(
    "passing",
    [ModelUnavailable("gone"), ModelOverloaded("gone"), ModelError("gone")],
    ids=lambda exc: type(exc).__name__,
)
async def test_documents_wait_for_a_model_that_is_away_and_questions_do_not(passing: ModelError) -> None:
    backend = Backend()
    backend.refusal = passing
    async with opened(backend, stand_in=Backend()) as embedder:
        waiting = asyncio.create_task(embedder.documents(["kept"]))
        assert await embedder.query("now") is None
        assert embedder.trouble == "embedding model all-minilm: gone"
        assert embedder.lacking is None
        backend.refusal = None
        assert await waiting == of("all-minilm", 4)
        assert embedder.trouble is None
        assert await embedder.query("now") == Vector("all-minilm", [3.0])


async def test_nomic_wants_to_be_told_what_a_text_is() -> None:
    backend = Backend()
    async with opened(backend, "nomic-embed-text:latest") as embedder:
        await embedder.documents(["d"])
        await embedder.query("q")
    assert [text for call in backend.calls for text in call if not text.endswith("ping")] == [
        "search_document: d",
        "search_query: q",
    ]


async def test_a_text_that_is_refused_is_shortened_and_harms_no_other() -> None:
    backend = Backend()
    backend.most = 300
    async with opened(backend) as embedder:
        found = await asyncio.gather(embedder.documents(["x" * 1_000]), embedder.documents(["short"]))
        assert found == [of("all-minilm", 250), of("all-minilm", 5)]
        assert embedder.trouble is None


async def test_a_text_that_the_model_takes_at_no_length_is_kept_without_a_vector() -> None:
    backend = Backend()
    backend.most = 10
    async with opened(backend) as embedder:
        assert await embedder.documents(["x" * 1_000, "short"]) == [NO_VECTOR, *of("all-minilm", 5)]
        assert embedder.trouble is None


FINAL = [
    NotOffered("This server does not support embeddings. Start it with `--embeddings`"),
    ModelMissing("the server does not have the model m"),
    AccessRefused("the model backend refuses the API key"),
    ModelRejected("a refusal of whatever is asked"),
    ContextOverflow("a context for nothing at all"),
]


@pytest.mark.parametrize("final", FINAL, ids=lambda exc: type(exc).__name__)
async def test_a_server_without_embeddings_is_not_waited_for(final: ModelError) -> None:
    backend = Backend()
    backend.refusal = final
    async with opened(backend, "m") as embedder:
        assert await embedder.documents(["x" * 1_000, "short"]) == [NO_VECTOR, NO_VECTOR]
        assert await embedder.query("now") is None
        assert await embedder.soon(["now"]) == [NO_VECTOR]
        assert (embedder.using, embedder.space) == ("", None)
        assert embedder.trouble == f"embedding model m: {final}; until then memories are found by their words alone"
        backend.refusal = None
        await embedder.look()
        assert embedder.moved.is_set()
        assert (embedder.using, embedder.space, embedder.trouble) == ("m", Space("m", 1), None)
        assert await embedder.documents(["short"]) == of("m", 5)


@pytest.mark.parametrize("final", FINAL, ids=lambda exc: type(exc).__name__)
async def test_the_built_in_model_stands_in_until_the_server_embeds(final: ModelError) -> None:
    backend, built_in = Backend(), Backend(dimension=2)
    backend.refusal = final
    async with opened(backend, "nomic-embed-text", built_in) as embedder:
        assert await embedder.documents(["short"]) == [Vector(BUILT_IN, [5.0, 5.0])]
        assert await embedder.query("now") == Vector(BUILT_IN, [3.0, 3.0])
        assert (embedder.using, embedder.space) == (BUILT_IN, Space(BUILT_IN, 2))
        assert embedder.trouble is not None
        assert embedder.trouble.endswith("until then memories are found by the small built-in model all-minilm")
        embedder.moved.clear()
        # a server that is away for a while may still not embed when it is back
        backend.refusal = ModelUnavailable("gone")
        await embedder.look()
        assert embedder.using == BUILT_IN
        backend.refusal = None
        await embedder.look()
        assert embedder.moved.is_set()
        assert (embedder.space, embedder.trouble) == (Space("nomic-embed-text", 1), None)


async def test_a_built_in_model_that_does_not_run_leaves_the_words() -> None:
    backend, built_in = Backend(), Backend()
    backend.refusal, built_in.refusal = NotOffered("none"), ModelError("it cannot be loaded")
    async with opened(backend, "m", built_in) as embedder:
        assert await embedder.documents(["short"]) == [NO_VECTOR]
        assert embedder.using == ""


async def test_another_dimension_is_another_space() -> None:
    backend = Backend(dimension=384)
    async with opened(backend, "m") as embedder:
        await embedder.documents(["before"])
        assert embedder.space == Space("m", 384)
        embedder.moved.clear()
        backend.dimension = 768
        await embedder.documents(["after"])
        assert embedder.space == Space("m", 768)
        assert embedder.moved.is_set()


async def test_what_fails_without_a_reason_ends_the_block_instead_of_every_later_embedding() -> None:
    backend = Backend()
    backend.refusal = AssertionError("a bug")
    with pytest.raises(BaseExceptionGroup) as ended:
        async with opened(backend) as embedder:
            await embedder.documents(["never"])
    assert ended.group_contains(AssertionError, match="a bug")


async def test_plain_vectors_have_no_prefix_and_say_why_there_are_none() -> None:
    backend = Backend()
    embedder = Embedder(backend, "nomic-embed-text", 8, Pace(nobody, 0.0))
    (vector,) = await embedder.plain(["hello"], 1.0)
    assert (vector.model, backend.calls) == ("nomic-embed-text", [["hello"]])
    backend.gate = asyncio.Event()
    with pytest.raises(ModelError, match="did not answer within"):
        await embedder.plain(["hello"], 0.01)
    backend.gate = None
    backend.refusal = ModelRejected("too odd")
    with pytest.raises(ModelRejected):
        await embedder.plain(["hello"], 1.0)
    backend.refusal = NotOffered("started without embeddings")
    with pytest.raises(ModelError, match="started without embeddings"):
        await embedder.plain(["hello"], 1.0)
    embedder.lacking, embedder.away = None, "no route to it"
    with pytest.raises(ModelError, match="no route to it"):
        await embedder.plain(["hello"], 1.0)
