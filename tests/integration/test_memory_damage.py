"""A memory whose files were broken: it says so, loses nothing that comes meanwhile, and is repaired."""

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

from services.memory.damage import damage_of
from services.memory.repair import _stored, repair
from services.memory.service import app
from services.memory.settings import MemorySettings
from shared.contracts import DEAD_LETTER
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
async def test_a_broken_store_says_so_waits_and_is_repaired(redis_url: str, filled: Path, damage: str) -> None:
    DAMAGE[damage](filled / "chroma")
    later = response("Where is the station?", "In Oslo.")
    async with (
        ScriptedModelServer() as server,
        running(app, memory_settings(redis_url, filled, server.url)),
        asking(redis_url, filled, server) as client,
    ):
        await announced(redis_url, "memory")
        await eventually(lambda: degraded(client), 20, "the memory says that it is damaged")
        assert "local2 doctor --repair" in (await client.facts())["degraded"]
        assert (await client.tool("search_memory", query="harbour")).error is not None
        assert "damaged" in str((await client.managed("list")).error)
        assert (await client.tool("save_memory", content="A note.")).result != "Memory saved."
        await client.publish(later)
        await asyncio.sleep(0.5)
        assert await client.bus.link.call("XLEN", DEAD_LETTER.stream) == 0

    told = await repaired(filled)
    assert "saved: 3 memories of 2 users" in told
    assert "chroma.broken-" in told
    assert await repaired(filled) == ""
    async with remembering(redis_url, filled) as client:
        await client.idle()
        engrams = await client.engrams()
        assert {SAID[0].response_id, later.response_id} < set(engrams)
        assert engrams[SAID[0].response_id]["score"] == 5
        assert (await client.tool("recall_topic", topic="user.pet")).result.endswith("A cat.")
        hits = (await client.manage("search", query="harbour Bergen"))["hits"]
        assert hits[0]["answer"] == "Bergen."
        assert hits[0]["why"]["similarity"] is not None
        assert set(await client.engrams("ben")) == {SAID[1].response_id}


def test_chromas_own_tables_tell_everything_but_the_vectors(filled: Path) -> None:
    found = list(_stored(filled / "chroma" / "chroma.sqlite3", "local2.memory"))
    engrams = {one.id: one for one in found}
    assert {each.response_id for each in SAID} < set(engrams)
    assert engrams[SAID[0].response_id].score == 5
    assert [(one.user_id, one.topic, one.content) for one in found if one.kind == "topic"] == [
        ("ann", "user.pet", "A cat.")
    ]


async def test_when_nothing_can_be_read_that_is_said(redis_url: str, filled: Path) -> None:
    shutil.rmtree(filled / "chroma-words")
    os.truncate(filled / "chroma" / "chroma.sqlite3", 0)
    assert "the memory begins anew" in await repaired(filled)
    async with remembering(redis_url, filled) as client:
        assert await client.engrams() == {}

        async def whole() -> bool:
            return (await client.facts())["degraded"] is None

        await eventually(whole)


def test_a_folder_that_is_new_or_whole_is_left_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCAL2_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "services.memory.repair"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    assert damage_of(tmp_path / "chroma") is None


@pytest.mark.slow
@pytest.mark.parametrize("change", ["gone", "emptied", "garbled"])
async def test_vectors_in_files_that_are_broken_are_missed(
    redis_url: str, large: Path, tmp_path: Path, change: str
) -> None:
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
    assert f"saved: {MANY} memories of 1 users" in told
    async with remembering(redis_url, place) as client:
        hits = (await client.manage("search", query="note number 7", limit=50))["hits"]
        assert hits
        assert all(hit["why"]["similarity"] is not None for hit in hits)


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
