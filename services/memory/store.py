"""The store of engrams: where each one is, with its vector. Vectors are computed by us."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.memory.chroma import (
    PAGE,
    Collection,
    Collections,
    StoreDamaged,
    StoreUnavailable,
    embedded,
    mapped,
    pages,
    server,
)
from services.memory.damage import damage_of
from services.memory.engram import Engram, topic_id
from services.memory.folder import StoreLocked, locked
from services.memory.listing import Listing, listing_of
from services.memory.settings import MemorySettings
from services.memory.vectors import NOWHERE, Space, Vector
from shared.participant.disk import no_room
from shared.telemetry.logging import get_logger

__all__ = ["Near", "Placed", "Store", "StoreLocked", "StoreUnavailable", "open_store"]

log = get_logger()

R = TypeVar("R")

READERS = 4


@dataclass(frozen=True, slots=True)
class Near:
    """The id of an engram near a query; `similarity` is the cosine."""

    id: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Placed:
    """An engram with its vector; None while it has none."""

    engram: Engram
    vector: Vector | None


@dataclass(frozen=True, slots=True)
class Kept:
    """One collection: whose engrams, its name, where their vectors are, and how many they are."""

    user_id: str
    name: str
    space: Space
    count: int


class Store:
    """Open it with `open_store`. Every method may raise StoreUnavailable.

    damage: why nothing can be read any more, until somebody repairs it. listing: what an embedded store had when it was
    opened; None where that is not known, as of a server. folder: that of an embedded store.
    """

    def __init__(
        self,
        collections: Collections,
        damage: str | None = None,
        listing: Listing | None = None,
        folder: Path | None = None,
    ) -> None:
        self._collections = collections
        self._folder = folder
        self.listing = listing
        self.damage: str | None = None
        if damage is not None:
            self._damaged(damage)
        # Writers take turns: one transaction at a time is what SQLite has. Searches do not stand in their line.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        # whether it may be used; whether nobody does; one at a time has it alone
        self._used, self._free, self._nobody = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._used.set()
        self._free.set()
        self._users = 0

    def close(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self._collections.close()

    async def reading(self, work: Callable[..., R], *args: Any) -> R:
        return await self._in(self._readers, work, *args)

    async def writing(self, work: Callable[..., R], *args: Any) -> R:
        self._has_room()
        return await self._in(self._writer, work, *args)

    def _has_room(self) -> None:
        if self._folder is not None and (reason := no_room(self._folder)) is not None:
            raise StoreUnavailable(reason)

    async def alone(self, work: Callable[..., R], *args: Any) -> R:
        """In the writers' thread, while nobody reads."""
        async with self._nobody:
            self._used.clear()
            try:
                await self._free.wait()
                return await self._run(self._writer, work, *args)
            finally:
                self._used.set()

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., R], *args: Any) -> R:
        while not self._used.is_set():
            await self._used.wait()
        self._users += 1
        self._free.clear()
        try:
            return await self._run(pool, work, *args)
        finally:
            self._users -= 1
            if not self._users:
                self._free.set()

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[..., R], *args: Any) -> R:
        if self.damage is not None:
            raise StoreDamaged(self.damage)
        call = functools.partial(mapped, work, *args)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call)
        except StoreDamaged as exc:
            self._damaged(str(exc))
            raise StoreDamaged(self.damage) from exc

    def _damaged(self, what: str) -> None:
        self.damage = (
            f"the memory's store is damaged: {what}. Stop the stack; `local2 doctor --repair` saves what can be read, "
            "a backup (`local2 restore`) brings back the rest"
        )
        log.error("memory.damaged", reason=self.damage)

    # ── engrams ──────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        return await self.reading(self._get, user_id, ids)

    async def placed(self, user_id: str, ids: Sequence[str]) -> dict[str, Placed]:
        """The engrams that are there, with their vectors."""
        return await self.reading(self._placed, user_id, ids)

    async def query(self, user_id: str, vector: Vector, limit: int, hidden: Set[str] = frozenset()) -> list[Near]:
        """Return the user's engrams nearest to a vector of the same space, nearest first.

        limit: the most engrams to return. hidden: ids to leave out; they do not count towards the limit.
        """
        return await self.reading(self._query, user_id, vector, limit, hidden)

    async def put(self, user_id: str, items: Sequence[tuple[Engram, Vector]]) -> None:
        """Adds or replaces whole engrams of one user."""
        await self.writing(self._put, user_id, items)

    async def update(self, user_id: str, engrams: Sequence[Engram]) -> None:
        """Replaces what is known of engrams that are there; their vectors stay. One that is not there is left out."""
        await self.writing(self._update, user_id, engrams)

    async def delete(self, user_id: str, ids: Sequence[str]) -> None:
        await self.writing(self._delete, user_id, ids)

    async def drop_user(self, user_id: str) -> None:
        """Removes everything of a user."""
        await self.writing(self._collections.drop_user, user_id)

    async def ids_of_session(self, user_id: str, session_id: str) -> list[str]:
        return await self.reading(self._ids_of_session, user_id, session_id)

    def scan(self, names: Iterable[str]) -> Iterator[tuple[str, list[Engram]]]:
        """Every engram of some collections, a page at a time with its user. Blocking: for `reading`."""
        for user_id, collection in self._collections.named(names):
            for page in pages(collection.handle, ("metadatas",)):
                yield user_id, list(_engrams(page, user_id).values())

    def scan_placed(self) -> Iterator[tuple[str, list[Placed]]]:
        """Every engram of everybody, with its vector; the same way."""
        for user_id, collection in self._collections.everybody():
            for page in pages(collection.handle, ("metadatas", "embeddings")):
                yield user_id, list(_placed(page, user_id, collection.space).values())

    async def collections(self, *, but: Space | None = None) -> list[Kept]:
        """All collections of engrams, or those of other spaces than one."""

        def listed() -> list[Kept]:
            if all(space == but for space in self._collections.spaces().values()):
                return []
            return [
                Kept(user_id, one.handle.name, one.space, one.handle.count())
                for user_id, one in self._collections.everybody(but=but)
            ]

        return await self.reading(listed)

    async def page(self, user_id: str, name: str, offset: int) -> list[Engram]:
        """Some engrams of one collection, behind so many others; none at its end, and when it is gone."""

        def read() -> list[Engram]:
            collection = self._collections.of(user_id).get(name)
            page = collection.handle.get(limit=64, offset=offset, include=["metadatas"]) if collection else None
            return list(_engrams(page, user_id).values()) if page else []

        return await self.reading(read)

    async def drop_empty(self, name: str) -> None:
        """Removes a collection that has nothing left."""
        await self.writing(functools.partial(self._collections.drop, empty=True), name)

    async def ping(self) -> None:
        self._has_room()
        await self.reading(lambda: self._collections.client().heartbeat())

    def forget_lists(self, user_id: str) -> None:
        """Another replica has changed something: what is known of the user's collections is read again."""
        self._collections.forget(user_id)

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────

    async def topic(self, user_id: str, name: str) -> Engram | None:
        """What is kept under a name."""
        engram_id = topic_id(user_id, name)
        return (await self.get(user_id, [engram_id])).get(engram_id)

    async def topics(self, user_id: str) -> list[Engram]:
        """By their names."""

        def read(collection: Collection) -> list[Engram]:
            page = collection.handle.get(where={"kind": "topic"}, include=["metadatas"])
            return list(_engrams(page, user_id).values())

        found = await self.reading(self._collections.each, user_id, read)
        # one may be in two collections for a moment, while it is given a vector
        return sorted({one.id: one for those in found for one in those}.values(), key=lambda one: one.topic)

    # ── in a thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        found: dict[str, Engram] = {}

        def read(collection: Collection) -> None:
            for part in _parts([one for one in ids if one not in found]):
                found.update(_engrams(collection.handle.get(ids=part, include=["metadatas"]), user_id))

        self._collections.each(user_id, read)
        return found

    def _placed(self, user_id: str, ids: Sequence[str]) -> dict[str, Placed]:
        found: dict[str, Placed] = {}

        def read(collection: Collection) -> None:
            # it may be in two collections for a moment, while it is given a vector
            for part in _parts([one for one in ids if one not in found or found[one].vector is None]):
                page = collection.handle.get(ids=part, include=["metadatas", "embeddings"])
                found.update(_placed(page, user_id, collection.space))

        self._collections.each(user_id, read)
        return found

    def _query(self, user_id: str, vector: Vector, limit: int, hidden: Set[str]) -> list[Near]:
        def search(collection: Collection) -> list[Near]:
            # perf: a larger result costs 0.1 ms; Chroma's own filter by metadata takes 35 ms among 20,000 engrams.
            most = limit + min(limit, len(hidden))
            while True:
                # ids alone: reading what is known of all candidates would cost more than finding them
                page = collection.handle.query(
                    query_embeddings=[list(vector.values)], n_results=most, include=["distances"]
                )
                ids, distances = page["ids"][0], page["distances"][0]
                pairs = zip(ids, distances, strict=True)
                found = [Near(one, 1.0 - float(distance)) for one, distance in pairs if one not in hidden]
                if len(found) >= limit or len(ids) < most:
                    return found[:limit]
                most *= 2

        found = [hit for hits in self._collections.each(user_id, search, vector.space) for hit in hits]
        return sorted(found, key=lambda hit: -hit.similarity)[:limit]

    def _put(self, user_id: str, items: Sequence[tuple[Engram, Vector]]) -> None:
        by_space: dict[Space, list[tuple[Engram, Vector]]] = {}
        for engram, vector in items:
            by_space.setdefault(vector.space, []).append((engram, vector))
        for space, alike in by_space.items():
            for part in _parts(alike):
                record = {
                    "ids": [engram.id for engram, _ in part],
                    "embeddings": [list(vector.values) for _, vector in part],
                    "metadatas": [engram.flat() for engram, _ in part],
                }
                self._collections.upsert(user_id, space, record)

    def _update(self, user_id: str, engrams: Sequence[Engram]) -> None:
        by_id = {engram.id: engram for engram in engrams}

        def write(collection: Collection) -> None:
            for part in _parts(list(by_id)):
                # an update of what is not there is ignored by the store, but not by every version of it
                there = collection.handle.get(ids=part, include=[])["ids"]
                if there:
                    # an update leaves what it does not name: a reward can be gone, by its vote's withdrawal
                    collection.handle.update(
                        ids=there, metadatas=[{"reward": None, **by_id[one].flat()} for one in there]
                    )

        self._collections.each(user_id, write)

    def _delete(self, user_id: str, ids: Sequence[str]) -> None:
        def remove(collection: Collection) -> None:
            for part in _parts(list(ids)):
                collection.handle.delete(ids=part)

        self._collections.each(user_id, remove)

    def _ids_of_session(self, user_id: str, session_id: str) -> list[str]:
        def read(collection: Collection) -> list[str]:
            return list(collection.handle.get(where={"session_id": session_id}, include=[])["ids"])

        return list(dict.fromkeys(one for ids in self._collections.each(user_id, read) for one in ids))


def _engrams(page: Any, user_id: str) -> dict[str, Engram]:
    """The engrams of a page; without those of another user, which must not be there and must never be shown."""
    found: dict[str, Engram] = {}
    for engram_id, flat in zip(page["ids"], page["metadatas"], strict=True):
        if flat is None or flat.get("user_id") != user_id:
            log.error("memory.foreign_record", engram_id=engram_id)
        else:
            found[engram_id] = Engram.from_flat(engram_id, flat)
    return found


def _placed(page: Any, user_id: str, space: Space) -> dict[str, Placed]:
    places = dict(zip(page["ids"], page["embeddings"], strict=True))
    return {
        one: Placed(engram, None if space == NOWHERE else Vector(space.model, places[one]))
        for one, engram in _engrams(page, user_id).items()
    }


def _parts(items: Sequence[R]) -> Iterable[Sequence[R]]:
    return (items[at : at + PAGE] for at in range(0, len(items), PAGE))


@asynccontextmanager
async def open_store(settings: MemorySettings) -> AsyncIterator[Store]:
    """Raises StoreLocked when another process has the folder of an embedded store."""
    if settings.chroma_url:
        with _opened(Collections(lambda: server(settings), settings.collection, shared=True)) as store:
            yield store
        return
    path = settings.folder
    async with locked(path):
        damage = await asyncio.to_thread(damage_of, path)
        listing = None if damage else await asyncio.to_thread(listing_of, path, settings.collection)
        collections = Collections(lambda: embedded(path), settings.collection, shared=False)
        with _opened(collections, damage, listing, path) as store:
            yield store


@contextmanager
def _opened(
    collections: Collections, damage: str | None = None, listing: Listing | None = None, folder: Path | None = None
) -> Iterator[Store]:
    store = Store(collections, damage, listing, folder)
    try:
        yield store
    finally:
        store.close()
