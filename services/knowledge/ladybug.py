"""The embedded graph: one file in the data folder, used by one process."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.knowledge.graph import Graph, GraphUnavailable, Row, Run
from shared.errors import SettingsError
from shared.participant.background import supervised_tasks
from shared.participant.disk import no_room
from shared.participant.file_lock import FileLock
from shared.participant.store_marker import mark_created, mark_filled, was_created, was_filled
from shared.telemetry.logging import get_logger

log = get_logger()

# Seconds from a removal, in which others of its kind come. After the file was written anew, so many times as long
# passes before it is again.
_GATHER, _REST = 2.0, 20.0
_LOCK_PATIENCE = 5.0
# So many times its size a file takes in memory at most while it is written anew.
_ROOM = 8
_THREADS = 2
# What ladybug raises, and C++ below it, for a file that is none, and for want of memory or disk.
_FAULTS = (RuntimeError, OSError, MemoryError, ValueError, LookupError, ArithmeticError)
# What says that a query is wrong: trying it again would not help.
_BUGS = ("Binder exception", "Parser exception", "Catalog exception")
REMEDY = "stop the stack: `local2 doctor --repair` puts it aside, `local2 restore` brings a backup back"


class GraphLocked(SettingsError):
    """Another process uses the graph."""


class LadybugGraph:
    """Open it with `open_ladybug`. Reads and writes have a connection and a thread each: ladybug blocks.

    database: opens a file, with room for at least so many bytes of it in memory. Raises what is in `_FAULTS`.
    """

    def __init__(self, path: Path, database: Callable[[Path, int], Any]) -> None:
        self._path = path
        self._open = database
        self._tidy()
        self._connect()
        self._removed = asyncio.Event()
        if self._due.exists():
            self._removed.set()
        self._writer, self._reader = ThreadPoolExecutor(1, "graph-write"), ThreadPoolExecutor(1, "graph-read")
        self._turn = asyncio.Lock()
        self._something = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._turn:
            self._has_room()
            await self._write("BEGIN TRANSACTION", {})
            try:
                yield self._write
                await self._write("COMMIT", {})
                self._note_filled()
            except BaseException:
                # a statement that failed has ended it already
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, self._undone))
                raise

    def _has_room(self) -> None:
        """Raises GraphUnavailable."""
        if (reason := no_room(self._path.parent)) is not None:
            raise GraphUnavailable(reason)

    def _note_filled(self) -> None:
        """What is in it is missed from now on."""
        if not self._something:
            mark_filled(self._path)
            self._something = True

    async def prepare(self, schema: Sequence[str]) -> None:
        """Makes the tables. Raises SettingsError when nothing is in it where something was."""
        for statement in schema:
            await self._write(statement, {})
        mark_created(self._path)
        if await self._write("MATCH (n) RETURN 1 AS one LIMIT 1", {}):
            self._note_filled()
        elif was_filled(self._path):
            raise SettingsError(f"the knowledge is gone: {self._path} is empty and was not; {REMEDY}")

    async def read(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        return await self._in(self._reader, lambda: self._reading, query, parameters)

    async def ping(self) -> None:
        self._has_room()
        await self.read("RETURN 1 AS one", {})

    def removed(self) -> None:
        # so that it is done by the next process, if this one dies
        self._due.touch()
        self._removed.set()

    async def overwriting(self) -> None:
        """Writes the file anew when something was removed from it: ladybug leaves the words of what is deleted where
        they are. For a small part of the time, and until cancelled."""
        while True:
            await self._removed.wait()
            await asyncio.sleep(_GATHER)
            began = time.monotonic()
            try:
                await self.renew()
            except GraphUnavailable as exc:
                log.warning("knowledge.overwriting_waits", reason=str(exc))
                self._removed.set()
            await asyncio.sleep(_REST * (time.monotonic() - began))

    async def renew(self) -> None:
        """Raises GraphUnavailable; what was there is there then. Reads go on meanwhile, but for two moments."""
        async with self._turn:
            self._removed.clear()
            self._has_room()
            copied = False
            try:
                await self._alone(self._with_room)
                await self._in_turn(self._copy)
                copied = True
            finally:
                await self._alone(lambda: self._replace(copied))

    async def _alone(self, work: Callable[[], None]) -> None:
        """While nobody reads."""
        nobody, done = threading.Event(), threading.Event()

        def wait() -> None:
            nobody.set()
            done.wait()

        def alone() -> None:
            try:
                nobody.wait()
                work()
            finally:
                done.set()

        waiting = asyncio.get_running_loop().run_in_executor(self._reader, wait)
        try:
            await self._in_turn(alone)
        finally:
            await asyncio.shield(waiting)

    async def _in_turn(self, work: Callable[[], None]) -> None:
        def told() -> None:
            try:
                work()
            except _FAULTS as exc:
                raise GraphUnavailable(f"the graph's file cannot be written anew: {exc}") from exc

        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, told))

    def _with_room(self) -> None:
        # ladybug holds the longest column of a table in memory to copy it
        self._disconnect()
        self._connect(_ROOM * self._path.stat().st_size)

    def _copy(self) -> None:
        """Read from this file, and written to another one; a crash leaves the one or the other."""
        self._tidy()
        _run(self._database, f"EXPORT DATABASE '{_quoted(self._export)}' (format=\"parquet\")")
        fresh = self._open(self._fresh, _ROOM * self._path.stat().st_size)
        try:
            _run(fresh, f"IMPORT DATABASE '{_quoted(self._export)}'", "CHECKPOINT")
        finally:
            fresh.close()

    def _replace(self, copied: bool) -> None:
        self._disconnect()
        try:
            if copied:
                if self._path.with_name(f"{self._path.name}.wal").exists():
                    # it would be taken for that of the new one
                    raise OSError("its log is not empty")
                self._fresh.replace(self._path)
        finally:
            self._tidy()
            self._connect()
        if copied:
            # when nothing is left to do
            self._due.unlink(missing_ok=True)

    @property
    def _due(self) -> Path:
        return self._path.with_name(f"{self._path.name}.removed")

    @property
    def _export(self) -> Path:
        return self._path.with_name(f"{self._path.name}.export")

    @property
    def _fresh(self) -> Path:
        return self._path.with_name(f"{self._path.name}.new")

    def _tidy(self) -> None:
        """Nothing is left of a renewal that was not finished."""
        shutil.rmtree(self._export, ignore_errors=True)
        for end in ("", ".wal"):
            self._fresh.with_name(f"{self._fresh.name}{end}").unlink(missing_ok=True)

    def _connect(self, room: int = 0) -> None:
        import ladybug

        self._database = self._open(self._path, room)
        self._writing, self._reading = (ladybug.Connection(self._database, num_threads=_THREADS) for _ in range(2))

    def _disconnect(self) -> None:
        self._writing.close()
        self._reading.close()
        self._database.close()

    def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self._disconnect()
        self._tidy()

    async def _write(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        return await self._in(self._writer, lambda: self._writing, query, parameters)

    async def _in(
        self,
        thread: ThreadPoolExecutor,
        connection: Callable[[], Any],
        query: str,
        parameters: Sequence[dict[str, Any]],
    ) -> list[Row]:
        # the connection of the moment in which it runs: the file may have been written anew meanwhile
        running = asyncio.get_running_loop().run_in_executor(thread, lambda: _rows(connection(), query, parameters))
        # whoever is cancelled must not leave a query that another one runs into
        return await asyncio.shield(running)

    def _undone(self) -> None:
        try:
            _rows(self._writing, "ROLLBACK", ({},))
        except GraphUnavailable:
            return


def _rows(connection: Any, query: str, parameters: Sequence[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    try:
        for one in parameters:
            result = connection.execute(query, one)
            try:
                rows += result.rows_as_dict()
            finally:
                result.close()
        return rows
    except _FAULTS as exc:
        if isinstance(exc, UnicodeError) or str(exc).startswith(_BUGS):
            raise
        raise GraphUnavailable(f"the graph refuses it: {' '.join(str(exc).split())[:300]}") from exc


def _run(database: Any, *queries: str) -> None:
    """By one thread: each holds a part of its own in memory."""
    import ladybug

    connection = ladybug.Connection(database, num_threads=1)
    try:
        for query in queries:
            connection.execute(query).close()
    finally:
        connection.close()


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace("'", "\\'")


@asynccontextmanager
async def open_ladybug(
    path: Path, schema: Sequence[str], buffer_bytes: int, *, whole: bool = True
) -> AsyncIterator[Graph]:
    """The graph in a file, made when it is not there; waits a little for a process that is just ending.

    whole: also its log must be; else what stands in that before the damage is enough.
    Raises SettingsError when another process uses it, or it is no graph any more.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        if not await lock.taken(_LOCK_PATIENCE):
            raise GraphLocked(
                f"the knowledge in {path} is in use by another process ({lock.text or 'unknown'}); an embedded graph "
                "has one replica: stop the other one, or name a server in LOCAL2_KNOWLEDGE_STORE"
            )
        lock.text = f"process {os.getpid()}"
        graph = await asyncio.to_thread(_opened, path, buffer_bytes, whole)
        try:
            await _ready(graph, schema, path)
            async with supervised_tasks(overwriting=graph.overwriting):
                yield graph
        finally:
            await asyncio.to_thread(graph.close)
    finally:
        lock.close()


def _opened(path: Path, buffer_bytes: int, whole: bool) -> LadybugGraph:
    import ladybug

    if was_created(path) and not path.exists():
        raise SettingsError(f"the knowledge is gone: {path} was there before; {REMEDY}")
    try:
        return LadybugGraph(
            path,
            lambda file, room: ladybug.Database(
                file,
                buffer_pool_size=max(buffer_bytes, room),
                max_num_threads=_THREADS,
                throw_on_wal_replay_failure=whole,
            ),
        )
    except _FAULTS as exc:
        raise _unreadable(path, exc) from exc


async def _ready(graph: LadybugGraph, schema: Sequence[str], path: Path) -> None:
    try:
        await graph.prepare(schema)
    except GraphUnavailable as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, exc: BaseException) -> SettingsError:
    reason = " ".join(str(exc).split())[:300]
    return SettingsError(f"the knowledge in {path} cannot be read ({reason}); {REMEDY}")
