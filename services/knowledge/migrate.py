"""Migration of the embedded graph of older releases, a LadybugDB file, to the SQLite database."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

from services.knowledge.claims import FIELDS
from services.knowledge.graph import Row
from services.knowledge.sqlite import SqliteGraph
from services.knowledge.statements import ADD_CLAIM, ADD_SOURCE, Statement
from shared.errors import SettingsError
from shared.extras import required_by
from shared.participant.file_lock import FileLock
from shared.telemetry.logging import get_logger

log = get_logger()

# The endings of the files' names that belong to a graph: its data, its log, and the notes of older releases beside it.
_PARTS = ("", ".wal", ".shadow", ".made", ".removed")
_BUFFER_BYTES = 256 * 1024 * 1024
_LOCK_SECONDS = 5.0
# Errors of ladybug, and of the C++ library below it.
_ERRORS = (RuntimeError, OSError, MemoryError, ValueError, LookupError, ArithmeticError)

_USERS = "MATCH (u:KnowledgeUser) RETURN u.id AS user, u.version AS version"
_MARKS = "MATCH (g:KnowledgeGone) RETURN g.id AS mark, g.at AS at"
_SOURCES = (
    "MATCH (u:KnowledgeUser {id: $user})-[:HEARD]->(s:KnowledgeSource) RETURN u.id AS user, s.source AS source, "
    "s.session_id AS session, s.said AS said, s.settled AS settled, s.query AS query, s.answer AS answer"
)
_CLAIMS = (
    "MATCH (u:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName)-[r:SAID]->(:KnowledgeName) RETURN u.id AS user, "
    + ", ".join(f"r.{name} AS {name}" for name in FIELDS)
)


def _if_new(statement: Statement) -> Statement:
    return Statement(statement.sql.replace("INSERT INTO", "INSERT OR IGNORE INTO", 1), "")


_ADD_USER = Statement(
    "INSERT INTO users VALUES ($user, $version) ON CONFLICT DO UPDATE SET version = max(version, $version) + 1", ""
)
_ADD_MARK = Statement("INSERT OR IGNORE INTO forgotten VALUES ($mark, $at)", "")
_ADD_SUBJECT = Statement("INSERT OR IGNORE INTO names VALUES ($user, $subject_key)", "")
_ADD_OBJECT = Statement("INSERT OR IGNORE INTO names VALUES ($user, $object_key)", "")


async def migrate(old: Path, database: SqliteGraph) -> None:
    """Add the graph of an older release to the database, then move its files to a backup folder beside it.

    Nothing happens if there is no such graph. A crash at any point is safe: the graph's own files are only read, all of
    it is added in one transaction, and what the database has already is skipped.
    Raises SettingsError if ladybug is not installed, or if the graph cannot be read or is in use.
    """
    if not await asyncio.to_thread(old.exists):
        return
    with required_by(f"the knowledge of an older release in {old}", "ladybug"):
        import ladybug  # noqa: F401
    lock_file = old.with_name(f"{old.name}.lock")
    lock = FileLock(lock_file)
    copy = old.with_name(f"{old.name}.migrating")
    try:
        if not await lock.taken(_LOCK_SECONDS):
            raise SettingsError(f"the knowledge in {old} is in use by another process: stop it, and start again")
        try:
            await asyncio.to_thread(_copy, old, copy)
            claims = await _add(copy / old.name, database)
        except _ERRORS as exc:
            reason = " ".join(str(exc).split())[:300]
            raise SettingsError(
                f"the knowledge of an older release in {old} cannot be read ({reason}); to start without it, move the "
                "file to another folder, then restore a backup: `local2 restore --merge`"
            ) from exc
        finally:
            await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)
        log.info("knowledge.graph_migrated", claims=claims, backup=str(_move_to_backup(old)))
        lock_file.unlink()
    finally:
        lock.close()


async def _add(old: Path, database: SqliteGraph) -> int:
    """Add everything in a graph to the database; return the number of claims read. Raises what is in `_ERRORS`."""
    claims = 0
    reader = await asyncio.to_thread(_Reader, old)
    try:
        async with database.transaction() as run:
            users = await asyncio.to_thread(reader.rows, _USERS)
            for user in users:
                sources = await asyncio.to_thread(reader.rows, _SOURCES, user)
                found = await asyncio.to_thread(reader.rows, _CLAIMS, user)
                await run(_if_new(ADD_SOURCE), *sources)
                for statement in (_ADD_SUBJECT, _ADD_OBJECT, _if_new(ADD_CLAIM)):
                    await run(statement, *found)
                claims += len(found)
            await run(_ADD_USER, *users)
            await run(_ADD_MARK, *await asyncio.to_thread(reader.rows, _MARKS))
    finally:
        await asyncio.to_thread(reader.close)
    return claims


class _Reader:
    def __init__(self, path: Path) -> None:
        import ladybug

        self._database = ladybug.Database(path, buffer_pool_size=_BUFFER_BYTES, max_num_threads=1)
        self._connection = ladybug.Connection(self._database, num_threads=1)

    def rows(self, query: str, user: Row | None = None) -> list[dict[str, Any]]:
        result = self._connection.execute(query, {"user": user["user"]} if user else {})
        try:
            # A field without a value is null in the graph.
            return [{name: "" if value is None else value for name, value in row.items()}
                    for row in result.rows_as_dict()]  # fmt: skip
        finally:
            result.close()

    def close(self) -> None:
        self._connection.close()
        self._database.close()


def _copy(old: Path, folder: Path) -> None:
    """Copy the graph: opening it changes its files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for part in _parts(old):
        shutil.copyfile(part, folder / part.name)


def _move_to_backup(old: Path) -> Path:
    """Move the files of a graph to a new folder; return the folder."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (old.with_name(f"{old.name}.backup-{stamp}{again}") for again in ("", *(f"-{n}" for n in range(2, 100))))
    folder = next(name for name in names if not name.exists())
    folder.mkdir(mode=0o700)
    for part in _parts(old):
        part.rename(folder / part.name)
    return folder


def _parts(old: Path) -> list[Path]:
    return [part for end in _PARTS if (part := old.with_name(old.name + end)).exists()]
