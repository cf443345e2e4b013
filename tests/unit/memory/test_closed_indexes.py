"""More users than there are open indexes: whose index was closed for another one finds everything all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.memory import chroma
from services.memory.chroma import Collection, Collections, embedded
from services.memory.vectors import Space

USERS = 40


def test_an_index_that_was_closed_for_others_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chroma, "_OPEN", 16)
    collections = Collections(lambda: embedded(tmp_path), "test", shared=False)
    space = Space("m", 4)
    record = {"ids": ["a", "b"], "embeddings": [[1.0, 0, 0, 0], [0, 1.0, 0, 0]], "metadatas": [{"n": 1}, {"n": 2}]}
    for number in range(USERS):
        collections.upsert(f"user-{number}", space, record)

    def nearest(collection: Collection) -> list[str]:
        found: list[str] = collection.handle.query(query_embeddings=[[0, 1.0, 0, 0]], n_results=2)["ids"][0]
        return found

    for _ in range(2):
        for number in range(USERS):
            assert collections.each(f"user-{number}", nearest) == [["b", "a"]]
    collections.close()
