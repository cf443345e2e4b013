"""A store of many users: neither opening it nor one user's search goes by way of all of them."""

from __future__ import annotations

import gc
import sqlite3
from contextlib import closing
from pathlib import Path

from services.memory.chroma import Collections, embedded
from services.memory.damage import DATABASE
from services.memory.engine import Records
from services.memory.vectors import Space

SPACE = Space("m", 4)
RECORD = {"ids": ["a"], "embeddings": [[1.0, 0, 0, 0]], "metadatas": [{"n": 1}]}


def opened(folder: Path) -> Collections:
    return Collections(lambda: embedded(folder), "test", shared=False)


def plan(folder: Path, query: str) -> str:
    with closing(sqlite3.connect(folder / DATABASE)) as db:
        return "\n".join(row[-1] for row in db.execute(f"EXPLAIN QUERY PLAN {query}"))


def test_one_users_changes_are_found_by_an_index_from_the_second_start_on(tmp_path: Path) -> None:
    for _ in range(2):
        store = opened(tmp_path)
        store.upsert("ann", SPACE, RECORD)
        assert store.each("ann", lambda one: one.handle.get()["ids"]) == [["a"]]
        store.close()
    wanted = plan(tmp_path, "SELECT * FROM embeddings_queue WHERE topic = 'x' AND seq_id > 3 ORDER BY seq_id")
    assert "USING INDEX local2_queue" in wanted


def test_a_change_is_added_to_a_log_beside_the_database_in_a_store_that_is_new_and_in_one_that_is_not(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        store = opened(tmp_path)
        store.upsert("ann", SPACE, RECORD)
        assert (tmp_path / f"{DATABASE}-wal").stat().st_size
        store.close()
        # as Chroma makes one
        with closing(sqlite3.connect(tmp_path / DATABASE)) as db:
            assert db.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)


def test_who_goes_through_everybody_holds_the_collection_of_one_user_at_a_time(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(5):
        store.upsert(f"user-{number}", SPACE, RECORD)
    store.close()

    def handles() -> int:
        return sum(isinstance(one, Records) for one in gc.get_objects())

    store = opened(tmp_path)
    others, held, users = handles(), 0, set()
    for user_id, collection in store.everybody():
        assert collection.space == SPACE
        users.add(user_id)
        held = max(held, handles() - others)
    assert users == {f"user-{number}" for number in range(5)}
    assert held <= 2
    assert list(store.everybody(but=SPACE)) == []
    store.close()
