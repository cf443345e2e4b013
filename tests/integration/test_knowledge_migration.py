"""The first start after an upgrade: the embedded graph of the release before becomes a SQLite database."""

from __future__ import annotations

import contextlib
import filecmp
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
from support.knowledge import knowing, knowledge_settings

from services.cli.settings import KnowledgeConfig
from services.knowledge.claims import Turn
from services.knowledge.migrate import migrate
from services.knowledge.sqlite import open_sqlite
from services.knowledge.store import Store
from shared.errors import SettingsError
from shared.participant.file_lock import FileLock

# Folders as that release left them: its process ended in good order, or was killed (see old_graphs/make.py).
GRAPHS = ["close", "kill"]


def unpack(how: str, folder: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "old_graphs" / f"{how}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "knowledge.lbug"


def graph_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("knowledge.lbug*"))


def backups(folder: Path) -> list[Path]:
    return sorted(folder.glob("knowledge.lbug.backup-*"))


async def migrated(old: Path) -> dict[str, list[dict[str, object]]]:
    """Migrate a graph, and return the claims of each user."""
    async with open_sqlite(old.with_suffix(".sqlite")) as database:
        await migrate(old, database)
        store = Store(database)
        return {user: [one.row() for one in await store.claims(user)] for user in await store.users()}


@pytest.mark.parametrize(
    ("values", "database", "graph"),
    [
        ({}, "knowledge.sqlite", "knowledge.lbug"),
        ({"store": "ladybug"}, "knowledge.sqlite", "knowledge.lbug"),
        ({"store": "ladybug", "store_path": "facts.lbug"}, "facts.sqlite", "facts.lbug"),
        ({"store_path": "facts.db"}, "facts.db", "facts.lbug"),
    ],
)
def test_settings_of_an_older_release_name_both_files(
    values: dict[str, str], database: str, graph: str, tmp_path: Path
) -> None:
    given = {name: tmp_path / value if name == "store_path" else value for name, value in values.items()}
    settings = knowledge_settings("redis://nowhere", tmp_path, "http://x", **given)
    assert settings.store == "sqlite"
    # The command line looks for both files too.
    for one in (settings, KnowledgeConfig(data_dir=tmp_path, **given)):
        assert (one.path, one.old_path) == (tmp_path / database, tmp_path / graph)


@pytest.mark.parametrize("how", GRAPHS)
async def test_migration_keeps_every_claim_and_a_backup(how: str, tmp_path: Path) -> None:
    old = unpack(how, tmp_path)
    before = unpack(how, tmp_path / "before").parent
    assert await migrated(old) == json.loads((tmp_path / "claims.json").read_text())
    (backup,) = backups(tmp_path)
    names = graph_files(before)
    assert filecmp.cmpfiles(before, backup, names, shallow=False) == (names, [], [])
    assert graph_files(tmp_path) == [backup.name]


async def test_migration_keeps_marks_and_unread_sources(tmp_path: Path) -> None:
    old = unpack("kill", tmp_path)
    claims = await migrated(old)
    async with open_sqlite(old.with_suffix(".sqlite")) as database:
        store = Store(database)
        unread = await store.source("bob", "2003-1:A")
        assert unread is not None
        assert (unread.settled, unread.turn.query) == (False, "Tom works at SAP.")
        assert await store.replace_claims(unread.turn, [], settled=True) is not None
        read = await store.source("ann", "1001-1:A")
        assert read is not None
        assert read.settled
        assert len(claims["ann"]) == 19 + 5
        assert {one for row in claims["ann"] for one in (row["subject_key"], row["object_key"])} == set(
            await store.keys("ann")
        )
        # Deleted before the migration: a late message does not bring it back.
        forgotten = Turn("1000-1:A", "ann", "s", 1_700_000_000_000, "")
        assert await store.replace_claims(forgotten, [], settled=True) is None


async def test_migration_is_repeated_after_a_crash(tmp_path: Path) -> None:
    old = unpack("kill", tmp_path)
    whole = await migrated(old)
    (backup,) = backups(tmp_path)
    # The process died after the database was written, before the graph was moved.
    shutil.copytree(backup, tmp_path, dirs_exist_ok=True)
    shutil.copytree(backup, tmp_path / "knowledge.lbug.migrating")
    assert await migrated(old) == whole
    assert len(backups(tmp_path)) == 2
    assert await migrated(old) == whole


@pytest.mark.parametrize("damage", ["garbage", "locked", "no package"])
async def test_failed_migration_changes_nothing(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = unpack("close", tmp_path)
    expected = json.loads((tmp_path / "claims.json").read_text())
    whole = old.read_bytes()
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        if damage == "garbage":
            old.write_bytes(b"no graph at all" * 1000)
            message = r"the knowledge of an older release in .* cannot be read .*`local2 restore --merge`"
        elif damage == "locked":
            lock = FileLock(old.with_name(f"{old.name}.lock"))
            stack.callback(lock.close)
            assert lock.take()
            message = "is in use by another process"
        else:
            patch.setitem(sys.modules, "ladybug", None)
            message = r"needs the package ladybug.*pip install 'local2\[ladybug\]'.*make extras EXTRAS='ladybug'"
        present, before = old.read_bytes(), {*graph_files(tmp_path)}
        with pytest.raises(SettingsError, match=message):
            await migrated(old)
        assert old.read_bytes() == present
        assert set(graph_files(tmp_path)) - {"knowledge.lbug.lock"} == before - {"knowledge.lbug.lock"}
    old.write_bytes(whole)
    assert await migrated(old) == expected


async def test_first_start_answers_from_the_old_graph(redis_url: str, tmp_path: Path) -> None:
    unpack("kill", tmp_path)
    async with knowing(redis_url, tmp_path) as client:
        told = await client.search("Anna")
        assert any(line.startswith("- Anna lives in Porto: IS true") for line in told)
        assert any(line.startswith("- Anna lives in Lyon: WAS true") for line in told)
        await client.say("Anna works at Fiat.")
        assert any("Fiat: IS true" in line for line in await client.search("Anna"))
    assert len(backups(tmp_path)) == 1
