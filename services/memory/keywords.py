"""Keyword search over engrams: BM25 in SQLite, one small database per user.

A user's index sees nothing of the others: its file, its word statistics and the time that a search takes depend on
that user's engrams alone, and forgetting a user unlinks the file. The store stays the truth: a file that is damaged or
of another version is dropped and reported as KeywordIndexDamaged, and `replace` makes it anew from the store.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.memory.text import query_tokens, tokens
from shared.errors import Local2Error

# Of the files' form and of the words in them: another number makes every index be built anew.
VERSION = 3
# Databases held open at the same time.
OPEN_FILES = 32
# Bytes of a file that are read without a copy.
MAPPED = 512_000_000
# Words of a query that are looked up, and engrams that are scored for them: words that many engrams have cost the most
# and tell the least. Where all words of a query are common, the newest engrams are scored that have them all.
MAX_WORDS = 32
MAX_SCORED = 600
# How many engrams with a word are counted; beyond, their number is estimated from how densely these lie.
MAX_COUNTED = 1_000
# A word of the turn before counts for less than one of the turn itself.
BEFORE_WEIGHT = 0.4

_SCHEMA = f"""
CREATE TABLE owner(user_id TEXT NOT NULL);
CREATE TABLE engram(n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, turn TEXT NOT NULL, before TEXT NOT NULL,
    data TEXT NOT NULL, vector BLOB, model TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(turn, before, content='engram', content_rowid='n',
    tokenize='unicode61 remove_diacritics 0');
PRAGMA user_version = {VERSION};
"""


_COUNT = "SELECT count(*), max(n) FROM (SELECT rowid AS n FROM words WHERE words MATCH ? ORDER BY n LIMIT ?)"
# Newer engrams come first among those that fit as well.
_BEST = """
SELECT engram.id, engram.turn, engram.before, engram.vector, engram.model FROM (
    SELECT rowid AS n, bm25(words, 1.0, ?) AS score FROM words
    WHERE words MATCH ? AND rowid >= ? ORDER BY score, n DESC LIMIT ?
) JOIN engram USING (n) ORDER BY score, n DESC
"""


class KeywordIndexDamaged(Local2Error):
    """A user's index cannot be read any more; `replace` it from the store."""

    def __init__(self, user_id: str, reason: str) -> None:
        super().__init__(f"the keyword index of user {user_id} has to be built anew: {reason}")
        self.user_id = user_id


@dataclass(frozen=True, slots=True)
class Entry:
    """What is indexed of one engram: its own text, and the text of the turn before it in the same session.

    data: what is wanted of an engram once it is found; see `KeywordIndex.data`. vector (of this model): comes back with
    each hit; without one the vector that is there stays, as long as the texts are the same.
    """

    id: str
    text: str
    before: str = ""
    data: str = ""
    vector: bytes | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class KeywordHit:
    """`rank` counts from 1. `score` (0…1) is the share of the query's words, by their rarity, that the engram has.

    `vector` and `model` are what was added with it.
    """

    id: str
    rank: int
    score: float
    vector: bytes | None = None
    model: str = ""


_Row = tuple[str, str, str, str, bytes | None, str]


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
    """Every method may be called from any thread, and returns when its effect is on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._close_all()

    def add(self, user_id: str, entries: Iterable[Entry]) -> None:
        """Adds or replaces; an entry that is there unchanged costs a look-up. All or nothing."""
        rows = [
            (e.id, " ".join(tokens(e.text)), " ".join(tokens(e.before)), e.data, e.vector, e.model) for e in entries
        ]
        with self._using(user_id) as db, _transaction(db):
            _insert(db, rows)

    def remove(self, user_id: str, ids: Iterable[str]) -> int:
        """Forgets these engrams, on disk too. Returns how many there were."""
        if not self._path(user_id).exists():
            return 0
        with self._using(user_id) as db:
            with _transaction(db):
                removed = sum(_delete(db, id_) for id_ in ids)
                if removed:
                    # merged into one segment, in which nothing of the removed texts is left
                    db.execute("INSERT INTO words(words) VALUES('optimize')")
            if removed:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return removed

    def remove_user(self, user_id: str) -> None:
        """Forgets everything of the user: the file is unlinked."""
        with self._lock:
            self._drop(user_id)

    def search(self, user_id: str, query: str, limit: int) -> list[KeywordHit]:
        """The engrams that share words with the query, best first. Raises KeywordIndexDamaged."""
        words = query_tokens(query)[:MAX_WORDS]
        if not words or limit < 1 or not self._path(user_id).exists():
            return []
        with self._using(user_id) as db:
            return _search(db, words, limit)

    def data(self, user_id: str, ids: Sequence[str]) -> dict[str, str]:
        """The `data` of those of the engrams that are there; far quicker than asking the store."""
        if not ids or not self._path(user_id).exists():
            return {}
        places = ", ".join("?" * len(ids))
        with self._using(user_id) as db:
            return dict(db.execute(f"SELECT id, data FROM engram WHERE id IN ({places})", list(ids)))

    def count(self, user_id: str) -> int:
        if not self._path(user_id).exists():
            return 0
        with self._using(user_id) as db:
            return int(db.execute("SELECT count(*) FROM engram").fetchone()[0])

    def replace(self, user_id: str, entries: Iterable[Entry]) -> None:
        """The user's index made anew of exactly these entries."""
        with self._lock:
            self._drop(user_id)
        self.add(user_id, entries)

    def rebuild(self, batches: Iterable[tuple[str, Sequence[Entry]]]) -> None:
        """The whole index made anew from the store: (user_id, some entries) as often as needed.

        The mark is cleared first: a rebuild that did not end is seen at the next start.
        """
        with self._lock:
            self._mark_path.unlink(missing_ok=True)
            self._close_all()
            for path in self._folder.glob("*.db*"):
                path.unlink(missing_ok=True)
        for user_id, entries in batches:
            self.add(user_id, entries)

    def mark(self) -> str | None:
        """How far the index follows the store, as `set_mark` was told; None: it has to be rebuilt."""
        try:
            version, _, mark = self._mark_path.read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
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
        path = self._path(user_id)
        file = self._open.get(path.name)
        if file is None:
            file = self._open[path.name] = _File(_opened(path, user_id))
            self._close_idle()
        self._open.move_to_end(path.name)
        return file

    def _close_idle(self) -> None:
        """Closes the files that were not used for longest; one that is being used stays open."""
        for name in list(self._open)[: max(0, len(self._open) - OPEN_FILES)]:
            if self._open[name].lock.acquire(blocking=False):
                self._open.pop(name).finish()

    def _close_all(self) -> None:
        for file in self._open.values():
            file.lock.acquire()
            file.finish()
        self._open.clear()

    def _drop(self, user_id: str) -> None:
        path = self._path(user_id)
        file = self._open.pop(path.name, None)
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
            db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            db.execute("INSERT INTO owner VALUES (?)", (user_id,))
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, {VERSION} is needed")
    except BaseException:
        db.close()
        raise
    return db


def _insert(db: sqlite3.Connection, rows: Iterable[_Row]) -> None:
    for row in rows:
        id_, turn, before, *rest = row
        there = db.execute("SELECT turn, before, data, vector, model FROM engram WHERE id = ?", (id_,)).fetchone()
        if there is not None and there[:2] == (turn, before):
            data, vector, model = rest if rest[1] is not None else (rest[0], *there[3:])
            if there[2:] != (data, vector, model):
                changed = "UPDATE engram SET data = ?, vector = ?, model = ? WHERE id = ?"
                db.execute(changed, (data, vector, model, id_))
            continue
        if there is not None:
            _delete(db, id_)
        added = "INSERT INTO engram(id, turn, before, data, vector, model) VALUES (?, ?, ?, ?, ?, ?)"
        n = db.execute(added, row).lastrowid
        db.execute("INSERT INTO words(rowid, turn, before) VALUES (?, ?, ?)", (n, turn, before))


def _delete(db: sqlite3.Connection, id_: str) -> bool:
    row = db.execute("SELECT n, turn, before FROM engram WHERE id = ?", (id_,)).fetchone()
    if row is None:
        return False
    db.execute("INSERT INTO words(words, rowid, turn, before) VALUES ('delete', ?, ?, ?)", row)
    db.execute("DELETE FROM engram WHERE n = ?", row[:1])
    return True


def _search(db: sqlite3.Connection, words: Sequence[str], limit: int) -> list[KeywordHit]:
    # the highest number in place of how many there are: counting would take longer than all the rest
    (last,) = db.execute("SELECT max(n) FROM engram").fetchone()
    if last is None:
        return []
    counts = {word: _count(db, _quoted(word), last) for word in words}
    there = sorted((word for word in words if counts[word]), key=lambda word: counts[word])
    if not there:
        return []
    rarity = {word: math.log(1 + (last - n + 0.5) / (n + 0.5)) for word, n in counts.items()}
    whole = sum(rarity.values())
    if counts[there[0]] > MAX_SCORED:
        expression, matching = _narrowed(db, there, counts, last)
        first = last - last * MAX_SCORED // matching if matching > MAX_SCORED else 0
    else:
        expression, first = " OR ".join(map(_quoted, _rarest(there, counts))), 0
    found = db.execute(_BEST, (BEFORE_WEIGHT, expression, first, limit)).fetchall()
    return [
        KeywordHit(id_, rank, _share(rarity, turn, before) / whole, vector, model)
        for rank, (id_, turn, before, vector, model) in enumerate(found, start=1)
    ]


def _quoted(word: str) -> str:
    return f'"{word}"'


def _count(db: sqlite3.Connection, expression: str, last: int) -> int:
    """How many engrams match: exact while they are few."""
    n: int
    seen: int
    n, seen = db.execute(_COUNT, (expression, MAX_COUNTED)).fetchone()
    return n if n < MAX_COUNTED else n * last // seen


def _rarest(there: Sequence[str], counts: dict[str, int]) -> list[str]:
    """As many words, from the rarest on, as are quickly scored."""
    chosen, scored = [there[0]], counts[there[0]]
    for word in there[1:]:
        scored += counts[word]
        if scored > MAX_SCORED:
            break
        chosen.append(word)
    return chosen


def _narrowed(db: sqlite3.Connection, there: Sequence[str], counts: dict[str, int], last: int) -> tuple[str, int]:
    """Where every word is common: words that must all be there, and how many engrams that leaves."""
    expression, matching = _quoted(there[0]), counts[there[0]]
    for word in there[1:]:
        narrower = f"{expression} AND {_quoted(word)}"
        left = _count(db, narrower, last)
        if left:
            expression, matching = narrower, left
        if matching <= MAX_SCORED:
            break
    return expression, matching


def _share(rarity: dict[str, float], turn: str, before: str) -> float:
    # words stand between single spaces
    turn, before = f" {turn} ", f" {before} "
    found = 0.0
    for word, value in rarity.items():
        if f" {word} " in turn:
            found += value
        elif f" {word} " in before:
            found += value * BEFORE_WEIGHT
    return found
