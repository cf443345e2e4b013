"""The SQLite file with what reward keeps: its tables, how one process opens, writes and backs it up, and what is said
when it is broken.

Every write is an upsert under the response's or the query's id, so that a message handled twice changes nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shared.errors import SettingsError, TransientError
from shared.participant.file_lock import FileLock
from shared.participant.store_marker import mark_created, sqlite_damage, sqlite_missing, sqlite_trouble, was_created

# calls: the tool calls of the turn and their results, as messages; empty where there were none or they are not kept.
# material: whether the model read what is kept nowhere. prompt: what the judge read, as messages; empty where it is not
# kept. judges: what each of several judges said (`JudgeGrade`, `JudgeVerdict`); empty where one judged alone. parts: of
# a vote, as JSON (`votes.Vote`); reward, stars and comment are what comes of them. withdrawn: nothing is left of it; it
# stays as a mark, so that what was cast before it and comes later does not count.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    response_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, session_id TEXT NOT NULL, user_id TEXT NOT NULL,
    respondent TEXT NOT NULL, query TEXT NOT NULL, answer TEXT NOT NULL, messages TEXT NOT NULL,
    config TEXT NOT NULL, intent TEXT NOT NULL, tools INTEGER NOT NULL, time INTEGER NOT NULL,
    calls TEXT NOT NULL DEFAULT '', material INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS responses_session ON responses (session_id);
CREATE INDEX IF NOT EXISTS responses_time ON responses (time, response_id);
CREATE TABLE IF NOT EXISTS pairs (
    query_id TEXT PRIMARY KEY, response_a TEXT NOT NULL, response_b TEXT NOT NULL, winner TEXT NOT NULL,
    forward TEXT, swapped TEXT, score_a REAL, score_b REAL, reason TEXT NOT NULL, config_a TEXT NOT NULL,
    config_b TEXT NOT NULL, session_id TEXT NOT NULL, time INTEGER NOT NULL, judges TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS pairs_time ON pairs (time, query_id);
CREATE TABLE IF NOT EXISTS critiques (
    response_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, session_id TEXT NOT NULL, score INTEGER,
    feedback TEXT NOT NULL, rubric TEXT NOT NULL, time INTEGER NOT NULL, prompt TEXT NOT NULL DEFAULT '',
    judges TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS critiques_time ON critiques (time, response_id);
CREATE TABLE IF NOT EXISTS votes (
    response_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, session_id TEXT NOT NULL, user_id TEXT NOT NULL,
    reward REAL NOT NULL, stars INTEGER, comment TEXT, cast_ms INTEGER NOT NULL, cast_no INTEGER NOT NULL,
    parts TEXT NOT NULL DEFAULT '', withdrawn INTEGER NOT NULL DEFAULT 0);
CREATE VIEW IF NOT EXISTS standing AS SELECT * FROM votes WHERE NOT withdrawn;
CREATE TABLE IF NOT EXISTS consents (user_id TEXT PRIMARY KEY, given INTEGER NOT NULL, time INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS experiments (
    name TEXT PRIMARY KEY, state TEXT NOT NULL, config_a TEXT NOT NULL, config_b TEXT NOT NULL,
    settings_a TEXT NOT NULL, settings_b TEXT NOT NULL, before_a TEXT, before_b TEXT NOT NULL,
    started INTEGER NOT NULL, ended INTEGER);
CREATE TABLE IF NOT EXISTS forgotten (session_id TEXT PRIMARY KEY, at INTEGER NOT NULL);
"""
TABLES = ("responses", "pairs", "critiques", "votes", "consents", "experiments", "forgotten")
KEYS = {"responses": "response_id", "pairs": "query_id", "critiques": "response_id", "votes": "response_id",
        "consents": "user_id", "experiments": "name", "forgotten": "session_id"}  # fmt: skip
_BUSY_SECONDS = 10.0
# The remedy for a damaged database.
REMEDY = "stop the stack: `local2 doctor --repair` puts it aside, `local2 restore` brings a backup back"
# Another process may be just ending.
_LOCK_PATIENCE = 5.0


def taken_back(query_id: str) -> str:
    """How a query stands among what was forgotten; no session can be called so."""
    return f"query {query_id}"


def asked_ms(query_id: str) -> int:
    """When a query was accepted, in ms; 0 when its id does not tell it."""
    asked, _, _ = query_id.partition("-")
    return int(asked) if asked.isdecimal() else 0


class Database:
    """One connection; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError when the file cannot be used, or another process uses it."""
        self._path = path
        self.damage: str | None = None
        try:
            self._hold(path.resolve())
            new = sqlite_missing(path) is not None and not was_created(path)
            if not new and (what := sqlite_trouble(path)):
                self._lock.close()
                raise SettingsError(f"database: {what} (in {path.parent}); {REMEDY}")
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            # what is removed is overwritten, not only unlinked
            self._db.execute("PRAGMA secure_delete=ON")
            self._db.executescript(_SCHEMA)
            mark_created(path)
        except (OSError, sqlite3.Error) as exc:
            remedy = f"; {REMEDY}" if sqlite_damage(exc) else ""
            raise SettingsError(f"database: {path} cannot be used: {exc}{remedy}") from exc

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def overwrite(self) -> None:
        """Leaves nothing on disk of what was removed: the log of pages as they were is emptied into the file."""
        with self._in_the_way():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _hold(self, path: Path) -> None:
        # a file of its own: SQLite's locks and this one must not meet
        self._lock = FileLock(path.with_name(f"{path.name}.lock"))
        if self._lock.take(_LOCK_PATIENCE):
            self._lock.text = f"process {os.getpid()}"
            return
        other = self._lock.text or "unknown"
        self._lock.close()
        raise SettingsError(
            f"database: {path} is in use by another process ({other}); reward has one replica: stop the other one, or "
            "set LOCAL2_REWARD_DATABASE to another file"
        )

    @contextmanager
    def _in_the_way(self) -> Iterator[None]:
        """A full disk or a locked file passes, and a broken file is repaired by somebody: what was to be written is
        tried again, not given up."""
        try:
            yield
        except sqlite3.OperationalError as exc:
            raise TransientError(f"the database cannot be used just now: {exc}") from exc
        except sqlite3.DatabaseError as exc:
            if not sqlite_damage(exc):
                raise
            self.damage = f"database: {self._path} is damaged ({exc}); {REMEDY}"
            raise TransientError(self.damage) from exc

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._in_the_way():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # a full disk may have ended it already
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        with self._in_the_way(), closing(self._db.execute(sql, values)) as found:
            return [dict(row) for row in found]

    def put(self, table: str, row: Mapping[str, Any]) -> bool:
        """An upsert under the table's key; False when its session was deleted."""
        with self._transaction() as db:
            return self._put(db, table, row)

    def _put(self, db: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> bool:
        session = row.get("session_id")
        if table != "forgotten" and session and self._gone(db, session, row["query_id"]):
            return False
        names = list(row)
        # a backup's rows name their columns
        columns = self._columns(db, table)
        if not set(names) <= columns:
            raise ValueError(f"{table} has no {', '.join(sorted(set(names) - columns))}")
        updates = ", ".join(f"{name}=excluded.{name}" for name in names)
        db.execute(
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({KEYS[table]}) DO UPDATE SET {updates}",
            list(row.values()),
        )
        return True

    @staticmethod
    def _columns(db: sqlite3.Connection, table: str) -> set[str]:
        return {info["name"] for info in db.execute(f"PRAGMA table_info({table})")}

    def _gone(self, db: sqlite3.Connection, session_id: str, query_id: str) -> bool:
        """Whether the session was deleted after this query, whose id may be used again, or the query taken back."""
        at = asked_ms(query_id)
        names = (session_id, taken_back(query_id))
        found = db.execute("SELECT 1 FROM forgotten WHERE session_id IN (?, ?) AND at>=?", (*names, at))
        return found.fetchone() is not None

    def gone(self, session_id: str, query_id: str) -> bool:
        """Whether nothing is kept any more of this query, because its session was deleted."""
        with self._in_the_way():
            return self._gone(self._db, session_id, query_id)

    def clear(self) -> int:
        """Removes everything, for a restore that replaces. The number of rows."""
        with self._transaction() as db:
            removed = sum(db.execute(f"DELETE FROM {table}").rowcount for table in TABLES)
        self.overwrite()
        return removed

    def page(self, table: str, after: str, limit: int) -> list[dict[str, Any]]:
        """Rows of a table behind a key, in its order."""
        key = KEYS[_known(table)]
        return self.rows(f"SELECT * FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT ?", after, limit)

    def load(self, table: str, rows: list[dict[str, Any]], *, replace: bool) -> int:
        """Puts rows of a backup back; those that are there stay unless `replace`. The number written."""
        key, written = KEYS[_known(table)], 0
        with self._transaction() as db:
            for row in rows:
                there = db.execute(f"SELECT 1 FROM {table} WHERE {key}=?", (row[key],)).fetchone()
                if replace:
                    # as a whole: a row need not name every column
                    db.execute(f"DELETE FROM {table} WHERE {key}=?", (row[key],))
                if there is None or replace:
                    written += self._put(db, table, row)
        return written


def _known(table: str) -> str:
    if table not in TABLES:
        raise ValueError(f"there is no table {table}")
    return table


def key_of(table: str, row: Mapping[str, Any]) -> str:
    return str(row[KEYS[table]])
