"""What an embedded store has is read from Chroma's tables, and from nothing else."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.memory.catalog import Known
from services.memory.chroma import Collections, embedded
from services.memory.damage import DATABASE
from services.memory.listing import Listing, listing_of
from services.memory.vectors import NOWHERE, Space

SPACE = Space("m", 4)


def record(
    name: str, at: int, kind: str = "turn", place: tuple[float, ...] = (1.0, 0, 0, 0), **about: str
) -> dict[str, Any]:
    return {
        "ids": [name],
        "embeddings": [list(place)],
        "metadatas": [{"time": at, "kind": kind, "user_id": "?", **about}],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three people, with a collection of another kind and somebody else's collection."""
    store = Collections(lambda: embedded(tmp_path), "ours", shared=False)
    store.upsert("ann", SPACE, record("a1", 5, respondent_id="B"))
    store.upsert("ann", SPACE, record("a2", 3, "note"))
    # it has no vector yet
    store.upsert("ben", NOWHERE, record("b1", 7, "topic", (1.0,)))
    store.upsert("eve", SPACE, record("e1", 9))
    store.drop_user("eve")
    for name, kind in (("ours.x.other", "other"), ("others", "engrams")):
        store.client().get_or_create_collection(
            name, metadata={"user_id": "ann", "kind": kind}, embedding_function=None
        )
    store.close()
    return tmp_path


def test_everybodys_engrams_are_listed_and_nothing_else(folder: Path) -> None:
    found = listing_of(folder, "ours")
    assert found is not None
    known = [Known("a1", "ann", 5, "turn", shown=False), Known("a2", "ann", 3, "note"), Known("b1", "ben", 7, "topic")]
    assert sorted(found.engrams) == known
    assert found.behind == []
    assert listing_of(folder, "theirs") == Listing([], [])


def test_a_collection_whose_last_changes_are_not_applied_is_named_in_place_of_its_engrams(folder: Path) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as db, db:
        changed = db.execute(
            "UPDATE max_seq_id SET seq_id = seq_id - 1 WHERE segment_id IN (SELECT segment_id FROM embeddings "
            "WHERE embedding_id = 'a1')"
        )
        assert changed.rowcount == 1
    found = listing_of(folder, "ours")
    assert found is not None
    assert [known.id for known in found.engrams] == ["b1"]
    store = Collections(lambda: embedded(folder), "ours", shared=False)
    assert [(user, one.handle.count()) for user, one in store.named(found.behind)] == [("ann", 2)]
    assert list(store.named(["ours.gone", "ours.x.other"])) == []
    store.close()


def test_of_a_new_store_nothing_is_listed_and_of_tables_that_are_not_known_nothing_is_said(tmp_path: Path) -> None:
    assert listing_of(tmp_path, "ours") == Listing()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db, db:
        db.execute("CREATE TABLE embeddings(id)")
    assert listing_of(tmp_path, "ours") is None
