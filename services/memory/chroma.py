"""Chroma, embedded in this process or a server, and which of its collections are whose. The only module that knows it.

Every user has collections of their own: one per embedding model and dimension (one, unless the model was changed), and
one for topics. So a search sees nothing of other users and costs nothing for them. Everything here blocks: it is for
threads.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import chromadb
import httpx
from chromadb.config import Settings as ChromaSettings
from chromadb.errors import ChromaError, InvalidDimensionException, NotFoundError

from services.memory.settings import MemorySettings
from services.memory.vectors import Space
from shared.errors import TransientError
from shared.participant.kept import note

R = TypeVar("R")

# SQLite allows a bounded number of variables in a statement.
PAGE = 500
TOPICS = "topics"
# How long a list of a user's collections is believed when other replicas may make new ones.
_BELIEVED = 5.0


# How Chroma says that what it reads is broken; everything else may pass.
_DAMAGED = re.compile(
    r"malformed|not a database|\(code: (11|26)\)|hnsw segment reader|deserializ|unsupported opcode", re.IGNORECASE
)


class StoreUnavailable(TransientError):
    """The Chroma server does not answer, or the folder cannot be written just now."""


class StoreDamaged(StoreUnavailable):
    """What is on disk cannot be read, or has vanished: nothing gets better by itself."""


@dataclass(slots=True)
class Collection:
    """`handle` is Chroma's own."""

    handle: Any
    space: Space


@dataclass(slots=True)
class _User:
    collections: dict[str, Collection] = field(default_factory=dict)
    read: float = float("-inf")


class Collections:
    """connect: opens Chroma, at the first use. shared: other replicas may make and remove collections too."""

    def __init__(self, connect: Callable[[], Any], prefix: str, *, shared: bool) -> None:
        self._connect = connect
        self._prefix = prefix
        self._shared = shared
        self._client: Any = None
        self._connecting = threading.Lock()
        self._users: dict[str, _User] = {}

    def client(self) -> Any:
        # two threads that open the same folder at once get in each other's way
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def of(self, user_id: str) -> dict[str, Collection]:
        """A user's collections of engrams by their names."""
        user = self._users.get(user_id)
        if user is None or (self._shared and time.monotonic() - user.read > _BELIEVED):
            self._read()
            user = self._users.setdefault(user_id, _User(read=time.monotonic()))
        return user.collections

    def everybody(self) -> list[tuple[str, dict[str, Collection]]]:
        """Each user who has engrams, with their collections as they are now."""
        self._read()
        return [(user_id, dict(user.collections)) for user_id, user in list(self._users.items())]

    def each(self, user_id: str, work: Callable[[Collection], R]) -> list[R]:
        """The work on every collection of the user; one that another replica has removed is passed over."""
        results = []
        for collection in list(self.of(user_id).values()):
            try:
                results.append(work(collection))
            except NotFoundError:
                self.forget(user_id)
        return results

    def target(self, user_id: str, space: Space) -> str:
        """The name of the user's collection for such vectors, which is there then."""
        collections = self.of(user_id)
        for name, there in collections.items():
            if there.space == space:
                return name
        name = self._name(user_id, _suffix(space))
        about = {"user_id": user_id, "kind": "engrams", "embedding_model": space.model, "dimension": space.dimension}
        collections[name] = Collection(self._made(name, about), space)
        return name

    def upsert(self, user_id: str, space: Space, record: dict[str, Any]) -> None:
        """Writes records with vectors of this space, and removes them where other vectors of theirs are."""
        try:
            target = self.target(user_id, space)
            self.of(user_id)[target].handle.upsert(**record)
        except (NotFoundError, KeyError):
            # another replica has removed the user's collections: they are made anew
            self.forget(user_id)
            target = self.target(user_id, space)
            self.of(user_id)[target].handle.upsert(**record)
        for name, collection in list(self.of(user_id).items()):
            if name != target:
                with suppress(NotFoundError):
                    collection.handle.delete(ids=record["ids"])

    def topics(self, user_id: str) -> Any:
        """Chroma's own collection of a user's topics, which is there then."""
        return self._made(self._name(user_id, TOPICS), {"user_id": user_id, "kind": TOPICS})

    def drop_empty(self, user_id: str, name: str) -> None:
        collection = self.of(user_id).get(name)
        if collection is not None and collection.handle.count() == 0:
            self.client().delete_collection(name)
            # read anew next time: others may have changed the list meanwhile
            self.forget(user_id)

    def drop_user(self, user_id: str) -> None:
        """Removes all of a user's collections, topics too."""
        self.forget(user_id)
        for name in [*self.of(user_id), self._name(user_id, TOPICS)]:
            with suppress(NotFoundError):
                self.client().delete_collection(name)
        self.forget(user_id)

    def forget(self, user_id: str) -> None:
        """Which collections the user has is asked again."""
        self._users.pop(user_id, None)

    def own(self) -> Iterator[Any]:
        """Chroma's collections of this memory, topics too; others may use the same server."""
        offset = 0
        while page := self.client().list_collections(limit=PAGE, offset=offset):
            offset += len(page)
            for handle in page:
                about = handle.metadata or {}
                if handle.name.startswith(f"{self._prefix}.") and about.get("kind") in ("engrams", TOPICS):
                    yield handle

    def _read(self) -> None:
        users: dict[str, _User] = {}
        now = time.monotonic()
        for handle in self.own():
            about = handle.metadata
            if about["kind"] == "engrams":
                found = Collection(handle, Space(about["embedding_model"], about["dimension"]))
                users.setdefault(about["user_id"], _User(read=now)).collections[handle.name] = found
        for user_id in self._users.keys() - users.keys():
            users[user_id] = _User(read=now)
        self._users = users

    def _name(self, user_id: str, suffix: str) -> str:
        return f"{self._prefix}.{hashlib.sha256(user_id.encode()).hexdigest()[:24]}.{suffix}"

    def _made(self, name: str, metadata: dict[str, Any]) -> Any:
        return self.client().get_or_create_collection(
            name, metadata=metadata, configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
        )


def _suffix(space: Space) -> str:
    """The end of a collection's name: what it holds, and never the same for two models."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", space.model).strip("-")[:80] or "words"
    if slug != space.model:
        slug += f"-{hashlib.sha256(space.model.encode()).hexdigest()[:8]}"
    return f"{slug}-{space.dimension}"


def pages(handle: Any, include: Sequence[str]) -> Iterator[Any]:
    """All records of a collection, by ids that are read first: a removal meanwhile shifts nothing."""
    try:
        ids = handle.get(include=[])["ids"]
        for at in range(0, len(ids), PAGE):
            yield handle.get(ids=ids[at : at + PAGE], include=list(include))
    except NotFoundError:
        # another replica has removed it
        return


def mapped(work: Callable[..., R], *args: Any) -> R:
    """Turns what Chroma raises into our errors."""
    try:
        return work(*args)
    except InvalidDimensionException:
        raise
    except (httpx.HTTPError, ConnectionError, ChromaError) as exc:
        if isinstance(exc, ChromaError) and _DAMAGED.search(str(exc)):
            raise StoreDamaged(str(exc)) from exc
        raise StoreUnavailable(f"the store does not work: {type(exc).__name__}: {exc}") from exc
    except ValueError as exc:
        # how the client says that it cannot connect
        if "connect" in str(exc).lower():
            raise StoreUnavailable(str(exc)) from exc
        raise


def server(settings: MemorySettings) -> Any:
    """A connection to the Chroma server of the settings."""
    address = urlsplit(str(settings.chroma_url))
    secure = address.scheme == "https"
    token = settings.chroma_token.get_secret_value() if settings.chroma_token else None
    return chromadb.HttpClient(
        host=address.hostname or "",
        port=address.port or (443 if secure else 80),
        ssl=secure,
        headers={"x-chroma-token": token} if token else None,
        settings=ChromaSettings(anonymized_telemetry=False),
    )


def embedded(path: Path) -> Any:
    """Chroma in this process, in a folder that no other process uses."""
    client = chromadb.PersistentClient(path, settings=ChromaSettings(anonymized_telemetry=False))
    note(path)
    return client
