"""Batches, patience and prefixes of the embedder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.memory import embedding
from services.memory.embedding import open_embedder
from services.memory.pace import Pace
from shared.errors import PermanentError
from shared.llm.port import ModelRejected, ModelUnavailable


async def nobody() -> bool:
    """No user is being answered."""
    return False


class Backend:
    """A vector says how long its text was."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.away = False
        self.most: int | None = None
        self.gate: asyncio.Event | None = None

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise ModelUnavailable("gone")
        if self.most is not None and any(len(text) > self.most for text in texts):
            raise ModelRejected("too long")
        self.calls.append(list(texts))
        return [[float(len(text))] for text in texts]

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(embedding, "_PROBE_SECONDS", 0.02)


async def test_texts_that_come_while_a_call_runs_share_the_next_one() -> None:
    backend = Backend()
    async with open_embedder(backend, "all-minilm", batch=4, pace=Pace(nobody)) as embedder:
        await embedder.documents(["first"])
        backend.calls.clear()
        backend.gate = asyncio.Event()
        waiting = [asyncio.create_task(embedder.documents([f"{n}" * (n + 1)])) for n in range(9)]
        while embedder.waiting < 9:
            await asyncio.sleep(0)
        backend.gate.set()
        found = await asyncio.gather(*waiting)
    assert [vector for (vector,) in found] == [[float(n + 1)] for n in range(9)]
    assert len(backend.calls) <= 4
    assert max(map(len, backend.calls)) == 4


async def test_documents_wait_for_a_model_that_is_away_and_questions_do_not() -> None:
    backend = Backend()
    backend.away = True
    async with open_embedder(backend, "all-minilm", batch=4, pace=Pace(nobody)) as embedder:
        waiting = asyncio.create_task(embedder.documents(["kept"]))
        assert await embedder.query("now") is None
        assert embedder.away == "gone"
        backend.away = False
        assert await waiting == [[4.0]]
        assert embedder.away is None
        assert await embedder.query("now") == [3.0]


async def test_nomic_wants_to_be_told_what_a_text_is() -> None:
    backend = Backend()
    async with open_embedder(backend, "nomic-embed-text:latest", batch=4, pace=Pace(nobody)) as embedder:
        await embedder.documents(["d"])
        await embedder.query("q")
    assert [text for call in backend.calls for text in call if text != "ping"] == [
        "search_document: d",
        "search_query: q",
    ]


async def test_a_text_that_is_refused_is_shortened_and_harms_no_other() -> None:
    backend = Backend()
    backend.most = 300
    async with open_embedder(backend, "all-minilm", batch=4, pace=Pace(nobody)) as embedder:
        found = await asyncio.gather(embedder.documents(["x" * 1_000]), embedder.documents(["short"]))
        assert found == [[[250.0]], [[5.0]]]
        backend.most = 0
        with pytest.raises(PermanentError, match="refuses every text"):
            await embedder.documents(["any"])
