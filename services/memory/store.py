"""The store: Chroma, embedded in this process or a server. The only module that knows it.

Every user has collections of their own: one per embedding model and dimension (one, unless the model was changed), and
one for topics. So a search sees nothing of other users and costs nothing for them. Vectors are computed by us.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import chromadb
import httpx
from chromadb.config import Settings as ChromaSettings
from chromadb.errors import ChromaError, InvalidDimensionException, NotFoundError

from services.memory.engram import Engram
from services.memory.settings import MemorySettings
from shared.errors import SettingsError, TransientError
from shared.logging import get_logger

log = get_logger()

R = TypeVar("R")
Vector = Sequence[float]

# SQLite allows a bounded number of variables in a statement.
PAGE = 500
READERS = 4
TOPICS = "topics"
# How long a list of a user's collections is believed when other replicas may make new ones.
_BELIEVED = 5.0
_LOCK_PATIENCE = 5.0


class StoreUnavailable(TransientError):
    """The Chroma server does not answer, or the folder cannot be written just now."""


class StoreLocked(SettingsError):
    """Another process uses the folder."""


@dataclass(frozen=True, slots=True)
class Near:
    """The id of an engram near a query; `similarity` is the cosine."""

    id: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    content: str
    time: int


@dataclass(slots=True)
class _Collection:
    handle: Any
    model: str
    dimension: int


@dataclass(slots=True)
class _User:
    collections: dict[str, _Collection] = field(default_factory=dict)
    read: float = float("-inf")


class Store:
    """Open it with `open_store`. Every method may raise StoreUnavailable."""

    def __init__(self, connect: Callable[[], Any], prefix: str, *, shared: bool) -> None:
        self._connect = connect
        self._prefix = prefix
        self._shared = shared
        self._client: Any = None
        self._connecting = threading.Lock()
        self._users: dict[str, _User] = {}
        # Writers take turns: one transaction at a time is what SQLite has. Searches do not stand in their line.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")

    def close(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()

    async def reading(self, work: Callable[..., R], *args: Any) -> R:
        return await self._in(self._readers, work, *args)

    async def writing(self, work: Callable[..., R], *args: Any) -> R:
        return await self._in(self._writer, work, *args)

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., R], *args: Any) -> R:
        call = functools.partial(_mapped, work, *args)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    # ── engrams ──────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        return await self.reading(self._get, user_id, ids)

    async def vectors(self, user_id: str, model: str, ids: Sequence[str]) -> dict[str, Any]:
        """The vector of each engram that is there, as an array; None for one whose vector is another model's."""
        return await self.reading(self._vectors, user_id, model, ids)

    async def query(self, user_id: str, model: str, vector: Vector, limit: int) -> list[Near]:
        """The nearest of the user's engrams that have vectors of this model."""
        return await self.reading(self._query, user_id, model, vector, limit)

    async def put(self, user_id: str, model: str, items: Sequence[tuple[Engram, Vector]]) -> None:
        """Adds or replaces whole engrams of one user, with vectors of this model."""
        await self.writing(self._put, user_id, model, items)

    async def update(self, user_id: str, engrams: Sequence[Engram]) -> None:
        """Replaces what is known of engrams that are there; their vectors stay. One that is not there is left out."""
        await self.writing(self._update, user_id, engrams)

    async def delete(self, user_id: str, ids: Sequence[str]) -> None:
        await self.writing(self._delete, user_id, ids)

    async def drop_user(self, user_id: str) -> None:
        """Removes everything of a user, topics too."""
        await self.writing(self._drop_user, user_id)

    async def ids_of_session(self, user_id: str, session_id: str) -> list[str]:
        return await self.reading(self._ids_of_session, user_id, session_id)

    def scan(self) -> Iterator[tuple[str, list[Engram]]]:
        """Every engram, a page at a time with its user. Blocking: for `reading`."""
        self._list_users()
        for user_id in list(self._users):
            for collection in list(self._users[user_id].collections.values()):
                for page in _pages(collection.handle):
                    yield user_id, [engram for engram in _engrams(page, user_id) if engram is not None]

    async def users(self) -> list[str]:
        """Everybody who has an engram or a topic, in the order of their ids."""

        def listed() -> list[str]:
            return sorted({handle.metadata["user_id"] for handle in self._own_collections()})

        return await self.reading(listed)

    async def foreign(self, model: str) -> list[tuple[str, str, int]]:
        """Collections whose vectors are another model's: (user, collection, number of engrams)."""

        def listed() -> list[tuple[str, str, int]]:
            self._list_users()
            return [
                (user_id, name, collection.handle.count())
                for user_id, user in self._users.items()
                for name, collection in user.collections.items()
                if collection.model != model
            ]

        return await self.reading(listed)

    async def first_page(self, user_id: str, name: str) -> list[Engram]:
        """Some engrams of one collection, none when it is empty or gone."""

        def read() -> list[Engram]:
            collection = self._user(user_id).collections.get(name)
            page = collection.handle.get(limit=64, include=["metadatas"]) if collection else None
            return [engram for engram in _engrams(page, user_id) if engram is not None] if page else []

        return await self.reading(read)

    async def drop_empty(self, user_id: str, name: str) -> None:
        """Removes a collection that has nothing left."""

        def drop() -> None:
            collection = self._user(user_id).collections.get(name)
            if collection is not None and collection.handle.count() == 0:
                self._client.delete_collection(name)
                # read anew next time: others may have changed the list meanwhile
                self._users.pop(user_id, None)

        await self.writing(drop)

    async def ping(self) -> None:
        await self.reading(lambda: self._chroma().heartbeat())

    def forget_lists(self, user_id: str) -> None:
        """Another replica has changed something: what is known of the user's collections is read again."""
        self._users.pop(user_id, None)

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────

    async def topic(self, user_id: str, name: str) -> Topic | None:
        def get() -> Topic | None:
            found = self._topics(user_id).get(ids=[name], include=["metadatas"])
            return _topic(name, found["metadatas"][0]) if found["ids"] else None

        return await self.reading(get)

    async def topics(self, user_id: str) -> list[Topic]:
        def listed() -> list[Topic]:
            pages = _pages(self._topics(user_id))
            return [
                _topic(name, flat) for page in pages for name, flat in zip(page["ids"], page["metadatas"], strict=True)
            ]

        return sorted(await self.reading(listed), key=lambda topic: topic.name)

    async def save_topic(self, user_id: str, topic: Topic) -> None:
        def save() -> None:
            flat = {"user_id": user_id, "content": topic.content, "time": topic.time}
            self._topics(user_id).upsert(ids=[topic.name], embeddings=[[1.0]], metadatas=[flat])

        await self.writing(save)

    async def delete_topic(self, user_id: str, name: str) -> None:
        await self.writing(lambda: self._topics(user_id).delete(ids=[name]))

    # ── in a thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _chroma(self) -> Any:
        # two threads that open the same folder at once get in each other's way
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _name(self, user_id: str, suffix: str) -> str:
        return f"{self._prefix}.{hashlib.sha256(user_id.encode()).hexdigest()[:24]}.{suffix}"

    def _made(self, name: str, metadata: dict[str, Any]) -> Any:
        return self._chroma().get_or_create_collection(
            name, metadata=metadata, configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
        )

    def _topics(self, user_id: str) -> Any:
        return self._made(self._name(user_id, TOPICS), {"user_id": user_id, "kind": TOPICS})

    def _target(self, user_id: str, model: str, dimension: int) -> str:
        slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")[:80]
        name = self._name(user_id, f"{slug}-{dimension}")
        collections = self._user(user_id).collections
        if name not in collections:
            about = {"user_id": user_id, "kind": "engrams", "embedding_model": model, "dimension": dimension}
            collections[name] = _Collection(self._made(name, about), model, dimension)
        return name

    def _user(self, user_id: str) -> _User:
        user = self._users.get(user_id)
        if user is None or (self._shared and time.monotonic() - user.read > _BELIEVED):
            self._list_users()
            user = self._users.setdefault(user_id, _User(read=time.monotonic()))
        return user

    def _list_users(self) -> None:
        """Reads which collections there are."""
        users: dict[str, _User] = {}
        now = time.monotonic()
        for handle in self._own_collections():
            about = handle.metadata
            if about["kind"] == "engrams":
                found = _Collection(handle, about["embedding_model"], about["dimension"])
                users.setdefault(about["user_id"], _User(read=now)).collections[handle.name] = found
        for user_id in self._users.keys() - users.keys():
            users[user_id] = _User(read=now)
        self._users = users

    def _own_collections(self) -> Iterator[Any]:
        """Those of this memory; others may use the same server."""
        offset = 0
        while page := self._chroma().list_collections(limit=PAGE, offset=offset):
            offset += len(page)
            for handle in page:
                about = handle.metadata or {}
                if handle.name.startswith(f"{self._prefix}.") and about.get("kind") in ("engrams", TOPICS):
                    yield handle

    def _collections(self, user_id: str) -> list[_Collection]:
        return list(self._user(user_id).collections.values())

    def _each(self, user_id: str, work: Callable[[_Collection], R]) -> list[R]:
        """The work on every collection of the user; one that another replica has removed is passed over."""
        results = []
        for collection in self._collections(user_id):
            try:
                results.append(work(collection))
            except NotFoundError:
                self._users.pop(user_id, None)
        return results

    def _get(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        found: dict[str, Engram] = {}

        def read(collection: _Collection) -> None:
            for part in _parts([one for one in ids if one not in found]):
                page = collection.handle.get(ids=part, include=["metadatas"])
                found.update({engram.id: engram for engram in _engrams(page, user_id) if engram is not None})

        self._each(user_id, read)
        return found

    def _vectors(self, user_id: str, model: str, ids: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def read(collection: _Collection) -> None:
            for part in _parts([one for one in ids if one not in found]):
                page = collection.handle.get(ids=part, include=["embeddings"])
                same = collection.model == model
                found.update(
                    (one, vector if same else None) for one, vector in zip(page["ids"], page["embeddings"], strict=True)
                )

        self._each(user_id, read)
        return found

    def _query(self, user_id: str, model: str, vector: Vector, limit: int) -> list[Near]:
        def search(collection: _Collection) -> list[Near]:
            if (collection.model, collection.dimension) != (model, len(vector)):
                return []
            # ids alone: reading what is known of all candidates would cost more than finding them
            page = collection.handle.query(query_embeddings=[list(vector)], n_results=limit, include=["distances"])
            return [
                Near(one, 1.0 - float(distance))
                for one, distance in zip(page["ids"][0], page["distances"][0], strict=True)
            ]

        found = [hit for hits in self._each(user_id, search) for hit in hits]
        return sorted(found, key=lambda hit: -hit.similarity)[:limit]

    def _put(self, user_id: str, model: str, items: Sequence[tuple[Engram, Vector]]) -> None:
        for part in _parts(items):
            target = self._target(user_id, model, len(part[0][1]))
            record = {
                "ids": [engram.id for engram, _ in part],
                "embeddings": [list(vector) for _, vector in part],
                "metadatas": [engram.flat() for engram, _ in part],
            }
            try:
                self._user(user_id).collections[target].handle.upsert(**record)
            except (NotFoundError, KeyError):
                # another replica has removed the user's collections: they are made anew
                self._users.pop(user_id, None)
                target = self._target(user_id, model, len(part[0][1]))
                self._user(user_id).collections[target].handle.upsert(**record)
            for name, collection in list(self._user(user_id).collections.items()):
                if name != target:
                    with contextlib.suppress(NotFoundError):
                        collection.handle.delete(ids=record["ids"])

    def _update(self, user_id: str, engrams: Sequence[Engram]) -> None:
        by_id = {engram.id: engram for engram in engrams}

        def write(collection: _Collection) -> None:
            for part in _parts(list(by_id)):
                # an update of what is not there is ignored by the store, but not by every version of it
                there = collection.handle.get(ids=part, include=[])["ids"]
                if there:
                    collection.handle.update(ids=there, metadatas=[by_id[one].flat() for one in there])

        self._each(user_id, write)

    def _delete(self, user_id: str, ids: Sequence[str]) -> None:
        def remove(collection: _Collection) -> None:
            for part in _parts(list(ids)):
                collection.handle.delete(ids=part)

        self._each(user_id, remove)

    def _drop_user(self, user_id: str) -> None:
        self._users.pop(user_id, None)
        names = [*self._user(user_id).collections, self._name(user_id, TOPICS)]
        for name in names:
            with contextlib.suppress(NotFoundError):
                self._chroma().delete_collection(name)
        self._users.pop(user_id, None)

    def _ids_of_session(self, user_id: str, session_id: str) -> list[str]:
        where = {"session_id": session_id}
        found = self._each(user_id, lambda collection: list(collection.handle.get(where=where, include=[])["ids"]))
        return list(dict.fromkeys(one for ids in found for one in ids))


def _engrams(page: Any, user_id: str) -> list[Engram | None]:
    """The records of a page; None for one of another user, which must not happen and must never be shown."""
    found: list[Engram | None] = []
    for engram_id, flat in zip(page["ids"], page["metadatas"], strict=True):
        if flat is None or flat.get("user_id") != user_id:
            log.error("memory.foreign_record", engram_id=engram_id)
            found.append(None)
        else:
            found.append(Engram.from_flat(engram_id, flat))
    return found


def _topic(name: str, flat: Any) -> Topic:
    return Topic(name, str(flat["content"]), int(flat["time"]))


def _parts(items: Sequence[R]) -> Iterable[Sequence[R]]:
    return (items[at : at + PAGE] for at in range(0, len(items), PAGE))


def _pages(handle: Any, size: int = PAGE) -> Iterator[Any]:
    """All records of a collection, by ids that are read first: a removal meanwhile shifts nothing."""
    try:
        ids = handle.get(include=[])["ids"]
        for at in range(0, len(ids), size):
            yield handle.get(ids=ids[at : at + size], include=["metadatas"])
    except NotFoundError:
        # another replica has removed it
        return


def _mapped(work: Callable[..., R], *args: Any) -> R:
    """Turns what Chroma raises into our errors."""
    try:
        return work(*args)
    except InvalidDimensionException:
        raise
    except (httpx.HTTPError, ConnectionError, ChromaError) as exc:
        raise StoreUnavailable(f"the store does not work: {type(exc).__name__}: {exc}") from exc
    except ValueError as exc:
        # how the client says that it cannot connect
        if "connect" in str(exc).lower():
            raise StoreUnavailable(str(exc)) from exc
        raise


# ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def open_store(settings: MemorySettings) -> AsyncIterator[Store]:
    """Raises StoreLocked when another process has the folder of an embedded store."""
    chroma = ChromaSettings(anonymized_telemetry=False)
    if settings.chroma_url:
        address = urlsplit(settings.chroma_url)
        secure = address.scheme == "https"
        token = settings.chroma_token.get_secret_value() if settings.chroma_token else None

        def server() -> Any:
            return chromadb.HttpClient(
                host=address.hostname or "",
                port=address.port or (443 if secure else 80),
                ssl=secure,
                headers={"x-chroma-token": token} if token else None,
                settings=chroma,
            )

        store = Store(server, settings.collection, shared=True)
        try:
            yield store
        finally:
            store.close()
        return
    path = (settings.chroma_path or settings.data_dir / "chroma").absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with await _locked(path):
        store = Store(lambda: chromadb.PersistentClient(path, settings=chroma), settings.collection, shared=False)
        try:
            yield store
        finally:
            store.close()


async def _locked(path: Path) -> IO[str]:
    """The folder for this process alone; waits a little for one that is just ending."""
    file = (path / "local2.lock").open("a+", encoding="utf-8")
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as exc:
            if time.monotonic() > deadline:
                file.seek(0)
                other = file.read().strip()
                file.close()
                raise StoreLocked(
                    f"the memory in {path} is in use by another process{f' ({other})' if other else ''}; an embedded "
                    "store has one replica: stop the other one, or run a Chroma server and set LOCAL2_CHROMA_URL"
                ) from exc
            await asyncio.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file
