"""What is in a user's keyword file, and how it is searched, by SQLite's FTS5. Works on a file that is open."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from services.memory.periods import Period
from services.memory.text import rare_words

# The version of the files' schema and words: after a change, memory builds every file again from the store.
VERSION = 8
# Words of a query that are looked up. A word that so many engrams have, or more, is common: it tells the least, and how
# many have it is estimated from how densely the first of them lie. Where all words of a query are common, the newest
# engrams are looked at that have them all.
MAX_WORDS = 32
COMMON = 601
# A word of the turn before counts for less than one of the turn itself, and one of the turn before that for still less.
BEFORE_WEIGHT = 0.8
EARLIER_WEIGHT = 0.5
# Turns of one conversation that are at most so far apart stand beside each other.
BESIDE = 2
# Pages of a file that one step of overwriting writes.
_MERGED = 64

SCHEMA = f"""
CREATE TABLE owner(user_id TEXT NOT NULL);
CREATE TABLE engram(n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, turn TEXT NOT NULL, before TEXT NOT NULL,
    data TEXT NOT NULL, vector BLOB, model TEXT NOT NULL, talk TEXT NOT NULL, time INTEGER NOT NULL);
CREATE INDEX talks ON engram(talk, time, n) WHERE talk != '';
CREATE INDEX times ON engram(time, n) WHERE turn != '';
CREATE VIRTUAL TABLE words USING fts5(turn, before, content='engram', content_rowid='n',
    tokenize='unicode61 remove_diacritics 0');
PRAGMA user_version = {VERSION};
"""

# Where a word or expression is (?1, ?2, …): of a common one the number of the last engram that is looked at; of another
# the numbers of all that have it in the turn or the one before it, and in the turn itself. One row for all of them:
# while SQLite makes it, it needs no lock of the interpreter's.
_COMMON = """
(SELECT rowid FROM words WHERE words MATCH ?%(n)d ORDER BY rowid LIMIT 1 OFFSET %(least)d - 1) AS common%(n)d
"""
_PLACES = """
common%(n)d, iif(common%(n)d IS NULL, (SELECT json_group_array(rowid) FROM words WHERE words MATCH ?%(n)d), '[]'),
iif(common%(n)d IS NULL,
    (SELECT json_group_array(rowid) FROM words WHERE words MATCH 'turn : (' || ?%(n)d || ')'), '[]')
"""
_NEWEST = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid DESC LIMIT ?"
# What came before the turn before stands in the row of that one.
_SEEN = f"""
SELECT one.n, one.id, one.time, one.turn, one.before, (SELECT before FROM engram
    WHERE talk = one.talk AND talk != '' AND (time, n) < (one.time, one.n) ORDER BY time DESC, n DESC LIMIT 1),
    one.data, one.vector, one.model, (SELECT json_group_array(id) FROM (SELECT id FROM engram
    WHERE talk = one.talk AND talk != '' AND (time, n) > (one.time, one.n) ORDER BY time, n LIMIT {BESIDE}))
FROM engram AS one WHERE one.%s IN (%s)
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is indexed of one engram: its own text, and the text of the turn before it in the same session.

    talk: the same for all turns of one conversation, which are in order by `time` (ms) and then as they came; '' for
    what stands alone. data: what is wanted of an engram once it is found. vector (of this
    model): comes back with each hit; without one the vector that is there stays, as long as the texts are the same.
    """

    id: str
    text: str
    before: str = ""
    data: str = ""
    vector: bytes | None = None
    model: str = ""
    talk: str = ""
    time: int = 0


class Seen(NamedTuple):
    """An engram as a search sees it. `score` (0…1) is the share of the query's words, by their rarity, that it has;
    `later` are the next turns of its talk, at most BESIDE. `rare`: whether it has a rare word of the query itself (the
    turn before it does not count), or whether it lies in the query's rare period. The other fields are those of its
    Entry."""

    id: str
    score: float
    data: str = ""
    vector: bytes | None = None
    model: str = ""
    later: Sequence[str] = ()
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Sought:
    """The terms of a query.

    rarity: the weight of each word, also of words that no engram has. rare: see `rare_words`. period: the query's
    period. period_worth: its weight. period_rare: whether the period counts as a rare word: few engrams lie in it, or
    the query has no words.
    """

    rarity: Mapping[str, float] = field(default_factory=dict)
    rare: Set[str] = frozenset()
    period: Period | None = None
    period_worth: float = 0.0
    period_rare: bool = False

    def has(self, time: int) -> bool:
        """Return whether a moment (ms) lies in the period."""
        return self.period is not None and self.period.start <= time < self.period.end


@dataclass(frozen=True, slots=True)
class Found:
    hits: Sequence[Seen] = field(default_factory=list)
    sought: Sought = Sought()


# As it is written: id, words of the turn, words of the turn before, data, vector, model, talk, time.
Row = tuple[str, str, str, str, bytes | None, str, str, int]

_THERE = "SELECT n, turn, before, data, vector, model, talk, time FROM engram WHERE id = ?"
_CHANGE = "UPDATE engram SET data = ?, vector = ?, model = ?, talk = ?, time = ? WHERE n = ?"
_ADD = """
INSERT INTO engram(n, id, turn, before, data, vector, model, talk, time) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


def insert(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    for row in rows:
        id_, turn, before, data, vector, model, talk, time = row
        there = db.execute(_THERE, (id_,)).fetchone()
        n = None
        if there is not None:
            n = there[0]
            if vector is None and there[1] == turn:
                # the same words are in the same place
                vector, model = there[4:6]
            if there[1:3] == (turn, before):
                if there[3:] != (data, vector, model, talk, time):
                    db.execute(_CHANGE, (data, vector, model, talk, time, n))
                continue
            delete(db, id_)
        # under its old number, by which turns of one time are in order
        n = db.execute(_ADD, (n, id_, turn, before, data, vector, model, talk, time)).lastrowid
        db.execute("INSERT INTO words(rowid, turn, before) VALUES (?, ?, ?)", (n, turn, before))


def delete(db: sqlite3.Connection, id_: str) -> bool:
    row = db.execute("SELECT n, turn, before FROM engram WHERE id = ?", (id_,)).fetchone()
    if row is None:
        return False
    db.execute("INSERT INTO words(words, rowid, turn, before) VALUES ('delete', ?, ?, ?)", row)
    db.execute("DELETE FROM engram WHERE n = ?", row[:1])
    return True


def overwritten(db: sqlite3.Connection, table: str, *, begin: bool) -> bool:
    """One step, of some milliseconds, after the last of which no word of what was removed is in a table of words any
    more; whether that was the last. begin: what was removed before it goes."""
    before = db.total_changes
    # in one segment there is nothing of what was removed; the first step says that all go into it
    db.execute(f"INSERT INTO {table}({table}, rank) VALUES('merge', ?)", (-_MERGED if begin else _MERGED,))
    # as SQLite's documentation of FTS5 says when there is nothing left to merge
    return db.total_changes - before < 2


_DURING = "FROM engram WHERE turn != '' AND time >= ? AND time < ?"


def search(db: sqlite3.Connection, words: Sequence[str], limit: int, period: Period | None = None) -> Found:
    # the highest number in place of how many there are: counting would take longer than all the rest
    (last,) = db.execute("SELECT max(n) FROM engram").fetchone()
    if last is None or not (words or period):
        return Found()
    quoted = [f'"{word}"' for word in words]
    places = _places(db, quoted) if quoted else []
    counts = [place.count(last) for place in places]
    rarity = {word: _worth(n, last) for word, n in zip(words, counts, strict=True)}
    telling = [(rarity[word], place) for word, place in zip(words, places, strict=True) if place.anywhere]
    worth, period_rare = 0.0, False
    if period is not None:
        (count,) = db.execute(f"SELECT count(*) {_DURING}", period).fetchone()
        worth = _worth(count, last)
        period_rare = not words or bool(rare_words({"": count}, last))
        if count and (count < COMMON or not telling):
            newest = f"SELECT n {_DURING} ORDER BY time DESC, n DESC LIMIT ?"
            during = [n for (n,) in db.execute(newest, (*period, COMMON))]
            telling.append((worth, _Place(None, during, during)))
    if not telling and any(counts):
        there = sorted((count, one) for count, one in zip(counts, quoted, strict=True) if count)
        telling = [(1.0, _newest(db, _narrowed(db, [one for _, one in there])))]
    scores: dict[int, float] = defaultdict(float)
    for value, place in telling:
        for numbers, part in ((place.anywhere, BEFORE_WEIGHT * value), (place.itself, (1 - BEFORE_WEIGHT) * value)):
            for n in numbers:
                scores[n] += part
    best = _best(scores, limit)
    rows = {row[0]: row for row in db.execute(_SEEN % ("n", _marks(best)), best)}
    # A common word is not rare, and its exact count is unknown.
    exact = {word: len(place.itself) for word, place in zip(words, places, strict=True) if place.common is None}
    sought = Sought(rarity, rare_words(exact, last), period, worth, period_rare)
    share = _sharing(sought)
    return Found([_seen(rows[n], share, sought) for n in best], sought)


def seen(db: sqlite3.Connection, ids: Sequence[str], sought: Sought) -> list[Seen]:
    """Those of the engrams that are there."""
    share = _sharing(sought)
    return [_seen(row, share, sought) for row in db.execute(_SEEN % ("id", _marks(ids)), list(ids))]


def _worth(count: int, last: int) -> float:
    """Return the weight of a word that `count` of `last` engrams have (inverse document frequency)."""
    return math.log(1 + (max(0, last - count) + 0.5) / (count + 0.5))


def _best(scores: Mapping[int, float], limit: int) -> list[int]:
    """The highest; newer engrams come first among those that fit as well."""
    # numbers alone are sorted much sooner than as many pairs
    least = min(sorted(scores.values())[-limit:], default=0.0)
    high = [(score, n) for n, score in scores.items() if score >= least]
    return [n for _, n in sorted(high, reverse=True)[:limit]]


def _seen(row: Any, share: Callable[[int, str, str, str], float], sought: Sought) -> Seen:
    _, id_, time, turn, before, earlier, data, vector, model, later = row
    rare = (sought.period_rare and sought.has(time)) or (bool(sought.rare) and not sought.rare.isdisjoint(turn.split()))
    return Seen(id_, share(time, turn, before, earlier or ""), data, vector, model, orjson.loads(later), rare)


_WINDOW = """
SELECT n FROM (SELECT time, n FROM engram WHERE talk = ?1 AND talk != '' AND (time, n) < (?2, ?3)
    ORDER BY time DESC, n DESC LIMIT ?4)
UNION ALL
SELECT n FROM (SELECT time, n FROM engram WHERE talk = ?1 AND talk != '' AND (time, n) > (?2, ?3)
    ORDER BY time, n LIMIT ?4)
"""


def windows(db: sqlite3.Connection, ids: Sequence[str], reach: int) -> list[list[str]]:
    """The turns of the same talk round each of the engrams, at most `reach` before and after it, in their order.

    Windows that touch are one, where the first of them was; what stands in no talk has none.
    """
    found: list[set[tuple[int, int, str]]] = []
    for id_ in ids:
        row = db.execute("SELECT talk, time, n FROM engram WHERE id = ? AND talk != ''", (id_,)).fetchone()
        if row is None:
            continue
        numbers = [row[2], *(n for (n,) in db.execute(_WINDOW, (*row, reach)))]
        window = set(db.execute(f"SELECT time, n, id FROM engram WHERE n IN ({_marks(numbers)})", numbers))
        touching = [one for one in found if one & window]
        merged = window.union(*touching)
        at = found.index(touching[0]) if touching else len(found)
        found = [one for one in found if one not in touching]
        found.insert(at, merged)
    return [[id_ for _, _, id_ in sorted(window)] for window in found]


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


class _Place(NamedTuple):
    """Where a word is. common: of a common word the number of the last engram of the first COMMON that have it. Of
    another one: the numbers of those that have it anywhere, and in the turn itself."""

    common: int | None
    anywhere: Sequence[int]
    itself: Sequence[int]

    def count(self, last: int) -> int:
        """How many have it: exact while they are few."""
        return len(self.anywhere) if self.common is None else COMMON * last // self.common


def _places(db: sqlite3.Connection, expressions: Sequence[str]) -> list[_Place]:
    numbered = [{"n": n, "least": COMMON} for n in range(1, 1 + len(expressions))]
    columns, common = (", ".join(part % names for names in numbered) for part in (_PLACES, _COMMON))
    row = db.execute(f"SELECT {columns} FROM (SELECT {common})", list(expressions)).fetchone()
    return [_Place(row[at], orjson.loads(row[at + 1]), orjson.loads(row[at + 2])) for at in range(0, len(row), 3)]


def _newest(db: sqlite3.Connection, expression: str) -> _Place:
    """Where it is in the last engrams that have it, however many they are."""
    anywhere, itself = (
        [n for (n,) in db.execute(_NEWEST, (one, COMMON))] for one in (expression, f"turn : ({expression})")
    )
    return _Place(None, anywhere, itself)


def _narrowed(db: sqlite3.Connection, common: Sequence[str]) -> str:
    """Of words that are all common, those that must all be there: no more than leave a few engrams."""
    expression = common[0]
    for word in common[1:]:
        narrower = f"{expression} AND {word}"
        (place,) = _places(db, [narrower])
        if place.common is not None:
            expression = narrower
        elif place.anywhere:
            return narrower
    return expression


def _sharing(sought: Sought) -> Callable[[int, str, str, str], float]:
    """Return a function for the weighted share of the terms, 0…1, that a turn and the two turns before it have."""
    # words stand between single spaces
    words = [(f" {word} ", value) for word, value in sought.rarity.items()]
    total = sum(sought.rarity.values()) + sought.period_worth
    if not total:
        return lambda _time, _turn, _before, _earlier: 0.0

    def share(time: int, turn: str, before: str, earlier: str) -> float:
        turn, before, earlier = f" {turn} ", f" {before} ", f" {earlier} "
        found = sought.period_worth if sought.has(time) else 0.0
        for word, value in words:
            if word in turn:
                found += value
            elif word in before:
                found += value * BEFORE_WEIGHT
            elif word in earlier:
                found += value * EARLIER_WEIGHT
        return found / total

    return share
