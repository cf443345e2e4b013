"""Chroma by its public client: a folder of this process alone, or a server. Only this module imports Chroma.

Every user has collections of their own, one per embedding model and dimension. A search therefore reads nothing of
other users. The name of a collection follows from its user, model and dimension, so it is found without a listing. One
more collection lists the models and dimensions that are in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from services.memory.settings import MemorySettings
from services.memory.vectors import Space
from shared.errors import TransientError
from shared.participant.store_marker import mark_created, sqlite_missing, was_created
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")

# Records of one call: SQLite allows a bounded number of variables in a statement.
PAGE = 500
# Collections of one listing. perf: with 4,700 users, pages of 500 leave 58 MB
# resident and pages of 100 leave 15 MB; both take 0.4 ms of CPU a user.
_LISTED = 100
# Seconds that Chroma may take for one call.
READ_S, WRITE_S = 30.0, 120.0
# The file that makes a folder a store.
DATABASE = "chroma.sqlite3"
READERS = 4
_SPACES = "spaces"
# Id of the record that marks the collection of spaces as complete.
_WHOLE = "whole"
# Seconds for which the list of spaces is used, where other replicas may add some.
_SPACES_S = 5.0
# The most cached collection handles, 40 kB each.
_HANDLES = 1_000
# The most indexes that an embedded Chroma has in memory, 2.7 MB each: a fifth of the files that the process may open.
OPEN_INDEXES = 64
_FILES_PER_INDEX = 5
_REOPENINGS = 10
# Chroma's messages about a broken database.
_DAMAGED = re.compile(r"malformed|not a database|\(code: (11|26)\)", re.IGNORECASE)
# Chroma's messages about a vector index that it cannot load, or to which it cannot add the changes in its log. It then
# refuses every call for the collection, reads of ids and metadata too. Chroma 1.5.9 writes the files of an index in
# place, then its list of ids, then its place in the log: a process that dies in between leaves such an index.
_INDEX_DAMAGED = re.compile(r"hnsw segment (reader|writer)", re.IGNORECASE)
# Errors of the operating system, such as too many open files, may be temporary.
_MAY_PASS = "(os error"
# Chroma's messages about a record without its vector: it was removed just now, or the file of vectors is damaged.
_NO_VECTOR = re.compile(r"Error (finding id|getting embedding)")
# Chroma's message about an index without a file, because it is small, that was closed for another one. Chroma loads it
# again at the next change of the collection.
_CLOSED = "Nothing found on disk"


class StoreUnavailable(TransientError):
    """Chroma does not answer, or cannot write at the moment."""


class StoreDamaged(StoreUnavailable):
    """Files of the store are broken or missing. Only a backup helps."""


class IndexDamaged(StoreUnavailable):
    """See `_INDEX_DAMAGED`."""


class CollectionGone(StoreUnavailable):
    """The collection does not exist."""


class VectorMissing(StoreUnavailable):
    """See `_NO_VECTOR`."""


class _IndexClosed(StoreUnavailable):
    """See `_CLOSED`."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise Chroma's errors as ours. The error for a record that Chroma refuses is permanent, and stays Chroma's."""
    from chromadb.errors import ChromaError, InvalidArgumentError, InvalidDimensionException, NotFoundError

    try:
        yield
    except (InvalidArgumentError, InvalidDimensionException):
        raise
    except NotFoundError as exc:
        raise CollectionGone(str(exc)) from exc
    except (httpx.HTTPError, OSError, ChromaError) as exc:
        if isinstance(exc, ChromaError) and _CLOSED in str(exc):
            raise _IndexClosed(str(exc)) from exc
        if isinstance(exc, ChromaError) and _NO_VECTOR.search(str(exc)):
            raise VectorMissing(str(exc)) from exc
        if isinstance(exc, ChromaError) and _DAMAGED.search(str(exc)):
            raise StoreDamaged(str(exc)) from exc
        if isinstance(exc, ChromaError) and _INDEX_DAMAGED.search(str(exc)) and _MAY_PASS not in str(exc):
            raise IndexDamaged(str(exc)) from exc
        raise StoreUnavailable(f"the store does not work: {type(exc).__name__}: {exc}") from exc
    except ValueError as exc:
        # The client's error for a server that it cannot reach.
        if "connect" in str(exc).lower():
            raise StoreUnavailable(str(exc)) from exc
        raise


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        raise StoreUnavailable(f"the store has not answered for {seconds:g} s") from exc


class Suspects:
    """Users with a vector that could not be read. found: set when there is a new one."""

    def __init__(self) -> None:
        self.users: dict[str, str] = {}
        self.found = asyncio.Event()

    def add(self, user_id: str, reason: str) -> None:
        if user_id not in self.users:
            log.warning("memory.vectors_unreadable", user_id=user_id, reason=reason)
            self.users[user_id] = reason
            self.found.set()

    def remove(self, user_id: str) -> None:
        self.users.pop(user_id, None)


class Connection(ABC):
    """Chroma's client, opened at the first call.

    damage: the reason why the store cannot be read. All methods raise StoreUnavailable and its subclasses.
    """

    def __init__(self) -> None:
        self.damage: str | None = None
        self.suspects = Suspects()
        self._client: Any = None
        self._opening = asyncio.Lock()

    async def client(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._client = await self._guarded(self._open())
            return self._client

    async def read(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call a reading method of the client or of one of its collections."""
        return await self._guarded(self._read(method, **arguments))

    async def write(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call a writing method."""
        return await self._guarded(self._write(method, **arguments))

    async def _guarded(self, call: Awaitable[R]) -> R:
        try:
            return await call
        except StoreDamaged as exc:
            self.give_up(str(exc))
            raise StoreDamaged(self.damage) from exc

    def give_up(self, reason: str) -> None:
        if self.damage is None:
            self.damage = (
                f"the memory's store is damaged: {reason}. Stop the stack, put the store aside with "
                "`local2 doctor --repair`, start the stack and restore the backup: `local2 restore --merge FILE`"
            )
            log.error("memory.damaged", reason=self.damage)

    @abstractmethod
    async def _open(self) -> Any: ...

    @abstractmethod
    async def _read(self, method: Callable[..., Any], **arguments: Any) -> Any: ...

    @abstractmethod
    async def _write(self, method: Callable[..., Any], **arguments: Any) -> Any: ...

    @abstractmethod
    async def close(self) -> None: ...


class Server(Connection):
    """A Chroma server."""

    def __init__(self, settings: MemorySettings) -> None:
        super().__init__()
        self._settings = settings

    async def _open(self) -> Any:
        chromadb = await asyncio.to_thread(_package)
        address = urlsplit(str(self._settings.chroma_url))
        secure = address.scheme == "https"
        token = self._settings.chroma_token.get_secret_value() if self._settings.chroma_token else None
        async with _deadline(READ_S):
            with _translated():
                return await chromadb.AsyncHttpClient(
                    host=address.hostname or "",
                    port=address.port or (443 if secure else 80),
                    ssl=secure,
                    headers={"x-chroma-token": token} if token else None,
                    settings=chromadb.Settings(
                        anonymized_telemetry=False,
                        # The asynchronous client checks no certificate by default.
                        chroma_server_ssl_verify=True,
                        # The client has no method that closes idle connections.
                        chroma_http_max_keepalive_connections=0,
                    ),
                )

    async def _read(self, method: Callable[..., Any], **arguments: Any) -> Any:
        async with _deadline(READ_S):
            with _translated():
                return await method(**arguments)

    async def _write(self, method: Callable[..., Any], **arguments: Any) -> Any:
        async with _deadline(WRITE_S):
            with _translated():
                return await method(**arguments)

    async def close(self) -> None:
        """Nothing is open between two calls."""


class Embedded(Connection):
    """Chroma in this process, in threads: one that writes, and some that read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")

    async def _open(self) -> Any:
        return await self._in(self._writer, WRITE_S, self._opened)

    async def _read(self, method: Callable[..., Any], **arguments: Any) -> Any:
        return await self._in(self._readers, READ_S, partial(method, **arguments))

    async def _write(self, method: Callable[..., Any], **arguments: Any) -> Any:
        return await self._in(self._writer, WRITE_S, partial(method, **arguments))

    async def _in(self, pool: ThreadPoolExecutor, seconds: float, work: Callable[[], R]) -> R:
        if self.damage is not None:
            raise StoreDamaged(self.damage)
        # A call that has begun continues after its deadline; one that waits for a thread is cancelled.
        async with _deadline(seconds):
            return await asyncio.get_running_loop().run_in_executor(pool, _translating, work)

    def _opened(self) -> Any:
        """Open the store. Raises StoreDamaged when its files are gone: Chroma would create an empty one."""
        missing = sqlite_missing(self.folder / DATABASE)
        if missing is not None and was_created(self.folder):
            raise StoreDamaged(f"{missing} from {self.folder}")
        chromadb = _package()
        try:
            with _file_limit(OPEN_INDEXES * _FILES_PER_INDEX):
                client = chromadb.PersistentClient(
                    str(self.folder), settings=chromadb.Settings(anonymized_telemetry=False)
                )
        except BaseException:
            # The next attempt would otherwise get this half-open client.
            chromadb.api.shared_system_client.SharedSystemClient.clear_system_cache()
            raise
        mark_created(self.folder)
        return client

    async def close(self) -> None:
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)


def _translating(work: Callable[[], R]) -> R:
    with _translated():
        return work()


def _package() -> Any:
    """Return Chroma's package, which takes a second and 50 MB to load."""
    import chromadb
    import chromadb.api.shared_system_client

    return chromadb


@contextlib.contextmanager
def _file_limit(files: int) -> Iterator[None]:
    """Lower the process's limit of open files for a moment."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files if soft == resource.RLIM_INFINITY else min(soft, files), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Collection:
    """One collection of a user; all its vectors are of one space."""

    def __init__(self, connection: Connection, handle: Any, space: Space) -> None:
        self._connection = connection
        self._handle = handle
        self.name: str = handle.name
        self.space = space

    async def count(self) -> int:
        found: int = await self._reopening(self._handle.count)
        return found

    async def get(self, **arguments: Any) -> Any:
        return await self._reopening(self._handle.get, **arguments)

    async def query(self, **arguments: Any) -> Any:
        return await self._reopening(self._handle.query, **arguments)

    async def upsert(self, **arguments: Any) -> None:
        await self._write(self._handle.upsert, **arguments)

    async def update(self, **arguments: Any) -> None:
        await self._write(self._handle.update, **arguments)

    async def delete(self, ids: Sequence[str]) -> None:
        await self._write(self._handle.delete, ids=list(ids))

    async def damaged(self) -> bool:
        """Read all vectors; return whether one cannot be read."""
        try:
            async for _ in self.pages(("embeddings",)):
                pass
        except (IndexDamaged, VectorMissing):
            return True
        return False

    async def pages(self, include: Sequence[str]) -> AsyncIterator[Any]:
        """Yield all records in pages. Ids are read first, so a deletion meanwhile shifts no page."""
        with contextlib.suppress(CollectionGone):
            ids = (await self.get(include=[]))["ids"]
            for at in range(0, len(ids), PAGE):
                yield await self.get(ids=ids[at : at + PAGE], include=list(include))

    async def _reopening(self, method: Callable[..., Any], **arguments: Any) -> Any:
        for _ in range(_REOPENINGS):
            try:
                return await self._observed(self._connection.read(method, **arguments))
            except _IndexClosed:
                # Deletes no record; the change makes Chroma load the index.
                await self._write(self._handle.delete, ids=["-"])
        return await self._observed(self._connection.read(method, **arguments))

    async def _write(self, method: Callable[..., Any], **arguments: Any) -> None:
        await self._observed(self._connection.write(method, **arguments))

    async def _observed(self, call: Awaitable[R]) -> R:
        try:
            return await call
        except (IndexDamaged, VectorMissing) as exc:
            self._connection.suspects.add(self._handle.metadata["user_id"], str(exc))
            raise


class Collections:
    """The collections of this memory. shared: other replicas may add and remove collections too."""

    def __init__(self, connection: Connection, prefix: str, *, shared: bool) -> None:
        self._connection = connection
        self._prefix = prefix
        self._shared = shared
        self._handles: OrderedDict[str, Any] = OrderedDict()
        self._spaces: dict[str, Space] = {}
        self._spaces_at = float("-inf")

    async def of(self, user_id: str, space: Space | None = None) -> list[Collection]:
        """Return the collections of a user: all, or that of one space."""
        found = []
        for suffix, one in (await self.spaces() if space is None else {_suffix(space): space}).items():
            if (handle := await self._handle(self._name(user_id, suffix))) is not None:
                found.append(Collection(self._connection, handle, one))
        return found

    async def named(self, user_id: str, name: str) -> Collection | None:
        return next((one for one in await self.of(user_id) if one.name == name), None)

    async def users(self) -> set[str]:
        """Return the users with a collection. This takes half a millisecond for each."""
        return {about["user_id"] for _, about in await self._own()}

    async def of_all_users(self, *, but: Space | None = None) -> AsyncIterator[tuple[str, Collection]]:
        """Yield all collections with their users, without those of the space `but`. Their handles are not cached."""
        for name, about in await self._own():
            if (space := _space(about)) != but and (handle := await self._asked(name)) is not None:
                yield about["user_id"], Collection(self._connection, handle, space)

    async def each(
        self, user_id: str, work: Callable[[Collection], Awaitable[R]], space: Space | None = None
    ) -> list[R]:
        """Return what the work returns for every collection of the user, or for that of one space.

        A collection that another replica has removed is looked up again, and left out if it is gone.
        """
        results = []
        for collection in await self.of(user_id, space):
            try:
                results.append(await work(collection))
            except CollectionGone:
                self._handles.pop(collection.name, None)
                if (handle := await self._handle(collection.name)) is not None:
                    with contextlib.suppress(CollectionGone):
                        results.append(await work(Collection(self._connection, handle, collection.space)))
        return results

    async def upsert(self, user_id: str, space: Space, record: dict[str, Any]) -> None:
        """Write records with vectors of a space, and remove them from the user's other collections."""
        await self.add(user_id, space, record)
        for collection in await self.of(user_id):
            if collection.space != space:
                with contextlib.suppress(CollectionGone):
                    await collection.delete(record["ids"])

    async def add(self, user_id: str, space: Space, record: dict[str, Any]) -> None:
        """Write records with vectors of a space."""
        try:
            await (await self._made(user_id, space)).upsert(**record)
        except CollectionGone:
            # Another replica has removed the collection.
            self._handles.pop(self._name(user_id, _suffix(space)), None)
            await (await self._made(user_id, space)).upsert(**record)

    async def drop(self, name: str, *, empty: bool = False) -> None:
        """Remove a collection. empty: only if it has no records."""
        client = await self._connection.client()
        with contextlib.suppress(CollectionGone):
            handle = await self._connection.write(client.get_collection, name=name, embedding_function=None)
            if not empty or await self._connection.write(handle.count) == 0:
                await self._connection.write(client.delete_collection, name=name)
        self._handles.pop(name, None)

    async def drop_user(self, user_id: str) -> None:
        """Remove all collections of a user."""
        for collection in await self.of(user_id):
            await self.drop(collection.name)

    def forget(self, user_id: str) -> None:
        """Look up the user's collections again at their next use."""
        for suffix in self._spaces:
            self._handles.pop(self._name(user_id, suffix), None)
        self._spaces_at = float("-inf")

    async def ping(self) -> None:
        await self._connection.read((await self._connection.client()).heartbeat)

    async def spaces(self) -> dict[str, Space]:
        """Return the spaces of all vectors, by the suffixes of their collections' names."""
        if not self._spaces or (self._shared and time.monotonic() - self._spaces_at > _SPACES_S):
            at = time.monotonic()
            found = await self._written_spaces()
            if found is None:
                await self._write_spaces({_suffix(one.space): one.space async for _, one in self.of_all_users()})
                found = await self._written_spaces() or {}
            self._spaces, self._spaces_at = found, at
        return self._spaces

    async def _written_spaces(self) -> dict[str, Space] | None:
        """Return the stored list of spaces; None if it may be incomplete."""
        handle = await self._asked(f"{self._prefix}.{_SPACES}")
        if handle is None:
            return None
        written = await self._connection.read(handle.get, include=["metadatas"])
        if _WHOLE not in written["ids"]:
            return None
        about = zip(written["ids"], written["metadatas"], strict=True)
        return {suffix: _space(one) for suffix, one in about if suffix != _WHOLE}

    async def _write_spaces(self, spaces: dict[str, Space]) -> None:
        client = await self._connection.client()
        handle = await self._connection.write(
            client.get_or_create_collection,
            name=f"{self._prefix}.{_SPACES}",
            metadata={"kind": _SPACES},
            embedding_function=None,
        )
        about = [{"embedding_model": one.model, "dimension": one.dimension} for one in spaces.values()]
        ids = [*spaces, _WHOLE]
        whole = {"embedding_model": "", "dimension": 0}
        await self._connection.write(handle.upsert, ids=ids, embeddings=[[1.0]] * len(ids), metadatas=[*about, whole])

    async def _own(self) -> list[tuple[str, Any]]:
        """Return names and metadata of this memory's collections; a server may have others."""
        client, offset = await self._connection.client(), 0
        found = []
        while page := await self._connection.read(client.list_collections, limit=_LISTED, offset=offset):
            offset += len(page)
            found += [
                (one.name, one.metadata)
                for one in page
                if one.name.startswith(f"{self._prefix}.") and (one.metadata or {}).get("kind") == "engrams"
            ]
        return found

    def _name(self, user_id: str, suffix: str) -> str:
        return f"{self._prefix}.{hashlib.sha256(user_id.encode()).hexdigest()[:24]}.{suffix}"

    async def _handle(self, name: str) -> Any | None:
        if (handle := self._handles.get(name)) is not None:
            self._handles.move_to_end(name)
            return handle
        if (handle := await self._asked(name)) is not None:
            self._keep(name, handle)
        return handle

    async def _asked(self, name: str) -> Any | None:
        client = await self._connection.client()
        try:
            return await self._connection.read(client.get_collection, name=name, embedding_function=None)
        except CollectionGone:
            return None

    async def _made(self, user_id: str, space: Space) -> Collection:
        """Return the user's collection of a space; create it if it is missing."""
        suffix = _suffix(space)
        name = self._name(user_id, suffix)
        if (handle := await self._handle(name)) is None:
            if suffix not in await self.spaces():
                # List the space first: a collection of an unlisted space would not be found.
                await self._write_spaces({suffix: space})
                self._spaces = {**self._spaces, suffix: space}
            about = {
                "user_id": user_id,
                "kind": "engrams",
                "embedding_model": space.model,
                "dimension": space.dimension,
            }
            handle = await self._connection.write(
                (await self._connection.client()).get_or_create_collection,
                name=name,
                metadata=about,
                configuration={"hnsw": {"space": "cosine"}},
                embedding_function=None,
            )
            self._keep(name, handle)
        return Collection(self._connection, handle, space)

    def _keep(self, name: str, handle: Any) -> None:
        self._handles[name] = handle
        self._handles.move_to_end(name)
        if len(self._handles) > _HANDLES:
            self._handles.popitem(last=False)


def _space(about: Any) -> Space:
    return Space(about["embedding_model"], about["dimension"])


def _suffix(space: Space) -> str:
    """Return the end of a collection's name, a different one for each model."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", space.model).strip("-")[:80] or "words"
    if slug != space.model:
        slug += f"-{hashlib.sha256(space.model.encode()).hexdigest()[:8]}"
    return f"{slug}-{space.dimension}"
