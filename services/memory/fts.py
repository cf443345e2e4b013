"""What is in a user's keyword file, and how it is searched: BM25 by SQLite's FTS5. Works on a file that is open."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Of the files' form and of the words in them: another number makes every index be built anew.
VERSION = 6
# Words of a query that are looked up, and engrams that are scored for them: words that many engrams have cost the most
# and tell the least. Where all words of a query are common, the newest engrams are scored that have them all.
MAX_WORDS = 32
MAX_SCORED = 600
# How many engrams with a word are counted; beyond, their number is estimated from how densely these lie.
MAX_COUNTED = MAX_SCORED + 1
# A word of the turn before counts for less than one of the turn itself.
BEFORE_WEIGHT = 0.4
# Pages of a file that one step of overwriting writes.
_MERGED = 64

SCHEMA = f"""
CREATE TABLE owner(user_id TEXT NOT NULL);
CREATE TABLE engram(n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, turn TEXT NOT NULL, before TEXT NOT NULL,
    data TEXT NOT NULL, vector BLOB, model TEXT NOT NULL, talk TEXT NOT NULL, time INTEGER NOT NULL);
CREATE INDEX talks ON engram(talk, time, n) WHERE talk != '';
CREATE VIRTUAL TABLE words USING fts5(turn, before, content='engram', content_rowid='n',
    tokenize='unicode61 remove_diacritics 0');
PRAGMA user_version = {VERSION};
"""

_COUNT = f"""
SELECT count(*), max(n) FROM (SELECT rowid AS n FROM words WHERE words MATCH ? ORDER BY n LIMIT {MAX_COUNTED})
"""
# Newer engrams come first among those that fit as well.
_BEST = """
SELECT engram.id, engram.turn, engram.before, engram.vector, engram.model FROM (
    SELECT rowid AS n, bm25(words, 1.0, ?) AS score FROM words
    WHERE words MATCH ? AND rowid >= ? ORDER BY score, n DESC LIMIT ?
) JOIN engram USING (n) ORDER BY score, n DESC
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is indexed of one engram: its own text, and the text of the turn before it in the same session.

    talk: the same for all turns of one conversation, which are in order by `time` (ms) and then as they came; '' for
    what stands alone. data: what is wanted of an engram once it is found; see `KeywordIndex.data`. vector (of this
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


@dataclass(frozen=True, slots=True)
class Found:
    """`rarity`: what each word of the query is worth; what no engram has counts, too."""

    hits: Sequence[KeywordHit] = field(default_factory=list)
    rarity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A turn beside one that was asked for: its share of the query's words, its vector and the vector's model."""

    id: str
    score: float
    vector: bytes | None
    model: str


@dataclass(frozen=True, slots=True)
class Around:
    """before, after: by id, the turn before and the turn after, where there is one. others: those that were not asked
    for themselves."""

    before: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[Neighbour] = ()


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


def search(db: sqlite3.Connection, words: Sequence[str], limit: int) -> Found:
    # the highest number in place of how many there are: counting would take longer than all the rest
    (last,) = db.execute("SELECT max(n) FROM engram").fetchone()
    if last is None:
        return Found()
    counts = dict(zip(words, _counts(db, [_quoted(word) for word in words], last), strict=True))
    rarity = {word: math.log(1 + (last - n + 0.5) / (n + 0.5)) for word, n in counts.items()}
    there = sorted((word for word in words if counts[word]), key=lambda word: counts[word])
    if not there:
        return Found([], rarity)
    if counts[there[0]] > MAX_SCORED:
        expression, matching = _narrowed(db, there, counts, last)
        first = last - last * MAX_SCORED // matching if matching > MAX_SCORED else 0
    else:
        expression, first = " OR ".join(map(_quoted, _rarest(there, counts))), 0
    found = db.execute(_BEST, (BEFORE_WEIGHT, expression, first, limit)).fetchall()
    share = _sharing(rarity)
    hits = [
        KeywordHit(id_, rank, share(turn, before), vector, model)
        for rank, (id_, turn, before, vector, model) in enumerate(found, start=1)
    ]
    return Found(hits, rarity)


def shares(db: sqlite3.Connection, ids: Sequence[str], rarity: Mapping[str, float]) -> dict[str, float]:
    """The share of the words that each of the engrams has, of those that are there."""
    rows = db.execute(f"SELECT id, turn, before FROM engram WHERE id IN ({_marks(ids)})", list(ids))
    share = _sharing(rarity)
    return {id_: share(turn, before) for id_, turn, before in rows}


# The turn before and the turn after each of some engrams, by their numbers.
_AROUND = """
SELECT one.n, one.id,
    (SELECT n FROM engram WHERE talk = one.talk AND talk != '' AND (time, n) < (one.time, one.n)
        ORDER BY time DESC, n DESC LIMIT 1),
    (SELECT n FROM engram WHERE talk = one.talk AND talk != '' AND (time, n) > (one.time, one.n)
        ORDER BY time, n LIMIT 1)
FROM engram AS one WHERE one.id IN (%s)
"""


def around(db: sqlite3.Connection, ids: Sequence[str], rarity: Mapping[str, float]) -> Around:
    """The turns beside each of the engrams, with their share of the words."""
    names: dict[int, str] = {}
    pairs: list[tuple[int, int]] = []
    for n, id_, earlier, later in db.execute(_AROUND % _marks(ids), list(ids)):
        names[n] = id_
        pairs += [(first, second) for first, second in ((earlier, n), (n, later)) if None not in (first, second)]
    unknown = {n for pair in pairs for n in pair} - names.keys()
    share, others = _sharing(rarity), []
    query = f"SELECT n, id, turn, before, vector, model FROM engram WHERE n IN ({_marks(unknown)})"
    for n, id_, turn, before, vector, model in db.execute(query, list(unknown)):
        names[n] = id_
        others.append(Neighbour(id_, share(turn, before), vector, model))
    return Around(
        {names[second]: names[first] for first, second in pairs},
        {names[first]: names[second] for first, second in pairs},
        others,
    )


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


def _quoted(word: str) -> str:
    return f'"{word}"'


def _counts(db: sqlite3.Connection, expressions: Sequence[str], last: int) -> list[int]:
    """How many engrams match each: exact while they are few.

    One statement for all: SQLite gives the interpreter's lock back once, and not once for each.
    """
    rows = db.execute(" UNION ALL ".join([_COUNT] * len(expressions)), list(expressions)).fetchall()
    return [n if n < MAX_COUNTED else n * last // seen for n, seen in rows]


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
        (left,) = _counts(db, [narrower], last)
        if left:
            expression, matching = narrower, left
        if matching <= MAX_SCORED:
            break
    return expression, matching


def _sharing(rarity: Mapping[str, float]) -> Callable[[str, str], float]:
    """How much of the words a turn and the turn before it have, by what they are worth, 0…1."""
    if not rarity:
        return lambda _turn, _before: 0.0
    # words stand between single spaces
    words = [(f" {word} ", value) for word, value in rarity.items()]
    total = sum(rarity.values())

    def share(turn: str, before: str) -> float:
        turn, before = f" {turn} ", f" {before} "
        found = 0.0
        for word, value in words:
            if word in turn:
                found += value
            elif word in before:
                found += value * BEFORE_WEIGHT
        return found / total

    return share
