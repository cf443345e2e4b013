"""The store of engrams: where each one is, with its vector. Vectors are computed by us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from services.memory.chroma import (
    PAGE,
    Collection,
    Collections,
    Connection,
    Embedded,
    IndexDamaged,
    Server,
    StoreDamaged,
    StoreUnavailable,
    Suspects,
    VectorMissing,
)
from services.memory.engram import Engram, topic_id
from services.memory.folder import StoreLocked, locked
from services.memory.settings import MemorySettings
from services.memory.vectors import Space, Vector, no_vector
from shared.participant.disk import no_room
from shared.telemetry.logging import get_logger

__all__ = [
    "IndexDamaged",
    "Near",
    "Placed",
    "Store",
    "StoreDamaged",
    "StoreLocked",
    "StoreUnavailable",
    "VectorMissing",
    "open_store",
]

log = get_logger()

R = TypeVar("R")


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

    folder: that of an embedded store.
    """

    def __init__(self, connection: Connection, prefix: str, *, folder: Path | None = None) -> None:
        self._connection = connection
        self._collections = Collections(connection, prefix, shared=folder is None)
        self._folder = folder
        # One write at a time: a collection that is empty must not be filled while it is removed.
        self._writing = asyncio.Lock()

    @property
    def damage(self) -> str | None:
        """Why the store cannot be read; None if it can."""
        return self._connection.damage

    @property
    def suspects(self) -> Suspects:
        """Users of whom a vector could not be read."""
        return self._connection.suspects

    def give_up(self, reason: str) -> None:
        """Report the store as damaged: only a backup helps."""
        self._connection.give_up(reason)

    def _check_room(self) -> None:
        if self._folder is not None and (reason := no_room(self._folder)) is not None:
            raise StoreUnavailable(reason)

    @asynccontextmanager
    async def _write(self) -> AsyncIterator[None]:
        self._check_room()
        async with self._writing:
            yield

    # ── engrams ──────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        """Return the engrams that are there."""
        found: dict[str, Engram] = {}

        async def read(collection: Collection) -> None:
            for part in _parts([one for one in ids if one not in found]):
                found.update(_engrams(await collection.get(ids=list(part), include=["metadatas"]), user_id))

        await self._collections.each(user_id, read)
        return found

    async def placed(self, user_id: str, ids: Sequence[str]) -> dict[str, Placed]:
        """Return the engrams that are there, with their vectors."""
        found: dict[str, Placed] = {}

        async def read(collection: Collection) -> None:
            # An engram may be in two collections for a moment, while it is given a vector.
            for part in _parts([one for one in ids if one not in found or found[one].vector is None]):
                page = await collection.get(ids=list(part), include=["metadatas", "embeddings"])
                found.update(_placed(page, user_id, collection.space))

        await self._collections.each(user_id, read)
        return found

    async def query(self, user_id: str, vector: Vector, limit: int, hidden: Set[str] = frozenset()) -> list[Near]:
        """Return the user's engrams nearest to a vector of the same space, nearest first.

        limit: the most engrams to return. hidden: ids to leave out; they do not count towards the limit.
        """

        async def search(collection: Collection) -> list[Near]:
            # perf: a larger result costs 0.1 ms; Chroma's own filter by metadata takes 35 ms among 20,000 engrams.
            most = limit + min(limit, len(hidden))
            while True:
                # ids alone: reading what is known of all candidates would cost more than finding them
                page = await collection.query(
                    query_embeddings=[list(vector.values)], n_results=most, include=["distances"]
                )
                ids, distances = page["ids"][0], page["distances"][0]
                pairs = zip(ids, distances, strict=True)
                found = [Near(one, 1.0 - float(distance)) for one, distance in pairs if one not in hidden]
                if len(found) >= limit or len(ids) < most:
                    return found[:limit]
                most *= 2

        found = [hit for hits in await self._collections.each(user_id, search, vector.space) for hit in hits]
        return sorted(found, key=lambda hit: -hit.similarity)[:limit]

    async def put(self, user_id: str, items: Sequence[tuple[Engram, Vector]]) -> None:
        """Add or replace whole engrams of one user."""
        by_space: dict[Space, list[tuple[Engram, Vector]]] = {}
        for engram, vector in items:
            by_space.setdefault(vector.space, []).append((engram, vector))
        async with self._write():
            for space, alike in by_space.items():
                for part in _parts(alike):
                    await self._collections.upsert(user_id, space, _record(part))

    async def update(self, user_id: str, engrams: Sequence[Engram]) -> None:
        """Replace the metadata of existing engrams; their vectors stay."""
        by_id = {engram.id: engram for engram in engrams}

        async def write(collection: Collection) -> None:
            for part in _parts(list(by_id)):
                # Not every version of the store ignores an update of a missing record.
                there = (await collection.get(ids=list(part), include=[]))["ids"]
                if there:
                    # An update leaves fields that it does not name; a withdrawn vote removes the reward.
                    await collection.update(
                        ids=there, metadatas=[{"reward": None, **by_id[one].flat()} for one in there]
                    )

        async with self._write():
            await self._collections.each(user_id, write)

    async def delete(self, user_id: str, ids: Sequence[str]) -> None:
        async def remove(collection: Collection) -> None:
            for part in _parts(list(ids)):
                await collection.delete(part)

        async with self._write():
            await self._collections.each(user_id, remove)

    async def drop_user(self, user_id: str) -> None:
        """Remove everything of a user."""
        async with self._write():
            await self._collections.drop_user(user_id)

    async def rebuild(
        self, user_id: str, copies: AsyncIterator[Sequence[Engram]], copied: Callable[[], None] = lambda: None
    ) -> int | None:
        """Replace the user's collections whose vector index is damaged, and return the number of engrams in them.

        copies: all engrams of the user, a page at a time. Those that no other collection has are written to a new one,
        without vectors, before the damaged ones are removed. A crash in between leaves engrams in both. copied: called
        between the two steps. Return None when no index is damaged.
        """
        async with self._write():
            self._collections.forget(user_id)
            there = await self._collections.of(user_id)
            damaged = [one for one in there if await one.damaged()]
            whole = [one for one in there if one not in damaged]
            written = 0
            if damaged:
                spaces = [one.space for one in damaged]
                vector = next(found for n in count(1) if (found := no_vector(n)).space not in spaces)
                async for page in copies:
                    for part in _parts(page):
                        ids = [engram.id for engram in part]
                        known = {id_ for one in whole for id_ in (await one.get(ids=ids, include=[]))["ids"]}
                        lost = [engram for engram in part if engram.id not in known]
                        if lost:
                            await self._collections.add(user_id, vector.space, _record([(one, vector) for one in lost]))
                        written += len(lost)
                copied()
                for collection in damaged:
                    await self._collections.drop(collection.name)
            self.suspects.remove(user_id)
            return written if damaged else None

    async def ids_of_session(self, user_id: str, session_id: str) -> list[str]:
        async def read(collection: Collection) -> list[str]:
            return list((await collection.get(where={"session_id": session_id}, include=[]))["ids"])

        return list(dict.fromkeys(one for ids in await self._collections.each(user_id, read) for one in ids))

    async def users(self) -> set[str]:
        """Return the users that have engrams, or had some. It takes half a millisecond for each."""
        return await self._collections.users()

    async def of_user(self, user_id: str) -> AsyncIterator[list[Placed]]:
        """Yield a user's engrams with their vectors, a page at a time."""
        for collection in await self._collections.of(user_id):
            async for page in collection.pages(("metadatas", "embeddings")):
                yield list(_placed(page, user_id, collection.space).values())

    async def scan(self) -> AsyncIterator[tuple[str, list[Placed]]]:
        """Yield all users' engrams with their vectors, a page at a time."""
        async for user_id, collection in self._collections.of_all_users():
            async for page in collection.pages(("metadatas", "embeddings")):
                yield user_id, list(_placed(page, user_id, collection.space).values())

    async def collections(self, *, but: Space | None = None) -> list[Kept]:
        """Return all collections of engrams, or those of other spaces than one."""
        if all(space == but for space in (await self._collections.spaces()).values()):
            return []
        return [
            Kept(user_id, one.name, one.space, await one.count())
            async for user_id, one in self._collections.of_all_users(but=but)
        ]

    async def page(self, user_id: str, name: str, offset: int) -> list[Engram]:
        """Return some engrams of one collection from an offset; none at its end, and when it is gone."""
        collection = await self._collections.named(user_id, name)
        page = await collection.get(limit=64, offset=offset, include=["metadatas"]) if collection else None
        return list(_engrams(page, user_id).values()) if page else []

    async def drop_empty(self, name: str) -> None:
        """Remove a collection that has nothing left."""
        async with self._write():
            await self._collections.drop(name, empty=True)

    async def ping(self) -> None:
        self._check_room()
        await self._collections.ping()

    def forget_lists(self, user_id: str) -> None:
        """Look up the user's collections again: another replica has changed something."""
        self._collections.forget(user_id)

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────

    async def topic(self, user_id: str, name: str) -> Engram | None:
        """Return the engram under a name."""
        engram_id = topic_id(user_id, name)
        return (await self.get(user_id, [engram_id])).get(engram_id)

    async def topics(self, user_id: str) -> list[Engram]:
        """Return all topics, ordered by name."""

        async def read(collection: Collection) -> list[Engram]:
            page = await collection.get(where={"kind": "topic"}, include=["metadatas"])
            return list(_engrams(page, user_id).values())

        found = await self._collections.each(user_id, read)
        # A topic may be in two collections for a moment, while it is given a vector.
        return sorted({one.id: one for those in found for one in those}.values(), key=lambda one: one.topic)


def _record(items: Sequence[tuple[Engram, Vector]]) -> dict[str, Any]:
    return {
        "ids": [engram.id for engram, _ in items],
        "embeddings": [list(vector.values) for _, vector in items],
        "metadatas": [engram.flat() for engram, _ in items],
    }


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
        one: Placed(engram, Vector(space.model, places[one]) if space.model else None)
        for one, engram in _engrams(page, user_id).items()
    }


def _parts(items: Sequence[R]) -> Iterable[Sequence[R]]:
    return (items[at : at + PAGE] for at in range(0, len(items), PAGE))


@asynccontextmanager
async def open_store(settings: MemorySettings) -> AsyncIterator[Store]:
    """Raises StoreLocked when another process has the folder of an embedded store."""
    if settings.chroma_url:
        async with _closing(Server(settings)) as connection:
            yield Store(connection, settings.collection)
        return
    async with locked(settings.folder), _closing(Embedded(settings.folder)) as connection:
        yield Store(connection, settings.collection, folder=settings.folder)


@asynccontextmanager
async def _closing(connection: Connection) -> AsyncIterator[Connection]:
    try:
        yield connection
    finally:
        await connection.close()
