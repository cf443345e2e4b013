"""The keyword index made anew from the store, or mended from it: it has the engrams' vectors again, too."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.memories import MemoryClient, remembering, response
from support.waiting import eventually

from services.memory.chroma import Collection
from services.memory.keywords import Entry, KeywordIndex
from shared.contracts import MEMORY_CHANGED, MemoryChanged, ResponseGeneration

SAID = [("Which harbour is nearest?", "Bergen."), ("Where is the harbour master?", "At the pier."), ("Tea?", "Mint.")]


def said() -> list[ResponseGeneration]:
    return [response(*turn) for turn in SAID]


def places(folder: Path, query: str = "harbour pier tea") -> dict[str, list[float]]:
    """What the index has of engrams with these words: their vectors."""
    index = KeywordIndex(folder / "chroma-words")
    try:
        hits = index.search("ann", query, 10).hits
    finally:
        index.close()
    assert {hit.model for hit in hits} == {"nomic-embed-text"}
    return {hit.id: np.frombuffer(hit.vector or b"", dtype=np.float16).astype(float).tolist() for hit in hits}


async def similarities(client: MemoryClient, query: str) -> dict[str, float]:
    hits = (await client.manage("search", query=query))["hits"]
    return {hit["id"]: hit["why"]["similarity"] for hit in hits}


async def filled(redis_url: str, folder: Path, responses: Sequence[ResponseGeneration]) -> dict[str, list[float]]:
    """A memory that has ended; the vectors in its index."""
    async with remembering(redis_url, folder) as client:
        await client.publish(*responses)
        await client.idle()
    before = places(folder)
    assert len(before) == len(responses)
    return before


def same(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    return one.keys() == other.keys() and all(one[id_] == pytest.approx(other[id_], abs=1e-3) for id_ in one)


async def test_an_index_made_anew_has_the_vectors_again(redis_url: str, tmp_path: Path) -> None:
    before = await filled(redis_url, tmp_path, said())
    for file in (tmp_path / "chroma-words").iterdir():
        file.unlink()
    async with remembering(redis_url, tmp_path) as client:
        found = await similarities(client, "harbour")
        assert len(found) == 2
        assert all(value is not None for value in found.values())
    assert same(places(tmp_path), before)


@pytest.mark.parametrize("lost", ["nothing", "words", "one file", "mark"])
async def test_lost_words_come_back_from_the_store(redis_url: str, tmp_path: Path, lost: str) -> None:
    others = [response("Which harbour is far?", "Lima.", user_id=f"user-{n}", session_id=f"of-{n}") for n in range(5)]
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(*said(), *others)
        await client.idle()
    pattern = {"words": "*.db*", "one file": "*.db*", "mark": "mark"}.get(lost, "-")
    found = sorted((tmp_path / "chroma-words").glob(pattern))
    for file in found[:1] if lost == "one file" else found:
        file.unlink()
    async with remembering(redis_url, tmp_path) as client:
        for user_id, count in (("ann", len(SAID)), *((f"user-{n}", 1) for n in range(5))):
            assert (await client.manage("list", user_id))["total"] == count
            ranks = [
                hit["why"]["keyword_rank"] for hit in (await client.manage("search", user_id, query="harbour"))["hits"]
            ]
            assert sorted(rank or 0 for rank in ranks) == ([1, 2] if user_id == "ann" else [1])
        assert (await client.manage("delete_user", "user-1"))["deleted"] == 1
        assert (await client.manage("list", "user-1"))["total"] == 0


async def test_start_reads_no_engrams_from_the_store(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's collection takes a tenth of a second when it is opened first."""
    await filled(redis_url, tmp_path, said())
    monkeypatch.setattr(Collection, "get", None)
    monkeypatch.setattr(Collection, "count", None)
    async with remembering(redis_url, tmp_path) as client:
        await eventually(client.facts, 20, "it has started")
        assert (await client.facts())["engrams"] == len(SAID)


async def test_index_of_an_older_version_finds_no_hidden_answer(redis_url: str, tmp_path: Path) -> None:
    shown, hidden = response(*SAID[0]), response(*SAID[1], respondent_id="B")
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(shown, hidden)
        await client.idle()
    # The files of an older version: each answer with its words, and another version number.
    words = tmp_path / "chroma-words"
    index = KeywordIndex(words)
    data = index.data("ann", [hidden.response_id])[hidden.response_id]
    index.add("ann", [Entry(hidden.response_id, " ".join(SAID[1]), data=data, talk="B:s1")])
    index.close()
    for file in words.glob("*.db"):
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("PRAGMA user_version = 1")
    (words / "mark").write_text("1\n0-0")
    async with remembering(redis_url, tmp_path) as client:

        async def found() -> bool:
            hits = (await client.manage("search", query="Which harbour is nearest? The pier?"))["hits"]
            assert hidden.response_id not in [hit["id"] for hit in hits]
            return [hit["why"]["keyword_rank"] for hit in hits] == [1]

        await eventually(found, 20, "the words are there again")
        assert set(await client.engrams()) == {shown.response_id, hidden.response_id}


async def test_a_damaged_index_is_mended_with_the_vectors(redis_url: str, tmp_path: Path) -> None:
    before = await filled(redis_url, tmp_path, said())
    for file in (tmp_path / "chroma-words").glob("*.db*"):
        file.write_bytes(b"no database" * 1_000)
    async with remembering(redis_url, tmp_path) as client:

        async def mended() -> bool:
            return len(await similarities(client, "harbour")) == 2

        await eventually(mended, 10, "the index is mended")
    assert same(places(tmp_path), before)


async def test_what_another_replica_has_written_comes_with_its_vector(redis_url: str, tmp_path: Path) -> None:
    first, second, third = said()
    before = await filled(redis_url, tmp_path, [first, second, third])
    index = KeywordIndex(tmp_path / "chroma-words")
    index.remove("ann", [second.response_id])
    index.close()
    async with remembering(redis_url, tmp_path) as client:
        # as if somebody else had written it to the store
        change = MemoryChanged(user_id="ann", put=[second.response_id])
        await client.bus.publish(MEMORY_CHANGED.of(change, user_id="ann"))

        async def known() -> bool:
            hits = (await client.manage("search", query="harbour master pier"))["hits"]
            return second.response_id in [hit["id"] for hit in hits if hit["why"]["keyword_rank"]]

        await eventually(known, 10, "the change is followed")
    assert same(places(tmp_path), before)
