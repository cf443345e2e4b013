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
from support.services import announced, running
from support.waiting import eventually

from services.memory.repair import repair
from services.memory.service import app
from services.memory.settings import MemorySettings
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


@pytest.mark.slow
@pytest.mark.parametrize("change", ["gone", "emptied", "garbled"])
async def test_broken_files_of_vectors_are_found_by_the_repair(large: Path, tmp_path: Path, change: str) -> None:
    place = shutil.copytree(large, tmp_path / "memory")
    folders = [path for path in (place / "chroma").iterdir() if path.is_dir()]
    # the other collection's vectors have one dimension
    vectors = max(folders, key=lambda folder: (folder / "data_level0.bin").stat().st_size)
    match change:
        case "gone":
            shutil.rmtree(vectors)
        case "emptied":
            for file in vectors.iterdir():
                os.truncate(file, 0)
        case _:
            for file in vectors.iterdir():
                garble(file, 0, min(5_000, file.stat().st_size))
    told = await repaired(place)
    assert "the memory's store is damaged" in told
    assert "chroma.broken-" in told
    assert await repaired(place) == ""


async def test_repair_changes_nothing_of_a_store_on_a_full_disk(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.participant.disk._KEPT", 2**80)
    monkeypatch.setattr("shared.participant.disk._SHARE", 1)
    before = set(os.listdir(filled))
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
