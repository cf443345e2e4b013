"""Whose deletions are still to be overwritten on disk outlives the process that was told."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
from support.on_disk import having
from support.waiting import eventually

from services.memory.engram import Engram
from services.memory.erasing import Due, Erasing
from services.memory.keywords import Entry, KeywordIndex
from services.memory.overwrite import overwrite
from services.memory.settings import MemorySettings
from services.memory.store import StoreUnavailable, open_store
from services.memory.vectors import Vector
from shared.errors import TransientError

WORD = "xylograph"


def test_what_is_due_is_read_again_until_it_is_done(tmp_path: Path) -> None:
    path = tmp_path / "deleted"
    due = Due(path)
    assert not due.wanted.is_set()
    for user in ("ann", "zoë\n", "ann"):
        due.add(user)
    # a process that died while it wrote a line
    with path.open("ab") as file:
        file.write(b'"bo')
    again = Due(path)
    assert again.wanted.is_set()
    assert again.take() == {"ann", "zoë\n"}
    again.add("carl")
    assert Due(path).users == {"ann", "zoë\n", "carl"}
    again.done()
    assert Due(path).users == {"carl"}
    again.take()
    again.done(frozenset({"carl"}))
    assert Due(path).users == {"carl"}
    again.take()
    again.done()
    assert not path.exists()


def test_a_deletion_that_cannot_be_written_down_is_not_begun(tmp_path: Path) -> None:
    path = tmp_path / "away" / "deleted"
    due = Due(path)
    # the second time no less than the first
    for _ in range(2):
        with pytest.raises(TransientError, match="cannot be written"):
            due.add("ann")
    path.parent.mkdir()
    due.add("ann")
    assert Due(path).users == {"ann"}


async def test_on_a_full_disk_the_store_begins_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MemorySettings(data_dir=tmp_path, redis_url="redis://127.0.0.1:1")
    engram = Engram("e1", "ann", "note", 1, 1, content=WORD)
    placed = [(engram, Vector("model", (1.0, 0.0)))]
    async with open_store(settings) as store:
        await store.put("ann", placed)
        with monkeypatch.context() as full:
            # more than any disk has
            full.setattr("shared.participant.disk._KEPT", 2**80)
            full.setattr("shared.participant.disk._SHARE", 1)
            # nor is it said to work
            for asked in (store.put("ann", placed), store.delete("ann", ["e1"]), store.drop_user("ann"), store.ping()):
                with pytest.raises(StoreUnavailable, match=r"the disk of .* is full"):
                    await asked
            assert list(await store.get("ann", ["e1"])) == ["e1"]
        await store.delete("ann", ["e1"])
        assert await store.get("ann", ["e1"]) == {}


async def test_words_go_from_the_store_and_the_index_once_nobody_is_answered(tmp_path: Path) -> None:
    settings = MemorySettings(data_dir=tmp_path, redis_url="redis://127.0.0.1:1")
    keywords = KeywordIndex(settings.words)
    due = Due(settings.words / "deleted")
    answering = True

    async def busy() -> bool:
        return answering

    async with open_store(settings) as store:
        engrams = [Engram(f"e{n}", "ann", "note", n, n, content=f"{WORD} {n} " * 60) for n in range(30)]
        await store.put("ann", [(one, Vector("m", (1.0, 0.0))) for one in engrams])
        keywords.add("ann", [Entry(one.id, one.content) for one in engrams])
        # a record that is replaced leaves its words behind as well
        kept = Engram("e1", "ann", "note", 1, 1, content="kept")
        await store.put("ann", [(kept, Vector("m", (1.0, 0.0)))])
        keywords.add("ann", [Entry("e1", "kept")])
        gone = [one.id for one in engrams if one.id != "e1"]
        due.add("ann")
        await store.delete("ann", gone)
        keywords.remove("ann", gone)
        assert having(WORD, tmp_path)
        erasing = Erasing(due, store, keywords, settings.folder, busy, 0)
        running = asyncio.create_task(erasing.run())
        try:
            await asyncio.sleep(0.1)
            assert erasing.pending
            assert having(WORD, tmp_path)
            answering = False
            await eventually(lambda: not erasing.pending and not having(WORD, tmp_path), 20, "no file has the word")
            assert not (settings.words / "deleted").exists()
            assert list(await store.get("ann", ["e0", "e1"])) == ["e1"]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            keywords.close()
    # opened again, the store has what it had: the queue's vectors are read without their words
    async with open_store(settings) as store:
        assert [hit.id for hit in await store.query("ann", Vector("m", (1.0, 0.0)), 5)] == ["e1"]


def test_a_database_that_another_program_holds_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.memory.overwrite._PATIENCE", 0.01)
    with closing(sqlite3.connect(tmp_path / "chroma.sqlite3", isolation_level=None)) as db:
        db.executescript(
            "CREATE TABLE segments(id, scope, collection); CREATE TABLE max_seq_id(segment_id, seq_id); "
            "CREATE TABLE embeddings_queue(seq_id, topic, metadata);"
        )
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            overwrite(tmp_path)
        db.execute("ROLLBACK")
        overwrite(tmp_path)


def test_a_log_that_somebody_reads_is_left_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.memory.overwrite._PATIENCE", 0.01)
    database = tmp_path / "chroma.sqlite3"
    with (
        closing(sqlite3.connect(database, isolation_level=None)) as db,
        closing(sqlite3.connect(database, isolation_level=None)) as reader,
    ):
        db.executescript(
            "PRAGMA journal_mode = WAL; "
            "CREATE TABLE segments(id, scope, collection); CREATE TABLE max_seq_id(segment_id, seq_id); "
            "CREATE TABLE embeddings_queue(seq_id, topic, metadata); CREATE TABLE said(words);"
        )
        db.execute("INSERT INTO said VALUES (?)", (WORD,))
        reader.execute("BEGIN")
        assert reader.execute("SELECT words FROM said").fetchall() == [(WORD,)]
        db.execute("DELETE FROM said")
        with pytest.raises(sqlite3.OperationalError, match="reads the database"):
            overwrite(tmp_path)
        assert having(WORD, tmp_path)
        reader.execute("ROLLBACK")
        overwrite(tmp_path)
        assert having(WORD, tmp_path) == []


def test_files_of_vectors_have_nothing_behind_their_last_vector(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "header.bin").write_bytes(struct.pack("<iQQQQ", 1, 0, 4, 2, 16))
    (folder / "data_level0.bin").write_bytes(b"vector" * 5 + b"!!" + WORD.encode() * 3)
    (folder / "length.bin").write_bytes(b"\1\0\0\0\2\0\0\0" + WORD.encode())
    sqlite3.connect(tmp_path / "chroma.sqlite3").close()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        overwrite(tmp_path)
    assert having(WORD, tmp_path) == []
    assert (folder / "data_level0.bin").read_bytes() == b"vector" * 5 + b"!!" + bytes(27)
    assert (folder / "length.bin").read_bytes() == b"\1\0\0\0\2\0\0\0" + bytes(9)
