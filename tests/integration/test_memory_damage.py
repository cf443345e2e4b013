"""A memory whose store is broken names the damage, loses nothing that comes meanwhile, and takes a backup in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.memories import MemoryClient, asking, critique, memory_settings, remembering, response
from support.mortal import replica
from support.on_disk import full_disk
from support.services import announced, running
from support.waiting import eventually

from services.memory.repair import repair
from services.memory.service import app
from services.memory.settings import MemorySettings
from shared.envelope import now_ms
from shared.testing.model_server import ScriptedModelServer

# more than Chroma keeps in its queue: the vectors are in files of their own
MANY = 1_100


def garble(path: Path, at: int = 0, length: int = 20_000) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(os.urandom(length))


def in_database(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "chroma.sqlite3"
        with contextlib.closing(sqlite3.connect(path)) as db:
            # what stands in the log only would mend the damage
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        change(path)

    return damage


# what was done to Chroma's folder
DAMAGE: dict[str, Callable[[Path], object]] = {
    "garbled": in_database(garble),
    "cut off": in_database(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "emptied": in_database(lambda path: os.truncate(path, 0)),
    "gone": in_database(os.unlink),
    "folder gone": shutil.rmtree,
}


SAID = [response("Which harbour is nearest?", "Bergen."), response("Tea?", "Mint.", user_id="ben")]


async def _told(client: MemoryClient) -> None:
    await client.publish(*SAID, critique(SAID[0], 5))
    await client.idle()
    assert (await client.tool("save_topic", topic="user.pet", content="A cat.")).error is None


async def _given_many(client: MemoryClient) -> None:
    lines = [{"content": f"Note number {n} about harbours.", "user_id": "ann"} for n in range(MANY)]
    for at in range(0, MANY, 100):
        assert (await client.manage("import", lines=lines[at : at + 100]))["errors"] == []


async def _made(server_url: str, folder: Path, fill: Callable[[MemoryClient], Awaitable[None]]) -> None:
    async with remembering(server_url, folder) as client:
        await fill(client)


@pytest.fixture(scope="module")
def whole(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory's folder, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    asyncio.run(_made(server_url, folder, _told))
    return folder


@pytest.fixture(scope="module")
def large(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory's folder with more in it, to be copied."""
    folder = tmp_path_factory.mktemp("large")
    asyncio.run(_made(server_url, folder, _given_many))
    return folder


@pytest.fixture
def filled(whole: Path, tmp_path: Path) -> Path:
    """A folder of a memory that was told a few things, and ended."""
    return shutil.copytree(whole, tmp_path / "memory")


async def repaired(folder: Path) -> str:
    """What the repair says."""
    said = await repair(MemorySettings(data_dir=folder))
    return "\n".join(said)


async def degraded(client: MemoryClient) -> bool:
    return "the memory's store is damaged" in ((await client.facts()).get("degraded") or "")


@pytest.mark.parametrize("damage", DAMAGE)
async def test_broken_store_is_reported_and_a_backup_restores_it(redis_url: str, filled: Path, damage: str) -> None:
    async with remembering(redis_url, filled) as client:
        backup = [*await client.exported(), *await client.exported("ben")]
    DAMAGE[damage](filled / "chroma")
    later = response("Where is the station?", "In Oslo.")
    async with (
        ScriptedModelServer() as server,
        running(app, memory_settings(redis_url, filled, server.url)),
        asking(redis_url, filled, server) as client,
    ):
        await announced(redis_url, "memory")
        await eventually(lambda: degraded(client), 20, "the memory names the damage")
        assert "restore the backup" in (await client.facts())["degraded"]
        assert (await client.tool("search_memory", query="harbour")).error is not None
        assert "damaged" in str((await client.managed("list")).error)
        assert (await client.tool("save_memory", content="A note.")).result != "Memory saved."
        await client.publish(later)

    told = await repaired(filled)
    assert "chroma-words.broken-" in told
    assert "chroma.broken-" in told or damage == "folder gone"
    assert await repaired(filled) == ""
    async with remembering(redis_url, filled) as client:
        # what came meanwhile is taken in at once, what was there before with the backup
        await client.idle()
        assert later.response_id in await client.engrams()
        for user_id in ("ann", "ben"):
            lines = [line for line in backup if line["user_id"] == user_id]
            assert (await client.manage("import", user_id, lines=lines))["errors"] == []
        assert {one["score"] for one in (await client.engrams()).values() if one["query"] == SAID[0].query} == {5}
        assert (await client.tool("recall_topic", topic="user.pet")).result.endswith("A cat.")
        hits = (await client.manage("search", query="harbour Bergen"))["hits"]
        assert hits[0]["answer"] == "Bergen."
        assert hits[0]["why"]["similarity"] is not None
        assert len(await client.engrams("ben")) == 1


def test_repair_leaves_a_folder_alone_that_is_new(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCAL2_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "services.memory.repair"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def cut_off(vectors: Path) -> None:
    """As a process leaves it that dies while Chroma writes the list of ids."""
    file = vectors / "index_metadata.pickle"
    os.truncate(file, file.stat().st_size // 2)


def emptied(vectors: Path) -> None:
    for file in vectors.iterdir():
        os.truncate(file, 0)


def garbled(vectors: Path) -> None:
    for file in vectors.iterdir():
        garble(file, 0, min(5_000, file.stat().st_size))


def vectors_of(folder: Path) -> Path:
    """The folder of the largest vector index."""
    folders = [path for path in (folder / "chroma").iterdir() if path.is_dir()]
    return max(folders, key=lambda one: (one / "data_level0.bin").stat().st_size)


async def whole_again(client: MemoryClient) -> bool:
    """Return whether everything has a vector of the model."""
    facts = await client.facts()
    return facts.get("degraded") is None and facts.get("reembedding") == 0 and await similar(client)


async def numbers(client: MemoryClient) -> set[int]:
    """Return the numbers of all notes, which must be there once."""
    found: list[int] = []
    cursor = None
    while True:
        page = await client.manage("export", cursor=cursor, limit=500)
        found += [int(line["content"].split()[2]) for line in page["lines"]]
        cursor = page["cursor"]
        if cursor is None:
            assert len(found) == len(set(found))
            return set(found)


async def similar(client: MemoryClient) -> bool:
    hits = (await client.manage("search", query="Note number 7 about harbours."))["hits"]
    return bool(hits) and all(hit["why"]["similarity"] is not None for hit in hits)


@pytest.mark.slow
@pytest.mark.parametrize("change", [cut_off, emptied], ids=lambda change: change.__name__)
async def test_memory_rebuilds_a_damaged_vector_index(
    redis_url: str, large: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    place = shutil.copytree(large, tmp_path / "memory")
    async with remembering(redis_url, place):
        # from now on a start does not read the store
        pass
    change(vectors_of(place))
    async with remembering(redis_url, place) as client:
        # by their words until the vectors are there
        found = await client.manage("search", query="Note number 7 about harbours.")
        assert found["hits"][0]["content"] == "Note number 7 about harbours."
        assert "by words only" in found["degraded"]
        await eventually(lambda: whole_again(client), 30, "the vectors are there again")
        assert await numbers(client) == set(range(MANY))
    assert await repaired(place) == ""


@pytest.mark.slow
async def test_rebuild_that_is_killed_loses_nothing(redis_url: str, large: Path, tmp_path: Path) -> None:
    place = shutil.copytree(large, tmp_path / "memory")
    cut_off(vectors_of(place))
    async with ScriptedModelServer() as server, asking(redis_url, place, server) as client:
        with replica("memory", redis_url, place, server.url, "copied") as dying:
            # it finds the damage when it reads the store: this Redis has no changes of it
            await dying.died()
        since = now_ms()
        async with running(app, memory_settings(redis_url, place, server.url)):
            await client.indexed(since)
            await eventually(lambda: similar(client), 30, "the vectors are there again")
            await eventually(lambda: whole_again(client), 30, "all of them")
            assert await numbers(client) == set(range(MANY))
    assert await repaired(place) == ""


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["mark", "*.db*"])
async def test_damaged_index_without_a_copy_is_reported_and_put_aside(
    redis_url: str, large: Path, tmp_path: Path, lost: str
) -> None:
    place = shutil.copytree(large, tmp_path / "memory")
    cut_off(vectors_of(place))
    for file in (place / "chroma-words").glob(lost):
        file.unlink()
    async with (
        ScriptedModelServer() as server,
        running(app, memory_settings(redis_url, place, server.url)),
        asking(redis_url, place, server) as client,
    ):
        await announced(redis_url, "memory")
        await eventually(lambda: degraded(client), 20, "the memory names the damage")
        assert "restore the backup" in (await client.facts())["degraded"]
        assert (await client.tool("search_memory", query="harbour")).error is not None
    assert "chroma.broken-" in await repaired(place)
    assert await repaired(place) == ""


@pytest.mark.slow
@pytest.mark.parametrize("change", [shutil.rmtree, emptied, garbled], ids=lambda change: change.__name__)
async def test_repair_rebuilds_a_damaged_vector_index(
    redis_url: str, large: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    place = shutil.copytree(large, tmp_path / "memory")
    change(vectors_of(place))
    told = await repaired(place)
    assert f"the damaged vector index of {MANY} memories was rebuilt from the keyword index" in told
    assert await repaired(place) == ""
    async with remembering(redis_url, place) as client:
        await eventually(lambda: whole_again(client), 30, "the vectors are there again")
        assert await numbers(client) == set(range(MANY))


async def test_repair_changes_nothing_of_a_store_on_a_full_disk(filled: Path) -> None:
    before = set(os.listdir(filled))
    with full_disk():
        assert await repaired(filled) == ""
    assert set(os.listdir(filled)) == before


async def test_words_that_have_vanished_are_made_anew(redis_url: str, filled: Path) -> None:
    for file in (filled / "chroma-words").glob("*.db"):
        # with its mark there, an empty file would pass for a user without words
        os.truncate(file, 0)
    for file in (filled / "chroma-words").glob("*.db-*"):
        file.unlink()
    async with remembering(redis_url, filled) as client:

        async def by_word() -> bool:
            hits = (await client.manage("search", query="harbour"))["hits"]
            return [hit["why"]["keyword_rank"] for hit in hits] == [1]

        await eventually(by_word, 20, "the words are there")
    (filled / "chroma-words" / "mark").write_bytes(os.urandom(40))
    async with remembering(redis_url, filled) as client:
        assert (await client.manage("search", query="harbour"))["hits"]
