"""What of the text of a user's files fits a question, by words and by meaning: read from one library's database."""

from __future__ import annotations

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from services.memory.text import query_tokens
from services.memory.vectors import Vector

# Words of a query that are looked up.
_MAX_WORDS = 32
# The smallest number of passages for the weights of words: in a smaller library, a word that occurs would weigh little
# beside a word that does not.
_MIN_TOTAL = 20

State = Literal["reading", "ready", "failed"]

# For a PDF, the place of the last chunk is its last page with text.
FILE_COLUMNS = (
    "n, id, hash, name, type, size, added, expires, state, reason, title, chars, "
    "(SELECT place FROM chunk WHERE chunk.file = file.n ORDER BY chunk.n DESC LIMIT 1)"
)
_PAGE = re.compile(r"page (\d{1,9})")
_BEST = "SELECT rowid FROM said WHERE said MATCH ? ORDER BY bm25(said) LIMIT ?"
_FIRST = "SELECT n FROM chunk WHERE file = ? ORDER BY n LIMIT ?"


@dataclass(frozen=True, slots=True)
class File:
    """What is known of one file; times in ms since the epoch, `size` in bytes, `chars` of its text.

    expires: when it is removed by itself; None: never. reason: why it could not be read, or not all of it.
    """

    n: int
    id: str
    hash: str
    name: str
    type: str
    size: int
    added: int
    expires: int | None
    state: State
    reason: str
    title: str
    chars: int
    last_place: str | None = None

    @property
    def pages(self) -> int | None:
        """Pages of a PDF that has been read, up to the last one with text; None for other files."""
        match = _PAGE.match(self.last_place or "") if self.type == "application/pdf" else None
        return int(match[1]) if match else None

    def shown(self) -> dict[str, Any]:
        """As clients see it."""
        return {
            "id": self.id,
            "name": self.name,
            "type": self.type,
            "size": self.size,
            "sha256": self.hash,
            "added": self.added,
            "expires": self.expires,
            "state": self.state,
            "reason": self.reason or None,
            "title": self.title or None,
            "chars": self.chars,
            "pages": self.pages,
        }


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk that a search has found. similarity: the cosine, None when it has no vector that can be compared. words:
    the share (0…1) of the query's words, by their rarity, that it has."""

    n: int
    file: File
    place: str
    text: str
    similarity: float | None
    words: float


def passages(
    db: sqlite3.Connection, query: str, vector: Vector | None, limit: int, only: Sequence[str] | None
) -> list[Passage]:
    """Return the best by words and the nearest by meaning, at most `limit` of each, in no order.

    only: ids of files to search, of which the first `limit` passages are returned too.
    """
    files = {file.n: file for file in (File(*row) for row in db.execute(f"SELECT {FILE_COLUMNS} FROM file"))}
    if only is not None:
        files = {n: file for n, file in files.items() if file.id in only}
    rarity = _rarity(db, query_tokens(query)[:_MAX_WORDS])
    near = _near(db, vector, files)
    chosen = set(sorted(near, key=lambda n: -near[n])[:limit]) | set(_worded(db, rarity, files, limit))
    if only is not None:
        for n in files:
            chosen.update(row[0] for row in db.execute(_FIRST, (n, limit)))
    found = []
    for n in chosen:
        file, place, text, words = db.execute("SELECT file, place, text, words FROM chunk WHERE n = ?", (n,)).fetchone()
        found.append(Passage(n, files[file], place, text, near.get(n), _share(rarity, words)))
    return found


def _rarity(db: sqlite3.Connection, words: Sequence[str]) -> dict[str, float]:
    (count,) = db.execute("SELECT count(*) FROM chunk").fetchone()
    total = max(count, _MIN_TOTAL)
    sql = "SELECT count(*) FROM said WHERE said MATCH ?"
    counts = {word: db.execute(sql, (f'"{word}"',)).fetchone()[0] for word in words}
    return {word: math.log(1 + (total - n + 0.5) / (n + 0.5)) for word, n in counts.items()}


def _worded(db: sqlite3.Connection, rarity: dict[str, float], files: dict[int, File], limit: int) -> list[int]:
    if not rarity:
        return []
    expression = " OR ".join(f'"{word}"' for word in rarity)
    if len(files) == db.execute("SELECT count(*) FROM file").fetchone()[0]:
        return [row[0] for row in db.execute(_BEST, (expression, limit))]
    sql = f"""SELECT said.rowid FROM said JOIN chunk ON chunk.n = said.rowid
        WHERE said MATCH ? AND chunk.file IN ({",".join("?" * len(files))}) ORDER BY bm25(said) LIMIT ?"""
    return [row[0] for row in db.execute(sql, (expression, *files, limit))]


def _near(db: sqlite3.Connection, vector: Vector | None, files: dict[int, File]) -> dict[int, float]:
    """The similarity of every chunk that can be compared."""
    if vector is None:
        return {}
    sql = "SELECT n, file, vector FROM chunk WHERE model = ? AND length(vector) = ?"
    rows = [row for row in db.execute(sql, (vector.model, 2 * len(vector.values))) if row[1] in files]
    if not rows:
        return {}
    places = np.frombuffer(b"".join(row[2] for row in rows), dtype=np.float16).reshape(len(rows), -1)
    found = places.astype(np.float32) @ np.asarray(vector.values, dtype=np.float32)
    return {row[0]: float(value) for row, value in zip(rows, found, strict=True)}


def _share(rarity: dict[str, float], words: str) -> float:
    there = Counter(words.split())
    whole = sum(rarity.values())
    return sum(value for word, value in rarity.items() if word in there) / whole if whole else 0.0
