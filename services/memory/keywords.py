"""Keyword search over engrams: SQLite's full text index, one small database per user.

A user's index sees nothing of the others: its file, its word statistics and the time that a search takes depend on
that user's engrams alone, and forgetting a user unlinks the file. The store stays the truth: a file that is damaged or
of another version is dropped and reported as KeywordIndexDamaged, and `replace` makes it anew from the store.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.memory.catalog import Known
from services.memory.fts import (
    MAX_WORDS,
    SCHEMA,
    VERSION,
    Entry,
    Found,
    Seen,
    Sought,
    delete,
    insert,
    overwritten,
    search,
    seen,
    windows,
)
from services.memory.periods import Period
from services.memory.text import query_tokens, tokens
from shared.errors import Local2Error

__all__ = ["Entry", "Found", "KeywordIndex", "KeywordIndexDamaged", "Seen", "Sought"]

# Databases held open at the same time.
OPEN_FILES = 32
# Bytes of a file that are read without a copy.
MAPPED = 512_000_000
# A file's application_id: no removed word is left in it; some may be left; they are being overwritten.
_CLEAN, _REMOVED, _MERGING = 0, 1, 2
_KNOWN = """
SELECT id, time, json_extract(data, '$.kind'), json_extract(data, '$.respondent_id') IS NOT 'B' FROM engram
"""


class KeywordIndexDamaged(Local2Error):
    """A user's index cannot be read any more; `replace` it from the store."""

    def __init__(self, user_id: str, reason: str) -> None:
        super().__init__(f"the keyword index of user {user_id} has to be built anew: {reason}")
        self.user_id = user_id


@dataclass(slots=True)
class _File:
    db: sqlite3.Connection
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def finish(self) -> None:
        """Closes it. The lock must be held, and is given back."""
        self.closed = True
        self.db.close()
        self.lock.release()


class KeywordIndex:
    """Every method may be called from any thread, and returns when its effect is on disk.

    unclean: users in whose files removed words may be left; see `overwrite`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()
        self.unclean: set[str] = set()

    def close(self) -> None:
        with self._lock:
            self._close_all()

    def add(self, user_id: str, entries: Iterable[Entry]) -> None:
        """Adds or replaces; an entry that is there unchanged costs a look-up. All or nothing."""
        rows = [
            (e.id, " ".join(tokens(e.text)), " ".join(tokens(e.before)), e.data, e.vector, e.model, e.talk, e.time)
            for e in entries
        ]
        with self._using(user_id) as db, _transaction(db):
            insert(db, rows)

    def remove(self, user_id: str, ids: Iterable[str]) -> int:
        """Remove engrams and return how many were there. `overwrite` removes their words from the disk."""
        with self._there(user_id) as db:
            if db is None:
                return 0
            with _transaction(db):
                db.execute(f"PRAGMA application_id = {_REMOVED}")
                self.unclean.add(user_id)
                return sum(delete(db, id_) for id_ in ids)

    def overwrite(self, user_id: str) -> bool:
        """Take one step, of some milliseconds, towards a file without removed words; return whether more are needed.

        The file itself records how far this is, for a process that dies in between.
        """
        with self._there(user_id) as db:
            state = _CLEAN if db is None else db.execute("PRAGMA application_id").fetchone()[0]
            if db is None or state == _CLEAN:
                self.unclean.discard(user_id)
                return False
            done = overwritten(db, "words", begin=state == _REMOVED)
            if done:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute(f"PRAGMA application_id = {_CLEAN if done else _MERGING}")
            return True

    def remove_user(self, user_id: str) -> None:
        """Forgets everything of the user: the file is unlinked."""
        with self._lock:
            self._drop(user_id)

    def search(self, user_id: str, query: str, limit: int, period: Period | None = None) -> Found:
        """Return the engrams that share words with the query, best first.

        period: the one that the query names; an engram of that time has one more of the query's words. Raises
        KeywordIndexDamaged.
        """
        words = query_tokens(query, dated=period is not None)[:MAX_WORDS]
        with self._there(user_id) as db:
            return Found() if db is None or limit < 1 else search(db, words, limit, period)

    def seen(self, user_id: str, ids: Sequence[str], sought: Sought) -> list[Seen]:
        """Return those of the engrams that are there, scored by what a search seeks. Raises KeywordIndexDamaged."""
        with self._there(user_id) as db:
            return [] if db is None else seen(db, ids, sought)

    def windows(self, user_id: str, ids: Sequence[str], reach: int) -> list[list[str]]:
        """What was said round each of the engrams: see `fts.windows`. Raises KeywordIndexDamaged."""
        with self._there(user_id) as db:
            return [] if db is None else windows(db, ids, reach)

    def data(self, user_id: str, ids: Sequence[str]) -> dict[str, str]:
        """The `data` of those of the engrams that are there; far quicker than asking the store."""
        places = ", ".join("?" * len(ids))
        with self._there(user_id) as db:
            if db is None:
                return {}
            return dict(db.execute(f"SELECT id, data FROM engram WHERE id IN ({places})", list(ids)))

    def page(self, user_id: str, after: int, limit: int) -> list[tuple[int, str, str]] | None:
        """Return number, id and `data` of engrams whose numbers follow `after`; None if the user has no file."""
        with self._there(user_id) as db:
            if db is None:
                return None
            sql = "SELECT n, id, data FROM engram WHERE n > ? ORDER BY n LIMIT ?"
            return db.execute(sql, (after, limit)).fetchall()

    def count(self, user_id: str) -> int:
        with self._there(user_id) as db:
            return 0 if db is None else int(db.execute("SELECT count(*) FROM engram").fetchone()[0])

    def replace(self, user_id: str, entries: Iterable[Entry]) -> None:
        """The user's index made anew of exactly these entries."""
        with self._lock:
            self._drop(user_id)
        self.add(user_id, entries)

    def files(self) -> list[Path]:
        """Return the users' files."""
        return list(self._folder.glob("*.db"))

    def known(self, files: Iterable[Path]) -> list[Known]:
        """Return the engrams in some files. Files that are damaged, or of another version, are left out.

        Adds users to `unclean` whose removed words a process has left behind.
        """
        found: list[Known] = []
        for path in files:
            address = f"{path.absolute().as_uri()}?mode=ro"
            with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as db:
                if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                    continue
                (user_id,) = db.execute("SELECT user_id FROM owner").fetchone()
                if db.execute("PRAGMA application_id").fetchone()[0] != _CLEAN:
                    self.unclean.add(user_id)
                rows = db.execute(_KNOWN).fetchall()
                found += [Known(one, user_id, at, kind, bool(shown)) for one, at, kind, shown in rows]
        return found

    def clear(self) -> None:
        """Remove everything, and the mark first: the next start sees a clearing that did not end."""
        with self._lock:
            self._mark_path.unlink(missing_ok=True)
            self._close_all()
            for path in self._folder.glob("*.db*"):
                path.unlink(missing_ok=True)

    def mark(self) -> str | None:
        """How far the index follows the store, as `set_mark` was told; None: it has to be rebuilt."""
        try:
            version, _, mark = self._mark_path.read_text(encoding="utf-8").partition("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return mark if version == str(VERSION) else None

    def set_mark(self, mark: str) -> None:
        """Call it after the changes up to the mark were applied: changes may be applied twice, never left out."""
        fresh = self._mark_path.with_suffix(".new")
        fresh.write_text(f"{VERSION}\n{mark}", encoding="utf-8")
        os.replace(fresh, self._mark_path)

    @property
    def _mark_path(self) -> Path:
        return self._folder / "mark"

    def _path(self, user_id: str) -> Path:
        return self._folder / f"{hashlib.sha256(user_id.encode()).hexdigest()[:40]}.db"

    @contextmanager
    def _there(self, user_id: str) -> Iterator[sqlite3.Connection | None]:
        """The user's file, open; None where there is none."""
        if user_id in self._open or self._path(user_id).exists():
            with self._using(user_id) as db:
                yield db
        else:
            yield None

    @contextmanager
    def _using(self, user_id: str) -> Iterator[sqlite3.Connection]:
        file = self._acquired(user_id)
        damage: sqlite3.DatabaseError | None = None
        try:
            yield file.db
        except sqlite3.DatabaseError as exc:
            # only "malformed" and "not a database" come as the class itself
            if type(exc) is not sqlite3.DatabaseError:
                raise
            damage = exc
        finally:
            file.lock.release()
        if damage is not None:
            self.remove_user(user_id)
            raise KeywordIndexDamaged(user_id, str(damage)) from damage

    def _acquired(self, user_id: str) -> _File:
        """The user's open file, locked: only its holder may close it."""
        while True:
            with self._lock:
                try:
                    file = self._file(user_id)
                except sqlite3.DatabaseError as exc:
                    if type(exc) is not sqlite3.DatabaseError:
                        raise
                    self._drop(user_id)
                    raise KeywordIndexDamaged(user_id, str(exc)) from exc
            # outside: one user's long write must not hold up the others
            file.lock.acquire()
            if not file.closed:
                return file
            file.lock.release()

    def _file(self, user_id: str) -> _File:
        file = self._open.get(user_id)
        if file is None:
            file = self._open[user_id] = _File(_opened(self._path(user_id), user_id))
            self._close_idle()
        self._open.move_to_end(user_id)
        return file

    def _close_idle(self) -> None:
        """Closes the files that were not used for longest; one that is being used stays open."""
        for user_id in list(self._open)[: max(0, len(self._open) - OPEN_FILES)]:
            if self._open[user_id].lock.acquire(blocking=False):
                self._open.pop(user_id).finish()

    def _close_all(self) -> None:
        for file in self._open.values():
            file.lock.acquire()
            file.finish()
        self._open.clear()

    def _drop(self, user_id: str) -> None:
        path = self._path(user_id)
        self.unclean.discard(user_id)
        file = self._open.pop(user_id, None)
        if file is not None:
            file.lock.acquire()
            file.finish()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _opened(path: Path, user_id: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        # a crash of the machine may lose the last changes, never the file; the mark makes them be applied again
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        # pages come from the system's cache, which all users share
        db.execute(f"PRAGMA mmap_size = {MAPPED}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
            db.execute("INSERT INTO owner VALUES (?)", (user_id,))
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, {VERSION} is needed")
    except BaseException:
        db.close()
        raise
    return db
