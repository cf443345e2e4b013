"""Chroma's compiled part alone writes what its package writes, and each opens what the other has written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.memory.chroma import NotFoundError
from services.memory.damage import DATABASE
from services.memory.engine import Engine, package

CONFIGURATION = {"hnsw": {"space": "cosine"}}
ABOUT = {"user_id": "ann", "dimension": 2}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / DATABASE, 8)
    yield engine
    engine.close()


def filled(client: Any) -> None:
    for name, configuration in (("plain", None), ("engrams", CONFIGURATION)):
        kept = client.get_or_create_collection(
            name, metadata=ABOUT, configuration=configuration, embedding_function=None
        )
        kept.upsert(ids=["a", "b"], embeddings=[[1.0, 0.0], [0.0, 1.0]], metadatas=[{"n": 1, "x": True}, {"n": 2}])


def told(client: Any) -> dict[str, Any]:
    kept = client.get_collection("engrams", embedding_function=None)
    page = kept.get(ids=["b", "a"], include=["metadatas", "embeddings"])
    near = kept.query(query_embeddings=[[0.0, 2.0]], n_results=2, include=["distances"])
    return {
        "names": sorted(one.name for one in client.list_collections()),
        "about": dict(kept.metadata),
        "count": kept.count(),
        "kept": sorted(zip(page["ids"], page["metadatas"], map(list, page["embeddings"]), strict=True)),
        "near": (near["ids"], near["distances"]),
    }


def kinds(database: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as db:
        return sorted(db.execute("SELECT name, config_json_str, dimension FROM collections"))


def test_each_opens_what_the_other_has_written(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    engine = Engine(ours / DATABASE, 8)
    filled(engine)
    seen = told(engine)
    engine.close()
    settings = package().Settings(anonymized_telemetry=False)
    for folder in (ours, theirs):
        client = package().PersistentClient(str(folder), settings=settings)
        if folder == theirs:
            filled(client)
        assert told(client) == seen
        client.close()
    again = Engine(theirs / DATABASE, 8)
    assert told(again) == seen
    again.close()
    assert kinds(ours / DATABASE) == kinds(theirs / DATABASE)
    assert seen["near"] == ([["b", "a"]], [[0.0, 1.0]])


def test_what_an_update_names_as_none_is_gone_and_the_rest_stays(engine: Engine) -> None:
    filled(engine)
    kept = engine.get_collection("engrams")
    kept.update(ids=["a"], metadatas=[{"x": None, "new": "word"}])
    kept.delete(ids=["b"])
    assert kept.get(where={"n": 1}) == {"ids": ["a"], "metadatas": [{"n": 1, "new": "word"}], "embeddings": None}
    assert kept.get(limit=1, offset=1)["ids"] == []


def test_what_is_not_there_is_chromas_own_error(engine: Engine) -> None:
    filled(engine)
    engine.delete_collection("plain")
    for look in (engine.get_collection, engine.delete_collection):
        with pytest.raises(NotFoundError):
            look("plain")
    assert engine.heartbeat() > 0
