"""Chroma, embedded in this process or a server, and which of its collections are whose. The only module that knows it.

Every user has collections of their own: one per embedding model and dimension (one, unless the model was changed). So a
search sees nothing of other users and costs nothing for them. A collection's name follows from its user, model and
dimension, so nobody lists collections to find one, however many users there are: which models and dimensions there are
at all is kept in a collection that has nothing else. Everything here blocks: it is for threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from services.memory.damage import DATABASE
from services.memory.engine import Engine, errors, package
from services.memory.settings import MemorySettings
from services.memory.vectors import Space
from shared.errors import TransientError
from shared.participant.store_marker import mark_created

R = TypeVar("R")

_ERRORS = errors()
ChromaError, NotFoundError, InvalidDimension = (
    _ERRORS.ChromaError, _ERRORS.NotFoundError, _ERRORS.InvalidDimensionException,
)  # fmt: skip

# SQLite allows a bounded number of variables in a statement.
PAGE = 500
_SPACES = "spaces"
# Says in the collection of spaces that all there are is known.
_WHOLE = "whole"
# How long it is believed that a collection is not there, and which spaces there are, when other replicas may make new
# ones.
_BELIEVED = 5.0
# Collections whose handles are kept, 40 kB each, and what is not there of them.
_HANDLES = 1_000
# Collections whose vectors an embedded store keeps in memory and whose files it keeps open: 160 kB and five files each,
# or more.
_OPEN = 64
# glibc's name of what freed memory is overwritten with; memory that is given out is filled with the complement.
_M_PERTURB, _OVERWRITTEN_WITH = -6, 0xFF


# How Chroma says that what it reads is broken; everything else may pass.
_DAMAGED = re.compile(
    r"malformed|not a database|\(code: (11|26)\)|hnsw segment reader|deserializ|unsupported opcode", re.IGNORECASE
)


# How Chroma says that an index is not in memory which was never large enough for a file: it was closed for another one,
# and is not made again from the queue of changes before the next change of its collection.
_CLOSED = "Nothing found on disk"
# Seconds that Chroma may take to close its database.
_CLOSING = 2.0
# So often that is tried, while others may have it closed again.
_OPENINGS = 10


class StoreUnavailable(TransientError):
    """The Chroma server does not answer, or the folder cannot be written just now."""


class StoreDamaged(StoreUnavailable):
    """What is on disk cannot be read, or has vanished: nothing gets better by itself."""


@dataclass(slots=True)
class Collection:
    """`handle` is Chroma's own."""

    handle: Any
    space: Space


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found under a name; None: nothing. `at`: when."""

    handle: Any | None
    at: float


class Collections:
    """connect: opens Chroma, at the first use. shared: other replicas may make and remove collections too."""

    def __init__(self, connect: Callable[[], Any], prefix: str, *, shared: bool) -> None:
        self._connect = connect
        self._prefix = prefix
        self._shared = shared
        self._client: Any = None
        self._connecting = threading.Lock()
        # of both: a dictionary's own steps are each complete in themselves, and several threads are here
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._spaces: dict[str, Space] = {}
        self._spaces_at = float("-inf")

    def client(self) -> Any:
        # two threads that open the same folder at once get in each other's way
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        if self._client is None:
            return
        self._client.close()
        if isinstance(self._client, Engine):
            _let_go(self._client.database)
            return
        # Chroma's own clients of a server, of which each holds another, forget their connections without closing them
        for one in (self._client, self._client._admin_client):
            one._server._session.close()

    def of(self, user_id: str, space: Space | None = None) -> dict[str, Collection]:
        """A user's collections of engrams by their names; those of one space."""
        spaces = self.spaces() if space is None else {_suffix(space): space}
        named = {self._name(user_id, suffix): one for suffix, one in spaces.items()}
        found = {name: (self._handle(name), one) for name, one in named.items()}
        return {name: Collection(handle, one) for name, (handle, one) in found.items() if handle is not None}

    def everybody(self, *, but: Space | None = None) -> Iterator[tuple[str, Collection]]:
        """All collections of engrams, or those of other spaces than one, each with whose it is. It takes some
        milliseconds for each: not for a search.

        Their handles come one after the other and are not kept: those of 10,000 users would fill 400 MB.
        """
        for name, about in [(one.name, one.metadata) for one in self.own()]:
            if (space := _space(about)) == but:
                continue
            if (handle := self.handle(name)) is not None:
                yield about["user_id"], Collection(handle, space)

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, Collection]]:
        """The same of some collections, those of engrams among them that are there."""
        for name in names:
            handle = self.handle(name)
            if handle is not None and handle.metadata.get("kind") == "engrams":
                yield handle.metadata["user_id"], Collection(handle, _space(handle.metadata))

    def each(self, user_id: str, work: Callable[[Collection], R], space: Space | None = None) -> list[R]:
        """The work on every collection of the user, or on that of one space; one that another replica has removed is
        passed over."""
        results = []
        for name, collection in self.of(user_id, space).items():
            try:
                results.append(opened(collection.handle, partial(work, collection)))
            except NotFoundError:
                # perhaps it was removed and made anew
                self._forget_name(name)
                if (handle := self._handle(name)) is not None:
                    with suppress(NotFoundError):
                        results.append(opened(handle, partial(work, Collection(handle, collection.space))))
        return results

    def upsert(self, user_id: str, space: Space, record: dict[str, Any]) -> None:
        """Writes records with vectors of this space, and removes them where other vectors of theirs are."""
        target = self._name(user_id, _suffix(space))
        try:
            self._made(user_id, space).upsert(**record)
        except NotFoundError:
            # another replica has removed the user's collections: they are made anew
            self._forget_name(target)
            self._made(user_id, space).upsert(**record)
        for name, collection in self.of(user_id).items():
            if name != target:
                with suppress(NotFoundError):
                    collection.handle.delete(ids=record["ids"])

    def drop(self, name: str, *, empty: bool = False) -> None:
        """Removes a collection; one that must be `empty` only when it is."""
        with suppress(NotFoundError):
            if not empty or self.client().get_collection(name, embedding_function=None).count() == 0:
                self.client().delete_collection(name)
        self._forget_name(name)

    def drop_user(self, user_id: str) -> None:
        """Removes all of a user's collections."""
        for name in self.of(user_id):
            self.drop(name)

    def forget(self, user_id: str) -> None:
        """Which collections the user has is asked again."""
        for suffix in list(self._spaces):
            self._forget_name(self._name(user_id, suffix))
        self._spaces_at = float("-inf")

    def own(self) -> Iterator[Any]:
        """Chroma's collections of this memory's engrams; others may use the same server."""
        offset = 0
        while page := self.client().list_collections(limit=PAGE, offset=offset):
            offset += len(page)
            for handle in page:
                about = handle.metadata or {}
                if handle.name.startswith(f"{self._prefix}.") and about.get("kind") == "engrams":
                    yield handle

    # ── spaces ───────────────────────────────────────────────────────────────────────────────────────────────

    def spaces(self) -> dict[str, Space]:
        """Of all users' vectors, each by how the names of its collections end."""
        if not self._spaces or (self._shared and time.monotonic() - self._spaces_at > _BELIEVED):
            at = time.monotonic()
            found = self._written_spaces()
            if found is None:
                # it is new, or what said so is gone
                self._write_spaces({_suffix(one.space): one.space for _, one in self.everybody()})
                found = self._written_spaces() or {}
            self._spaces, self._spaces_at = found, at
        return self._spaces

    def _written_spaces(self) -> dict[str, Space] | None:
        """None: not all of them may be there."""
        try:
            kept = self.client().get_collection(self._spaces_name, embedding_function=None).get(include=["metadatas"])
        except NotFoundError:
            return None
        if _WHOLE not in kept["ids"]:
            return None
        about = zip(kept["ids"], kept["metadatas"], strict=True)
        return {suffix: _space(one) for suffix, one in about if suffix != _WHOLE}

    def _write_spaces(self, spaces: dict[str, Space]) -> None:
        handle = self.client().get_or_create_collection(
            self._spaces_name, metadata={"kind": _SPACES}, embedding_function=None
        )
        about = [{"embedding_model": one.model, "dimension": one.dimension} for one in spaces.values()]
        ids = [*spaces, _WHOLE]
        whole = {"embedding_model": "", "dimension": 0}
        handle.upsert(ids=ids, embeddings=[[1.0]] * len(ids), metadatas=[*about, whole])

    # ── names and handles ────────────────────────────────────────────────────────────────────────────────────

    @property
    def _spaces_name(self) -> str:
        return f"{self._prefix}.{_SPACES}"

    def _name(self, user_id: str, suffix: str) -> str:
        return f"{self._prefix}.{hashlib.sha256(user_id.encode()).hexdigest()[:24]}.{suffix}"

    def _handle(self, name: str) -> Any | None:
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                self._known.move_to_end(name)
        if known is None or (known.handle is None and self._shared and time.monotonic() - known.at > _BELIEVED):
            at = time.monotonic()
            known = _Known(self.handle(name), at)
            self._keep(name, known)
        return known.handle

    def handle(self, name: str) -> Any | None:
        """Chroma's own collection of that name, asked anew; None where there is none."""
        try:
            return self.client().get_collection(name, embedding_function=None)
        except NotFoundError:
            return None

    def _made(self, user_id: str, space: Space) -> Any:
        """Chroma's own collection for such vectors of the user, which is there then."""
        suffix = _suffix(space)
        name = self._name(user_id, suffix)
        if (there := self._handle(name)) is not None:
            return there
        if suffix not in self.spaces():
            # before there is a collection of that kind: nobody else would look for it
            self._write_spaces({suffix: space})
            self._spaces = {**self._spaces, suffix: space}
        about = {"user_id": user_id, "kind": "engrams", "embedding_model": space.model, "dimension": space.dimension}
        handle = self.client().get_or_create_collection(
            name, metadata=about, configuration={"hnsw": {"space": "cosine"}}, embedding_function=None
        )
        self._keep(name, _Known(handle, time.monotonic()))
        return handle

    def _keep(self, name: str, known: _Known) -> None:
        with self._lock:
            if known.handle is None and (there := self._known.get(name)) is not None and there.at >= known.at:
                # it was made while somebody found that it was not there
                return
            self._known[name] = known
            self._known.move_to_end(name)
            while len(self._known) > _HANDLES:
                self._known.popitem(last=False)

    def _forget_name(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)


def _space(about: Any) -> Space:
    return Space(about["embedding_model"], about["dimension"])


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
            yield opened(handle, partial(handle.get, ids=ids[at : at + PAGE], include=list(include)))
    except NotFoundError:
        # another replica has removed it
        return


def opened(handle: Any, work: Callable[[], R]) -> R:
    """The work on one of Chroma's collections, whose index may have been closed for others."""
    for _ in range(_OPENINGS):
        try:
            return work()
        except ChromaError as exc:
            if _CLOSED not in str(exc):
                raise
            # a change, of nothing
            handle.delete(ids=["-"])
    return work()


def mapped(work: Callable[..., R], *args: Any) -> R:
    """Turns what Chroma raises into our errors."""
    try:
        return work(*args)
    except InvalidDimension:
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
    chromadb = package()
    address = urlsplit(str(settings.chroma_url))
    secure = address.scheme == "https"
    token = settings.chroma_token.get_secret_value() if settings.chroma_token else None
    return chromadb.HttpClient(
        host=address.hostname or "",
        port=address.port or (443 if secure else 80),
        ssl=secure,
        headers={"x-chroma-token": token} if token else None,
        settings=chromadb.Settings(anonymized_telemetry=False),
    )


def _prepared(database: Path) -> None:
    """Two things that Chroma, which has an SQLite of its own, finds in the file: call it before Chroma has it.

    A log beside the file (WAL), that one write to the disk adds a change to, as safely as eight write it into the file.
    And an index of the queue of changes by its collections: Chroma reads that of one collection whenever its vectors
    are opened, and looks through everybody's without it. A store that is just being made gets it at its next start.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(database)) as db, db:
        db.execute("PRAGMA journal_mode = WAL")
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'embeddings_queue'").fetchone():
            db.execute("CREATE INDEX IF NOT EXISTS local2_queue ON embeddings_queue (topic)")


def _let_go(database: Path) -> None:
    """Waits until Chroma has closed its database, which it does in threads of its own: the log goes with the last."""
    until = time.monotonic() + _CLOSING
    while database.with_name(f"{database.name}-wal").exists() and time.monotonic() < until:
        time.sleep(0.002)


def embedded(path: Path) -> Engine:
    """Chroma in this process, in a folder that no other process uses."""
    # Chroma writes its vectors' files as large as they may become, with whatever lay in memory where no vector is yet:
    # it must not be text.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_PERTURB, _OVERWRITTEN_WITH)
    _prepared(path / DATABASE)
    engine = Engine(path / DATABASE, _OPEN)
    mark_created(path)
    return engine
