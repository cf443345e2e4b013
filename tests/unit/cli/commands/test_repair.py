"""`local2 doctor --repair` over all stores of a folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import redis

from services.cli.commands.repair import damages, repair
from services.cli.launch.embedded_redis import EmbeddedRedis
from services.cli.launch.redis_data import DataDamaged
from services.cli.launch.run_lock import AlreadyRunning, run_lock
from services.knowledge.sqlite import open_sqlite
from services.memory.engram import Engram
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import NO_VECTOR
from services.reward.store import Store
from shared.participant import store_marker


def filled(folder: Path) -> None:
    with EmbeddedRedis(folder / "redis") as server, redis.Redis.from_url(server.url) as db:
        db.set("key", "value")
    store_marker.mark_created(folder / "redis")
    Store(folder / "preferences.sqlite").close()
    asyncio.run(knowledge(folder))


async def knowledge(folder: Path) -> None:
    async with open_sqlite(folder / "knowledge.sqlite") as database:
        await database.ping()


def test_damaged_stores_are_named_and_put_aside(tmp_path: Path) -> None:
    filled(tmp_path)
    assert damages(tmp_path, embedded=True) == []
    assert repair(tmp_path, embedded=True) == []
    (tmp_path / "redis" / "appendonlydir" / "appendonly.aof.manifest").unlink()
    os.truncate(tmp_path / "preferences.sqlite", 0)
    (tmp_path / "knowledge.sqlite").write_bytes(b"no database at all" * 500)
    named = dict(damages(tmp_path, embedded=True))
    assert set(named) == {"data of the bus", "preferences", "knowledge"}
    assert dict(damages(tmp_path, embedded=False)).keys() == {"preferences", "knowledge"}
    said = "\n".join(repair(tmp_path, embedded=True))
    assert "the data of the bus were damaged" in said
    assert "preferences.sqlite was damaged" in said
    assert "knowledge.sqlite was damaged" in said
    assert "restore --merge FILE" in said
    (bus,) = (tmp_path / "redis").glob("appendonlydir.broken-*")
    (preferences,) = tmp_path.glob("preferences.sqlite.broken-*")
    assert str(bus) in said
    assert str(preferences) in said
    assert damages(tmp_path, embedded=True) == []
    assert repair(tmp_path, embedded=True) == []
    Store(tmp_path / "preferences.sqlite").close()
    asyncio.run(knowledge(tmp_path))
    with EmbeddedRedis(tmp_path / "redis") as server:
        assert server.keys() == 0


async def memory(folder: Path, count: int) -> None:
    settings = MemorySettings(data_dir=folder)
    many = [(Engram(f"e{n}", "ann", "note", n, n, content=f"note {n}"), NO_VECTOR) for n in range(count)]
    with closing(KeywordIndex(settings.words)) as words:
        words.add("ann", [entry(*one) for one in many])
        words.set_mark("0-0")
    async with open_store(settings) as store:
        await store.put("ann", many)


def test_rebuilt_vector_index_needs_no_backup(tmp_path: Path) -> None:
    # more than Chroma keeps in its log: it writes an index
    asyncio.run(memory(tmp_path, 1_100))
    (ids,) = (tmp_path / "chroma").glob("*/index_metadata.pickle")
    os.truncate(ids, 100)
    (said,) = repair(tmp_path, embedded=False)
    assert "the damaged vector index of 1100 memories was rebuilt from the keyword index" in said
    assert repair(tmp_path, embedded=False) == []


def test_a_bus_whose_whole_folder_was_emptied_is_missed(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in sorted((tmp_path / "redis").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(DataDamaged, match="appendonlydir is gone"):
        EmbeddedRedis(tmp_path / "redis").start()
    assert "the data of the bus were damaged" in "\n".join(repair(tmp_path, embedded=True))
    with EmbeddedRedis(tmp_path / "redis") as server:
        assert server.keys() == 0


async def test_nothing_is_repaired_under_a_stack_that_runs(tmp_path: Path) -> None:
    await asyncio.to_thread(filled, tmp_path)
    async with run_lock(tmp_path):
        with pytest.raises(AlreadyRunning):
            await asyncio.to_thread(repair, tmp_path, embedded=True)


def test_a_folder_that_is_not_there_has_nothing_to_repair(tmp_path: Path) -> None:
    assert repair(tmp_path / "new", embedded=True) == []
    assert damages(tmp_path / "new", embedded=True) == []
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_told_to_end_ends_the_redis_that_it_has_started(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from services.cli import app\n"
        "from services.cli.launch.embedded_redis import EmbeddedRedis\n"
        "def command(**_):\n"
        "    with EmbeddedRedis(Path(sys.argv[1])) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        time.sleep(60)\n"
        "app.app = command\n"
        "app.main()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "redis")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        server = psutil.Process(int(running.stdout.readline()))
        running.terminate()
    assert running.returncode == 128 + signal.SIGTERM
    assert not server.is_running()


def test_database_that_lost_its_log_is_put_aside(tmp_path: Path) -> None:
    asyncio.run(knowledge(tmp_path))
    store_marker.mark_filled(tmp_path / "knowledge.sqlite")
    assert dict(damages(tmp_path, embedded=False)).keys() == {"knowledge"}
    assert "knowledge.sqlite was damaged" in repair(tmp_path, embedded=False)[0]
    asyncio.run(knowledge(tmp_path))
