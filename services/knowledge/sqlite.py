"""The embedded database: one SQLite file in the data folder, used by one process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from services.knowledge.graph import GraphUnavailable, Row, Run
from services.knowledge.statements import SCHEMA, USERS, Statement
from shared.errors import SettingsError
from shared.participant.disk import no_room
from shared.participant.file_lock import FileLock
from shared.participant.store_marker import (
    mark_created,
    mark_filled,
    sqlite_damage,
    sqlite_missing,
    sqlite_trouble,
    was_created,
)

REMEDY = "stop the stack: `local2 doctor --repair` puts it aside, `local2 restore` brings a backup back"
# Another process may be just ending.
_LOCK_SECONDS = 5.0
_BUSY_SECONDS = 10.0
_BEGIN, _COMMIT, _ROLLBACK = (Statement(word, "") for word in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"))
# Move the write-ahead log, which has pages as they were before a deletion, into the file.
_CHECKPOINT = Statement("PRAGMA wal_checkpoint(TRUNCATE)", "")


class SqliteGraph:
    """Open it with `open_sqlite`. Reads and writes have a thread and a connection each."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.Error."""
        self._path = path
        self._writing, self._reading = (_connected(path) for _ in range(2))
        self._writing.executescript(SCHEMA)
        # A process that died may have left deleted words in the log.
        _rows(self._writing, _CHECKPOINT, ({},))
        self._writer, self._reader = ThreadPoolExecutor(1, "graph-write"), ThreadPoolExecutor(1, "graph-read")
        self._turn = asyncio.Lock()
        self._must_checkpoint = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._turn:
            self._check_room()
            await self._write(_BEGIN, {})
            try:
                yield self._write
                await self._write(_COMMIT, {})
            except BaseException:
                await asyncio.shield(self._rolled_back())
                raise
            mark_filled(self._path)
            if self._must_checkpoint:
                await self._checkpoint()

    async def read(self, statement: Statement, *parameters: dict[str, Any]) -> list[Row]:
        return await self._in(self._reader, self._reading, statement, parameters)

    async def ping(self) -> None:
        self._check_room()
        await self.read(USERS, {})
        if self._must_checkpoint:
            async with self._turn:
                await self._checkpoint()

    def removed(self) -> None:
        self._must_checkpoint = True

    def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self._reading.close()
        self._writing.close()

    async def _checkpoint(self) -> None:
        """Try again at the next ping if a reader uses the log, or the disk is full."""
        with suppress(GraphUnavailable):
            (row,) = await self._write(_CHECKPOINT, {})
            self._must_checkpoint = bool(row["busy"])

    async def _write(self, statement: Statement, *parameters: dict[str, Any]) -> list[Row]:
        return await self._in(self._writer, self._writing, statement, parameters)

    async def _rolled_back(self) -> None:
        # A full disk may have ended the transaction already.
        if self._writing.in_transaction:
            await self._write(_ROLLBACK, {})

    async def _in(
        self,
        thread: ThreadPoolExecutor,
        connection: sqlite3.Connection,
        statement: Statement,
        parameters: Sequence[dict[str, Any]],
    ) -> list[Row]:
        running = asyncio.get_running_loop().run_in_executor(thread, _rows, connection, statement, parameters)
        try:
            # A cancelled caller must not leave a statement behind that the next one meets.
            return await asyncio.shield(running)
        except sqlite3.OperationalError as exc:
            raise GraphUnavailable(f"the database of knowledge cannot be used now: {exc}") from exc
        except sqlite3.DatabaseError as exc:
            if not sqlite_damage(exc):
                raise
            raise GraphUnavailable(f"the database of knowledge is damaged ({exc}); {REMEDY}") from exc

    def _check_room(self) -> None:
        """Raises GraphUnavailable."""
        if (reason := no_room(self._path.parent)) is not None:
            raise GraphUnavailable(reason)


@asynccontextmanager
async def open_sqlite(path: Path) -> AsyncIterator[SqliteGraph]:
    """Open the database in a file, and create it if it is new; wait a little for a process that is just ending.

    Raises SettingsError if another process uses it, or if it is damaged or missing.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        if not await lock.taken(_LOCK_SECONDS):
            raise SettingsError(
                f"the knowledge in {path} is in use by another process ({lock.text or 'unknown'}); the embedded "
                "database has one replica: stop the other one, or name a graph server in LOCAL2_KNOWLEDGE_STORE"
            )
        lock.text = f"process {os.getpid()}"
        graph = await asyncio.to_thread(_opened, path)
        try:
            yield graph
        finally:
            await asyncio.to_thread(graph.close)
    finally:
        lock.close()


def _opened(path: Path) -> SqliteGraph:
    """Raises SettingsError."""
    new = sqlite_missing(path) is not None and not was_created(path)
    if not new and (what := sqlite_trouble(path)):
        raise SettingsError(f"the knowledge cannot be read: {what} (in {path.parent}); {REMEDY}")
    try:
        graph = SqliteGraph(path)
        mark_created(path)
        return graph
    except (OSError, sqlite3.Error) as exc:
        remedy = f"; {REMEDY}" if sqlite_damage(exc) else ""
        raise SettingsError(f"the knowledge in {path} cannot be used: {exc}{remedy}") from exc


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    # Overwrite deleted content with zeros.
    connection.execute("PRAGMA secure_delete = ON")
    return connection


def _rows(connection: sqlite3.Connection, statement: Statement, parameters: Sequence[dict[str, Any]]) -> list[Row]:
    return [dict(row) for one in parameters for row in connection.execute(statement.sql, _plain(one)).fetchall()]


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with lists as JSON arrays."""
    return {name: orjson.dumps(value).decode() if isinstance(value, list) else value
            for name, value in parameters.items()}  # fmt: skip
