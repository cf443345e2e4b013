"""Saves what can be read of a broken memory: `python -m services.memory.repair`.

What is known of every engram is kept twice: in Chroma, and in the users' keyword files. A new store is made of both,
with the vectors that the keyword files have; engrams without one get it when the embedding model is there again. It
prints what it did, a sentence a line; nothing when the store is whole. `local2 doctor --repair` runs it.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from services.memory.chroma import Collections, embedded, mapped, pages
from services.memory.damage import DATABASE, damage_of
from services.memory.engram import Engram
from services.memory.folder import locked
from services.memory.settings import MemorySettings
from services.memory.store import Store, StoreUnavailable
from services.memory.vectors import NO_VECTOR, Vector
from shared.errors import Local2Error
from shared.participant.store_marker import remove_marker, set_aside, sqlite_trouble

# Of one record: its collection, its id, and one thing that is known of it. As Chroma keeps it.
_RECORDS = """
SELECT collections.name, embeddings.embedding_id, about.key,
    coalesce(about.string_value, about.int_value, about.float_value, about.bool_value)
FROM collections JOIN segments ON segments.collection = collections.id
JOIN embeddings ON embeddings.segment_id = segments.id JOIN embedding_metadata AS about ON about.id = embeddings.id
WHERE collections.name LIKE ? || '.%' ORDER BY embeddings.id
"""
_INDEXED = "SELECT id, data, vector, model FROM engram"


@dataclass(slots=True)
class Saved:
    """By user: engrams by their ids, each with its vector."""

    engrams: dict[str, dict[str, tuple[Engram, Vector]]] = field(default_factory=dict)

    def add(self, engram: Engram, vector: Vector = NO_VECTOR) -> None:
        """What comes later counts; a vector that is known stays."""
        there = self.engrams.setdefault(engram.user_id, {})
        known = there.get(engram.id, (engram, NO_VECTOR))[1]
        there[engram.id] = (engram, known if vector is NO_VECTOR else vector)

    @property
    def count(self) -> int:
        return sum(map(len, self.engrams.values()))


async def repair(settings: MemorySettings) -> list[str]:
    """Sentences that say what was done. Raises StoreLocked while a memory uses the folder, OSError."""
    folder = settings.folder
    if settings.chroma_url or not folder.parent.exists():
        return []
    if not folder.exists() and damage_of(folder) is None:
        return []
    async with locked(folder):
        what = damage_of(folder) or _trouble(folder)
        if what is None and (folder / DATABASE).exists():
            what = await asyncio.to_thread(_unreadable, folder, settings.collection)
        if what is None:
            return []
        saved = Saved()
        for engram, vector in _indexed(settings.words):
            saved.add(engram, vector)
        for engram in _stored(folder / DATABASE, settings.collection):
            saved.add(engram)
        fresh = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        await _written(saved, fresh, settings.collection)
        aside = set_aside(folder)
        remove_marker(fresh)
        fresh.rename(folder)
    # the words are made anew from the store at the next start
    (settings.words / "mark").unlink(missing_ok=True)
    bare = sum(vector is NO_VECTOR for users in saved.engrams.values() for _, vector in users.values())
    return [
        f"the memory's store was damaged ({what})",
        f"{folder} was put aside as {aside}",
        f"saved: {saved.count} memories of {len(saved.engrams)} users; what is not among them is lost"
        if saved.count
        else "nothing could be read: the memory begins anew",
        *([f"{bare} of them have no vector yet: they get one from the embedding model"] if bare else []),
    ]


def _trouble(folder: Path) -> str | None:
    database = folder / DATABASE
    return sqlite_trouble(database) if database.exists() and database.stat().st_size else None


def _unreadable(folder: Path, prefix: str) -> str | None:
    """What stands in the way of reading everything, vectors too."""

    def read() -> None:
        for _, collection in collections.everybody():
            for _page in pages(collection.handle, ("metadatas", "embeddings")):
                pass

    collections = Collections(lambda: embedded(folder), prefix, shared=False)
    try:
        mapped(read)
    except StoreUnavailable as exc:
        return str(exc)
    finally:
        collections.close()
    return None


def _indexed(words: Path) -> Iterator[tuple[Engram, Vector]]:
    """What the users' keyword files have, each as far as it can be read."""
    for file in sorted(words.glob("*.db")):
        with (
            suppress(sqlite3.Error, OSError),
            closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)) as db,
        ):
            for engram_id, data, vector, model in db.execute(_INDEXED):
                # a record that cannot be read is lost, and no other
                with suppress(ValueError, KeyError, TypeError):
                    yield Engram.from_flat(engram_id, orjson.loads(data)), _placed(vector, model)


def _placed(vector: bytes | None, model: str) -> Vector:
    if not vector or not model:
        return NO_VECTOR
    return Vector(model, np.frombuffer(vector, dtype=np.float16).astype(float).tolist())


def _stored(database: Path, prefix: str) -> Iterator[Engram]:
    """What Chroma's database still tells of engrams, up to the first page that is broken."""
    if not database.exists():
        return
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as db:
        place: tuple[str, str] | None = None
        about: dict[str, Any] = {}
        for name, record_id, key, value in db.execute(_RECORDS, (prefix,)):
            if place is not None and place != (name, record_id):
                yield from _record(place[1], about)
                about = {}
            place = (name, record_id)
            about[key] = value
        if place is not None:
            yield from _record(place[1], about)


def _record(record_id: str, about: dict[str, Any]) -> Iterator[Engram]:
    with suppress(ValueError, KeyError, TypeError):
        yield Engram.from_flat(record_id, about)


async def _written(saved: Saved, folder: Path, prefix: str) -> None:
    store = Store(Collections(lambda: embedded(folder), prefix, shared=False))
    try:
        # there is a store then, even with nothing in it
        await store.ping()
        for user_id, engrams in saved.engrams.items():
            await store.put(user_id, list(engrams.values()))
    finally:
        store.close()


def main() -> int:
    try:
        for said in asyncio.run(repair(MemorySettings.load("memory"))):
            print(said, flush=True)
    except (Local2Error, OSError, sqlite3.Error) as exc:
        print(f"the memory could not be repaired: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
