"""Data of the version before this one, whose memory used Chroma's compiled part, open unchanged."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path

import pytest
from support.forked import TESTS
from support.memories import remembering
from support.waiting import eventually

from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import Vector

RECORDED = TESTS / "support" / "memory_store" / "1.5-compiled.tar.xz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


async def test_old_store_has_its_engrams_and_vectors(old: Path) -> None:
    async with open_store(MemorySettings(data_dir=old)) as store:
        assert await store.users() == {"ann", "ben"}
        placed = [one async for page in store.of_user("ann") for one in page]
        assert {one.engram.id for one in placed} == {f"{n}-0:A" for n in range(1_100)}
        assert all(one.vector is not None and math.hypot(*one.vector.values) == pytest.approx(1) for one in placed)
        near = await store.query("ann", Vector("m", [math.cos(2.5), math.sin(2.5), 0.0, 0.0]), 3)
        assert near[0].id == "500-0:A"
        assert near[0].similarity == pytest.approx(1)
        assert [topic.content for topic in await store.topics("ben")] == ["A cat."]
        assert set(await store.get("ben", ["topic:ben", "7-0:B", "8-0:A"])) == {"topic:ben", "7-0:B"}
        await store.delete("ann", ["500-0:A"])
        near = await store.query("ann", Vector("m", [math.cos(2.5), math.sin(2.5), 0.0, 0.0]), 3)
        assert "500-0:A" not in [hit.id for hit in near]


async def test_memory_starts_on_old_data_and_finds_them(redis_url: str, old: Path) -> None:
    async with remembering(redis_url, old, on_model_change="refuse", embedding_model="m") as client:

        async def whole() -> bool:
            return (await client.facts())["engrams"] == 1_102

        await eventually(whole, 20, "it has started")
        assert (await client.manage("list"))["total"] == 1_100
        found = (await client.manage("search", query="question 417"))["hits"]
        assert found[0]["id"] == "417-0:A"
        assert set(await client.engrams("ben")) == {"topic:ben", "7-0:B"}
