"""The embedded graph: one file in the data folder, used by one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.knowledge.graph import Graph, GraphUnavailable, Row, Run
from shared.errors import SettingsError
from shared.participant.file_lock import FileLock
from shared.participant.kept import note, noted

_LOCK_PATIENCE = 5.0
_THREADS = 2
# What says that a query is wrong: trying it again would not help.
_BUGS = ("Binder exception", "Parser exception", "Catalog exception")
REMEDY = "stop the stack: `local2 doctor --repair` puts it aside, `local2 restore` brings a backup back"


class GraphLocked(SettingsError):
    """Another process uses the graph."""


class LadybugGraph:
    """Open it with `open_ladybug`. Reads and writes have a connection and a thread each: ladybug blocks."""

    def __init__(self, database: Any, connect: Any) -> None:
        self._database = database
        self._writing, self._reading = connect(), connect()
        self._writer, self._reader = ThreadPoolExecutor(1, "graph-write"), ThreadPoolExecutor(1, "graph-read")
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._turn:
            await self._write("BEGIN TRANSACTION", {})
            try:
                yield self._write
                await self._write("COMMIT", {})
            except BaseException:
                # a statement that failed has ended it already
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, self._undone))
                raise

    async def read(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        return await self._in(self._reader, self._reading, query, parameters)

    async def ping(self) -> None:
        await self.read("RETURN 1 AS one", {})

    def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self._writing.close()
        self._reading.close()
        self._database.close()

    async def _write(self, query: str, *parameters: dict[str, Any]) -> list[Row]:
        return await self._in(self._writer, self._writing, query, parameters)

    async def _in(
        self, thread: ThreadPoolExecutor, connection: Any, query: str, parameters: Sequence[dict[str, Any]]
    ) -> list[Row]:
        running = asyncio.get_running_loop().run_in_executor(thread, _rows, connection, query, parameters)
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
    except RuntimeError as exc:
        if str(exc).startswith(_BUGS):
            raise
        raise GraphUnavailable(f"the graph refuses it: {' '.join(str(exc).split())[:300]}") from exc


@asynccontextmanager
async def open_ladybug(path: Path, schema: Sequence[str], buffer_bytes: int) -> AsyncIterator[Graph]:
    """The graph in a file, made when it is not there; waits a little for a process that is just ending.

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
        graph = await asyncio.to_thread(_opened, path, buffer_bytes)
        try:
            async with graph.transaction() as run:
                for statement in schema:
                    await run(statement, {})
            note(path)
            yield graph
        finally:
            await asyncio.to_thread(graph.close)
    finally:
        lock.close()


def _opened(path: Path, buffer_bytes: int) -> LadybugGraph:
    import ladybug

    if noted(path) and not path.exists():
        raise SettingsError(f"the knowledge is gone: {path} was there before; {REMEDY}")
    try:
        database = ladybug.Database(path, buffer_pool_size=buffer_bytes, max_num_threads=_THREADS)
    except (RuntimeError, OSError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise SettingsError(f"the knowledge in {path} cannot be read ({reason}); {REMEDY}") from exc
    return LadybugGraph(database, lambda: ladybug.Connection(database, num_threads=_THREADS))
