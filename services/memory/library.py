"""A user's files and documents: one folder per user with a small database, and the files by their content's hash.

The database has a row for each file, the chunks of its text, their vectors and the index of their words. So adding,
changing and removing a file is one transaction each. Each user has a folder; deleting a user removes it. All methods
block: call them in threads. Several processes of one host may use a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import sqlite3
import time
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from services.memory.blobs import Blobs, BlobsAway, FolderBlobs
from services.memory.chunks import Chunk
from services.memory.fts import overwritten
from services.memory.incoming import remove_abandoned
from services.memory.passages import FILE_COLUMNS, File, Passage, State, passages
from services.memory.text import tokens
from services.memory.vectors import Space, Vector
from shared.errors import Local2Error
from shared.participant.retention import Census
from shared.participant.store_marker import mark_created, remove_marker, sqlite_damage, sqlite_missing, was_created
from shared.telemetry.logging import get_logger

log = get_logger()

VERSION = 1
# Seconds that a writer waits for another one.
_PATIENCE = 20.0
# Unfinished and unreferenced files are removed after this time (seconds).
_ORPHANED = 3_600.0

_DATABASE = "library.db"
# Names of users' folders. `local2 doctor --repair` gives a damaged folder another name.
_OWNER = re.compile(r"[0-9a-f]{32}")

# Words of removed files in a database (its application_id): none; perhaps some; they are being overwritten.
_CLEAN, _REMOVED, _MERGING = 0, 1, 2

# SQLite's errors for a full disk: no room for a page, for its log, for a file.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)

_SCHEMA = f"""
CREATE TABLE owner(user_id TEXT NOT NULL);
CREATE TABLE file(n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    type TEXT NOT NULL, size INTEGER NOT NULL, added INTEGER NOT NULL, expires INTEGER, state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '', title TEXT NOT NULL DEFAULT '', chars INTEGER NOT NULL DEFAULT 0);
CREATE TABLE chunk(n INTEGER PRIMARY KEY, file INTEGER NOT NULL, place TEXT NOT NULL, text TEXT NOT NULL,
    words TEXT NOT NULL, vector BLOB, model TEXT NOT NULL DEFAULT '');
CREATE INDEX chunk_file ON chunk(file);
CREATE VIRTUAL TABLE said USING fts5(words, content='chunk', content_rowid='n',
    tokenize='unicode61 remove_diacritics 0');
PRAGMA user_version = {VERSION};
"""
_ADD = "INSERT INTO file(id, hash, name, type, size, added, expires, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Bare:
    """A chunk without a vector of the model in use, with the text to embed."""

    n: int
    title: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Limits:
    """The most files and bytes of one user."""

    files: int
    bytes: int


class LibraryFull(Exception):
    """The user has reached a limit; the text names it."""


class LibraryDamaged(Local2Error):
    """A user's database is broken, empty or missing. Only a backup helps."""

    def __init__(self, database: Path, reason: str) -> None:
        super().__init__(
            f"the documents of a user are damaged: {reason} (in {database.parent}). Stop the stack, put them aside "
            "with `local2 doctor --repair`, start the stack and restore the backup: `local2 restore --merge FILE`"
        )


class Library:
    """The files of all users. root: the folder of all users. blobs: the store of the files' content; None: `root`.

    unclean: users with removed files whose words may still be on the disk, as far as this process has found them. Every
    method for one user raises LibraryDamaged.
    """

    def __init__(self, root: Path, blobs: Blobs | None = None) -> None:
        self._root = root
        self._blobs = blobs or FolderBlobs(root)
        self.incoming = root / "incoming"
        self.unclean: set[str] = set()
        # Errors by the user's folder. An entry stays: other parts of a damaged database may be readable.
        self._damaged: dict[str, LibraryDamaged] = {}
        for folder in (root, self.incoming):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def damage(self) -> str | None:
        """Return a sentence about damaged databases that this process has found; None if it has found none."""
        if not self._damaged:
            return None
        more = len(self._damaged) - 1
        return f"{next(iter(self._damaged.values()))}" + (f" (so are those of {more} more)" if more else "")

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────

    def fresh(self) -> Path:
        """Return a path for a file that will be received (see `incoming`)."""
        return self.incoming / uuid.uuid4().hex

    def add(
        self,
        user_id: str,
        path: Path,
        name: str,
        mime: str,
        digest: str,
        *,
        read: bool,
        expires: int | None,
        most: Limits,
        added: int | None = None,
    ) -> tuple[File, bool]:
        """Add a complete file; return its record, and whether it is new. Raises LibraryFull, BlobsAway.

        read: whether the file has text to be read. A file with the same content keeps its name.
        """
        size, owner = path.stat().st_size, self._owner(user_id)
        # Store the content also of a known file: it may have been lost. Before the transaction, because a bucket is
        # slow. A refused file is removed below, and `tidy` removes the remains of a crash.
        with self._writing(user_id, make=True):
            # `tidy` reads only folders with a database: create it.
            pass
        self._blobs.keep(path, owner, digest)
        with self._writing(user_id, make=True) as db:
            known = self._by(db, "hash", digest)
            if known is None:
                if (full := _full(db, size, most)) is not None:
                    self._blobs.drop(owner, digest)
                    raise LibraryFull(full)
            elif known.expires is not None and (expires is None or expires > known.expires):
                db.execute("UPDATE file SET expires = ? WHERE n = ?", (expires, known.n))
            if not self._blobs.there(owner, digest):
                raise BlobsAway("the same file was removed while it came: add it again")
            if known is None:
                state: State = "reading" if read else "ready"
                came = _now() if added is None else added
                row = (file_id(user_id, digest), digest, name, mime, size, came, expires, state)
                db.execute(_ADD, row)
            elif known.state == "failed":
                # The user tries again.
                db.execute("UPDATE file SET state = 'reading', reason = '' WHERE n = ?", (known.n,))
            there = self._by(db, "hash", digest)
            assert there is not None
            return there, known is None

    def file(self, user_id: str, id: str) -> File | None:
        with self._reading(user_id) as db:
            return self._by(db, "id", id) if db else None

    def files(self, user_id: str, limit: int, before: int | None = None, name: str = "") -> list[File]:
        """Return files, newest first. before: the number of the last file of the page before. name: a part of the
        file's name, in any case; empty: all files."""
        with self._named(user_id) as db:
            if db is None:
                return []
            sql = f"SELECT {FILE_COLUMNS} FROM file WHERE n < ? AND named(name, ?) ORDER BY n DESC LIMIT ?"
            return [File(*row) for row in db.execute(sql, (before or 2**62, _folded(name), limit))]

    def count(self, user_id: str, name: str = "") -> int:
        """Return the number of a user's files; `name` as for `files`."""
        with self._named(user_id) as db:
            sql = "SELECT count(*) FROM file WHERE named(name, ?)"
            return int(db.execute(sql, (_folded(name),)).fetchone()[0]) if db else 0

    @contextlib.contextmanager
    def _named(self, user_id: str) -> Iterator[Any]:
        """Read with the SQL function `named`: SQLite's own LIKE ignores case in ASCII only."""
        with self._reading(user_id) as db:
            if db is not None:
                db.create_function("named", 2, lambda name, part: part in _folded(name), deterministic=True)
            yield db

    def content(self, user_id: str, file: File) -> Path | bytes:
        """Return the path of a file's content, or the content. Raises FileNotFoundError, BlobsAway."""
        return self._blobs.content(self._owner(user_id), file.hash)

    def remove(self, user_id: str, id: str) -> bool:
        """Remove a file with its text, vectors and words; return False if there is none.

        Raises BlobsAway; then the file still exists.
        """
        with self._writing(user_id) as db:
            found = self._by(db, "id", id) if db else None
            if found is None:
                return False
            self._drop_chunks(db, found.n)
            db.execute("DELETE FROM file WHERE n = ?", (found.n,))
            self._blobs.drop(self._owner(user_id), found.hash)
        self.unclean.add(user_id)
        return True

    def remove_user(self, user_id: str) -> int:
        """Remove everything of a user, also of a damaged library; return the number of files.

        Raises BlobsAway; then the files are still there.
        """
        owner = self._owner(user_id)
        try:
            count = self.count(user_id)
        except LibraryDamaged:
            count = sum(1 for _ in self._blobs.left(owner))
        self._blobs.drop_all(owner)
        # First: a marker without a database is damage.
        remove_marker(self._folder(user_id) / _DATABASE)
        shutil.rmtree(self._folder(user_id), ignore_errors=True)
        self._damaged.pop(owner, None)
        return count

    def users(self) -> list[str]:
        """Return the users who have files, in the order of their ids. Raises LibraryDamaged if one cannot be read."""
        return sorted(filter(None, map(self._user_with_files, self._owners())))

    def readable_users(self) -> list[str]:
        """Return the users who have files, without those whose libraries cannot be read."""
        found = list[str]()
        for owner in self._owners():
            with self._spared(owner):
                found += filter(None, [self._user_with_files(owner)])
        return sorted(found)

    def _user_with_files(self, owner: str) -> str | None:
        with self._database(owner) as db:
            row = db and db.execute("SELECT user_id FROM owner WHERE EXISTS (SELECT 1 FROM file)").fetchone()
            return str(row[0]) if row else None

    def older(self, user_id: str, before: int) -> list[str]:
        """Return the ids of files that were added before a time (ms), oldest first; none of a damaged library."""
        with self._spared(self._owner(user_id)), self._reading(user_id) as db:
            sql = "SELECT id FROM file WHERE added < ? ORDER BY added"
            return [row[0] for row in db.execute(sql, (before,))] if db else []
        return []

    def census(self, before: int) -> Census:
        """Return the census of all users, without those with damaged libraries."""
        found = [Census(0, None, 0)]
        for owner in self._owners():
            with self._spared(owner), self._database(owner) as db:
                if db is not None:
                    sql = "SELECT count(*), min(added), count(*) FILTER (WHERE added < ?) FROM file"
                    found.append(Census(*db.execute(sql, (before,)).fetchone()))
        oldest = min((one.oldest for one in found if one.oldest is not None), default=None)
        return Census(sum(one.kept for one in found), oldest, sum(one.due for one in found))

    def overwrite(self, user_id: str) -> bool:
        """Overwrite a part of the removed files' words; return whether more calls are needed."""
        with self._writing(user_id) as db:
            state = _state(db) if db else _CLEAN
            if state == _CLEAN:
                self.unclean.discard(user_id)
                return False
            done = overwritten(db, "said", begin=state == _REMOVED)
            db.execute(f"PRAGMA application_id = {_CLEAN if done else _MERGING}")
            return True

    def unread(self, user_id: str) -> list[str]:
        """Return the ids of files whose text is still to be read."""
        with self._reading(user_id) as db:
            return [row[0] for row in db.execute("SELECT id FROM file WHERE state = 'reading'")] if db else []

    def tidy(self, now: float | None = None) -> None:
        """Remove expired files and the remains of dead processes: incoming files at once, other files after an hour.
        Find the users who are `unclean`."""
        now = time.time() if now is None else now
        for path in self.incoming.iterdir():
            remove_abandoned(path)
        for owner in self._owners():
            with self._spared(owner):
                self._tidy(owner, now)

    def _tidy(self, owner: str, now: float) -> None:
        with self._database(owner) as db:
            if db is None:
                return
            # Libraries of older releases have no marker.
            mark_created(self._root / owner / _DATABASE)
            (user_id,) = db.execute("SELECT user_id FROM owner").fetchone()
            over = db.execute("SELECT id FROM file WHERE expires < ?", (int(now * 1000),)).fetchall()
            known = {row[0] for row in db.execute("SELECT hash FROM file")}
            if _state(db) != _CLEAN:
                self.unclean.add(user_id)
        for (id,) in over:
            self.remove(user_id, id)
        for digest, came in list(self._blobs.left(owner)):
            if digest not in known and now - came > _ORPHANED:
                self._blobs.drop(owner, digest)

    # ── their text ───────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, user_id: str, id: str, title: str, chunks: Sequence[Chunk], note: str = "") -> None:
        """Replace the text of a file. A file that was removed meanwhile stays removed."""
        with self._writing(user_id) as db:
            file = self._by(db, "id", id) if db else None
            if file is None:
                return
            self._drop_chunks(db, file.n)
            for chunk in chunks:
                words = " ".join(tokens(f"{title}\n{chunk.place}\n{chunk.text}"))
                row = (file.n, chunk.place, chunk.text, words)
                n = db.execute("INSERT INTO chunk(file, place, text, words) VALUES (?, ?, ?, ?)", row).lastrowid
                db.execute("INSERT INTO said(rowid, words) VALUES (?, ?)", (n, words))
            chars = sum(len(chunk.text) for chunk in chunks)
            changed = "UPDATE file SET state = 'ready', reason = ?, title = ?, chars = ? WHERE n = ?"
            db.execute(changed, (note, title, chars, file.n))

    def fail(self, user_id: str, id: str, reason: str) -> None:
        with self._writing(user_id) as db:
            if db:
                db.execute("UPDATE file SET state = 'failed', reason = ? WHERE id = ?", (reason, id))

    def text(self, user_id: str, file: File) -> list[Chunk]:
        with self._reading(user_id) as db:
            found = db.execute("SELECT place, text FROM chunk WHERE file = ? ORDER BY n", (file.n,)) if db else ()
            return [Chunk(*row) for row in found]

    def bare(self, user_id: str, space: Space, limit: int, after: int = 0) -> list[Bare]:
        """Return chunks after the number `after` that have no vector of this space."""
        with self._reading(user_id) as db:
            if db is None:
                return []
            sql = """SELECT chunk.n, coalesce(nullif(file.title, ''), file.name), place, text FROM chunk
                JOIN file ON file.n = chunk.file
                WHERE chunk.n > ? AND (model != ? OR length(vector) != ?) ORDER BY chunk.n LIMIT ?"""
            found = db.execute(sql, (after, space.model, 2 * space.dimension, limit))
            return [Bare(n, title, Chunk(place, text)) for n, title, place, text in found]

    def place(self, user_id: str, placed: Iterable[tuple[int, Vector]]) -> None:
        """Store the vectors of chunks."""
        rows = [(np.asarray(vector.values, dtype=np.float16).tobytes(), vector.model, n) for n, vector in placed]
        with self._writing(user_id) as db:
            if db:
                db.executemany("UPDATE chunk SET vector = ?, model = ? WHERE n = ?", rows)

    def search(
        self, user_id: str, query: str, vector: Vector | None, limit: int, only: Sequence[str] | None = None
    ) -> list[Passage]:
        """Return the passages for a query as `passages` does."""
        with self._reading(user_id) as db:
            return passages(db, query, vector, limit, only) if db else []

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _spared(self, owner: str) -> Iterator[None]:
        """Skip a library that cannot be read, and leave its files: the work for other users continues."""
        try:
            yield
        except (sqlite3.Error, OSError, LibraryDamaged) as exc:
            log.warning("documents.left_out", owner=owner, reason=str(exc))

    def _owner(self, user_id: str) -> str:
        return hashlib.sha256(user_id.encode()).hexdigest()[:32]

    def _owners(self) -> list[str]:
        """Return the names of all users' folders."""
        return [path.name for path in self._root.iterdir() if _OWNER.fullmatch(path.name)]

    def _folder(self, user_id: str) -> Path:
        return self._root / self._owner(user_id)

    @contextlib.contextmanager
    def _database(self, owner: str, *, make: bool = False) -> Iterator[Any]:
        """Open a user's database; None if there is none. Raises LibraryDamaged.

        make: create it if there is none.
        """
        path = self._root / owner / _DATABASE
        try:
            missing = sqlite_missing(path)
            if missing is not None and was_created(path):
                raise sqlite3.DatabaseError(missing)
            if missing is not None and not make:
                yield None
                return
            with closing(sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)) as db:
                db.execute("PRAGMA secure_delete = ON")
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version != VERSION and (version or was_created(path)):
                    raise sqlite3.DatabaseError(f"{path.name} has version {version}, this release reads {VERSION}")
                # Without a version: another process is creating it.
                yield db if version or make else None
        except sqlite3.DatabaseError as exc:
            if not sqlite_damage(exc):
                raise
            self._damaged[owner] = LibraryDamaged(path, str(exc))
            raise self._damaged[owner] from exc

    @contextlib.contextmanager
    def _reading(self, user_id: str) -> Iterator[Any]:
        """Open a reading transaction; None for a user without a library."""
        with self._database(self._owner(user_id)) as db:
            if db is not None:
                db.execute("BEGIN")
            yield db

    @contextlib.contextmanager
    def _writing(self, user_id: str, *, make: bool = False) -> Iterator[Any]:
        """Open an exclusive transaction; None for a user without a library. Raises BlobsAway while the disk is full.

        make: create the library if there is none.
        """
        try:
            with self._transaction(user_id, make=make) as db:
                yield db
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF not in _FULL:
                raise
            raise BlobsAway(f"the library cannot be written: {exc}") from exc

    @contextlib.contextmanager
    def _transaction(self, user_id: str, *, make: bool) -> Iterator[Any]:
        if make:
            self._folder(user_id).mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._database(self._owner(user_id), make=make) as db:
            if db is None:
                yield None
                return
            if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                db.execute("BEGIN IMMEDIATE")
                # Another process may have created it meanwhile.
                if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                    for statement in _SCHEMA.split(";\n"):
                        db.execute(statement)
                    db.execute("INSERT INTO owner VALUES (?)", (user_id,))
                db.execute("COMMIT")
                mark_created(self._folder(user_id) / _DATABASE)
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _by(self, db: sqlite3.Connection, column: Literal["id", "hash"], value: str) -> File | None:
        row = db.execute(f"SELECT {FILE_COLUMNS} FROM file WHERE {column} = ?", (value,)).fetchone()
        return None if row is None else File(*row)

    def _drop_chunks(self, db: sqlite3.Connection, n: int) -> None:
        gone = db.execute("SELECT n, words FROM chunk WHERE file = ?", (n,)).fetchall()
        db.executemany("INSERT INTO said(said, rowid, words) VALUES ('delete', ?, ?)", gone)
        db.execute("DELETE FROM chunk WHERE file = ?", (n,))
        if gone:
            db.execute(f"PRAGMA application_id = {_REMOVED}")


def file_id(user_id: str, digest: str) -> str:
    """Return the id of a file: always the same for one user and content."""
    return f"file-{hashlib.sha256(f'{user_id}{chr(0)}{digest}'.encode()).hexdigest()[:32]}"


def _full(db: sqlite3.Connection, size: int, most: Limits) -> str | None:
    """Return the reason why a file of this size cannot be added; None if it can."""
    count, total = db.execute("SELECT count(*), coalesce(sum(size), 0) FROM file").fetchone()
    if count >= most.files:
        return f"you keep {count} files, which is as many as one user may: remove one first"
    if total + size > most.bytes:
        return f"your files have {total} bytes, and one user may keep {most.bytes}: remove some first"
    return None


def _state(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA application_id").fetchone()[0])


def _folded(name: str) -> str:
    # macOS sends accents as characters of their own (NFD).
    return unicodedata.normalize("NFC", name).casefold()


def _now() -> int:
    return int(time.time() * 1000)
