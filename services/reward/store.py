"""What is known of answers and of what people and the judge think of them: one SQLite file, used by one process.

Every write is an upsert under the response's or the query's id, so that a message handled twice changes nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson

from services.reward.votes import Cast, Part, Vote
from shared.contracts import VotePart
from shared.errors import SettingsError, TransientError
from shared.participant.file_lock import FileLock
from shared.participant.kept import note, noted, sqlite_damage, sqlite_missing, sqlite_trouble

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    response_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, session_id TEXT NOT NULL, user_id TEXT NOT NULL,
    respondent TEXT NOT NULL, query TEXT NOT NULL, answer TEXT NOT NULL, messages TEXT NOT NULL,
    config TEXT NOT NULL, intent TEXT NOT NULL, tools INTEGER NOT NULL, time INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS responses_session ON responses (session_id);
CREATE INDEX IF NOT EXISTS responses_time ON responses (time, response_id);
CREATE TABLE IF NOT EXISTS pairs (
    query_id TEXT PRIMARY KEY, response_a TEXT NOT NULL, response_b TEXT NOT NULL, winner TEXT NOT NULL,
    forward TEXT, swapped TEXT, score_a REAL, score_b REAL, reason TEXT NOT NULL, config_a TEXT NOT NULL,
    config_b TEXT NOT NULL, session_id TEXT NOT NULL, time INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS pairs_time ON pairs (time, query_id);
CREATE TABLE IF NOT EXISTS critiques (
    response_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, session_id TEXT NOT NULL, score INTEGER,
    feedback TEXT NOT NULL, rubric TEXT NOT NULL, time INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS critiques_time ON critiques (time, response_id);
CREATE TABLE IF NOT EXISTS votes (
    response_id TEXT PRIMARY KEY, query_id TEXT NOT NULL, session_id TEXT NOT NULL, user_id TEXT NOT NULL,
    reward REAL NOT NULL, stars INTEGER, comment TEXT, cast_ms INTEGER NOT NULL, cast_no INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS consents (user_id TEXT PRIMARY KEY, given INTEGER NOT NULL, time INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS experiments (
    name TEXT PRIMARY KEY, state TEXT NOT NULL, config_a TEXT NOT NULL, config_b TEXT NOT NULL,
    settings_a TEXT NOT NULL, settings_b TEXT NOT NULL, before_a TEXT, before_b TEXT NOT NULL,
    started INTEGER NOT NULL, ended INTEGER);
CREATE TABLE IF NOT EXISTS forgotten (session_id TEXT PRIMARY KEY, at INTEGER NOT NULL);
"""
# Columns that came later: a file of an earlier release gets them when it is opened, as a new one does. calls: the tool
# calls of the turn and their results, as messages; empty where there were none or they are not kept. material: whether
# the model read what is kept nowhere. prompt: what the judge read, as messages; empty where it is not kept. judges:
# what each of several judges said (`JudgeGrade`, `JudgeVerdict`); empty where one judged alone. parts: of a vote, as
# JSON (`votes.Vote`); reward, stars and comment are what comes of them. withdrawn: nothing is left of it.
_ADDED = (
    ("responses", "calls", "TEXT NOT NULL DEFAULT ''"),
    ("responses", "material", "INTEGER NOT NULL DEFAULT 0"),
    ("critiques", "prompt", "TEXT NOT NULL DEFAULT ''"),
    ("critiques", "judges", "TEXT NOT NULL DEFAULT ''"),
    ("pairs", "judges", "TEXT NOT NULL DEFAULT ''"),
    ("votes", "parts", "TEXT NOT NULL DEFAULT ''"),
    ("votes", "withdrawn", "INTEGER NOT NULL DEFAULT 0"),
)
# A withdrawn vote stays as a mark, so that what was cast before it and comes later does not count.
_VIEW = "CREATE VIEW IF NOT EXISTS standing AS SELECT * FROM votes WHERE NOT withdrawn"
TABLES = ("responses", "pairs", "critiques", "votes", "consents", "experiments", "forgotten")
_KEYS = {"responses": "response_id", "pairs": "query_id", "critiques": "response_id", "votes": "response_id",
         "consents": "user_id", "experiments": "name", "forgotten": "session_id"}  # fmt: skip
# Where each of them says when it was.
_TIMES = {"responses": "time", "pairs": "time", "critiques": "time", "votes": "cast_ms"}
_BUSY_SECONDS = 10.0
# The number of a file from which nothing is left that was removed.
_OVERWRITTEN = 1
# Rows that pruning looks at in one transaction.
_PRUNED = 200
# Another process may be just ending.
_LOCK_PATIENCE = 5.0


def config_name(config: Mapping[str, Any]) -> str:
    """One text for one configuration: model, sampling, prompt version, in a fixed order."""
    kept = {name: value for name, value in config.items() if value not in (None, "", {})}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()


def _taken_back(query_id: str) -> str:
    """How a query stands among what was forgotten; no session can be called so."""
    return f"query {query_id}"


def _asked(query_id: str) -> int:
    """When a query was accepted, in ms; 0 when its id does not tell it."""
    asked, _, _ = query_id.partition("-")
    return int(asked) if asked.isdecimal() else 0


# Where pruning begins: the table, and the time and id of the row before.
FIRST = ("responses", 0, "")
# What to do about a database that is broken.
REMEDY = "stop the stack: `local2 doctor --repair` saves what can be read, `local2 restore` brings a backup back"


class Store:
    """One connection; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError when the file cannot be used, or another process uses it."""
        self._path = path
        self.damage: str | None = None
        try:
            self._hold(path.resolve())
            new = sqlite_missing(path) is not None and not noted(path)
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
            for table, column, form in _ADDED:
                if column not in self._columns(self._db, table):
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {form}")
            self._db.execute(_VIEW)
            self._renew()
            note(path)
        except (OSError, sqlite3.Error) as exc:
            remedy = f"; {REMEDY}" if sqlite_damage(exc) else ""
            raise SettingsError(f"database: {path} cannot be used: {exc}{remedy}") from exc

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def _renew(self) -> None:
        """Once, of a file of an earlier release: what that one has removed may still stand in it."""
        if self._db.execute("PRAGMA user_version").fetchone()[0] < _OVERWRITTEN:
            self._db.execute("VACUUM")
            self._db.execute(f"PRAGMA user_version = {_OVERWRITTEN}")
            self.overwrite()

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

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, table: str, row: Mapping[str, Any]) -> bool:
        """An upsert under the table's key; False when its session was deleted."""
        with self._transaction() as db:
            return self._put(db, table, row)

    def put_response(self, row: Mapping[str, Any], turns: Sequence[str]) -> bool:
        """The same of an answer, to a conversation with the `turns` (ids of their queries). Where one of them was taken
        back meanwhile, the conversation is not kept: see `take_back`."""
        with self._transaction() as db:
            kept = not any(self._gone(db, row["session_id"], turn) for turn in turns)
            done = self._put(db, "responses", row if kept else {**row, "messages": ""})
            self._blank_prompts(db, "response_id", row["response_id"])
            return done

    def put_critique(self, row: Mapping[str, Any]) -> bool:
        """The same of a grade. What its judge read is not kept where the conversation is not."""
        with self._transaction() as db:
            done = self._put(db, "critiques", row)
            self._blank_prompts(db, "response_id", row["response_id"])
            return done

    def _blank_prompts(self, db: sqlite3.Connection, column: str, value: str) -> None:
        """The judge read the conversation too: nothing of it stays where that is not kept."""
        db.execute(
            f"UPDATE critiques SET prompt = '' WHERE {column}=? AND response_id IN "
            f"(SELECT response_id FROM responses WHERE {column}=? AND messages = '')",
            (value, value),
        )

    def _put(self, db: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> bool:
        session = row.get("session_id")
        if table != "forgotten" and session and self._gone(db, session, row["query_id"]):
            return False
        names = list(row)
        # a backup's rows name their columns
        columns = self._columns(db, table)
        if not set(names) <= columns:
            raise ValueError(f"{table} has no {', '.join(sorted(set(names) - columns))}")
        updates = ", ".join(f"{name}=excluded.{name}" for name in names if name != _KEYS[table])
        db.execute(
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({_KEYS[table]}) DO UPDATE SET {updates}",
            list(row.values()),
        )
        return True

    @staticmethod
    def _columns(db: sqlite3.Connection, table: str) -> set[str]:
        return {info["name"] for info in db.execute(f"PRAGMA table_info({table})")}

    def _gone(self, db: sqlite3.Connection, session_id: str, query_id: str) -> bool:
        """Whether the session was deleted after this query, whose id may be used again, or the query taken back."""
        at = _asked(query_id)
        names = (session_id, _taken_back(query_id))
        found = db.execute("SELECT 1 FROM forgotten WHERE session_id IN (?, ?) AND at>=?", (*names, at))
        return found.fetchone() is not None

    def vote(self, row: Mapping[str, Any], changed: Mapping[VotePart, Part]) -> tuple[Vote, Cast] | None:
        """Changes parts of the vote on an answer, each unless a later change of it is there already; None when nothing
        of it counts. row: the ids of what is rated and by whom.

        Else the vote as it is then, and when it was last changed: a later state has a larger one, also where an older
        change comes late. The same change again gives the same.
        """
        with self._transaction() as db:
            before = db.execute("SELECT * FROM votes WHERE response_id=?", (row["response_id"],)).fetchone()
            known = dict(Vote.load(dict(before)).parts) if before is not None else {}
            counted = {name: part for name, part in changed.items() if name not in known or known[name].at <= part.at}
            if not counted:
                return None
            vote = Vote(known | counted)
            cast = max(part.at for part in counted.values())
            if before is not None and (last := (before["cast_ms"], before["cast_no"])) >= cast:
                cast = last if vote.parts == known else (last[0], last[1] + 1)
            told = {"reward": vote.reward, "stars": vote.stars, "comment": vote.comment, "parts": vote.dump(),
                    "withdrawn": int(vote.withdrawn), "cast_ms": cast[0], "cast_no": cast[1]}  # fmt: skip
            return (vote, cast) if self._put(db, "votes", {**row, **told}) else None

    def forget(self, session_id: str, at: int) -> None:
        """Removes all that is known of a session, and refuses what still comes of it."""
        with self._transaction() as db:
            self._put(db, "forgotten", {"session_id": session_id, "at": at})
            for table in ("responses", "pairs", "critiques", "votes"):
                db.execute(f"DELETE FROM {table} WHERE session_id=?", (session_id,))
        self.overwrite()

    def take_back(self, session_id: str, query_ids: Sequence[str], at: int) -> None:
        """The same of some queries. Later answers of the session still count, but the conversation that led to them,
        in which these stand, is not kept: they are in no export."""
        with self._transaction() as db:
            for query_id in query_ids:
                self._put(db, "forgotten", {"session_id": _taken_back(query_id), "at": at})
                for table in ("responses", "pairs", "critiques", "votes"):
                    db.execute(f"DELETE FROM {table} WHERE query_id=?", (query_id,))
            db.execute(
                "UPDATE responses SET messages = '' WHERE session_id=? AND time>=? "
                "AND messages != '' AND (SELECT count(*) FROM json_each(messages) "
                "WHERE json_extract(messages, fullkey || '.role') IS NOT 'system') > 1",
                (session_id, min(map(_asked, query_ids), default=0)),
            )
            self._blank_prompts(db, "session_id", session_id)
        self.overwrite()

    def prune(self, before: int, after: tuple[str, int, str] = FIRST) -> tuple[int, tuple[str, int, str] | None]:
        """Removes answers older than `before` (ms) that nobody compared or rated, and their grades: of some rows behind
        a place. How many, and the place where to go on; None: nothing is left."""
        table, time_ms, name = after
        removed = 0
        with self._transaction() as db:
            page = db.execute(
                f"SELECT time, response_id, query_id FROM {table} WHERE time < ? AND (time, response_id) > (?, ?) "
                f"ORDER BY time, response_id LIMIT {_PRUNED}",
                (before, time_ms, name),
            ).fetchall()
            for row in page:
                found = "SELECT 1 FROM standing WHERE response_id=? UNION ALL SELECT 1 FROM pairs WHERE query_id=?"
                if db.execute(found, (row["response_id"], row["query_id"])).fetchone() is None:
                    removed += db.execute(f"DELETE FROM {table} WHERE response_id=?", (row["response_id"],)).rowcount
        if len(page) == _PRUNED:
            return removed, (table, page[-1]["time"], page[-1]["response_id"])
        return removed, None if table == "critiques" else ("critiques", 0, "")

    def expire(self, before: int) -> int:
        """Removes what is older than a moment (ms), whatever it is: at most some rows of each table. How many."""
        with self._transaction() as db:
            return sum(
                db.execute(
                    f"DELETE FROM {table} WHERE {_KEYS[table]} IN "
                    f"(SELECT {_KEYS[table]} FROM {table} WHERE {column} < ? ORDER BY {column} LIMIT {_PRUNED})",
                    (before,),
                ).rowcount
                for table, column in _TIMES.items()
            )

    def clear(self) -> int:
        """Removes everything, for a restore that replaces. The number of rows."""
        with self._transaction() as db:
            removed = sum(db.execute(f"DELETE FROM {table}").rowcount for table in TABLES)
        self.overwrite()
        return removed

    def gone(self, session_id: str, query_id: str) -> bool:
        """Whether nothing is kept any more of this query, because its session was deleted."""
        with self._in_the_way():
            return self._gone(self._db, session_id, query_id)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def response(self, response_id: str) -> dict[str, Any] | None:
        return next(iter(self.rows("SELECT * FROM responses WHERE response_id=?", response_id)), None)

    def verdicts(self, before: tuple[int, str], count: int) -> list[dict[str, Any]]:
        """The newest `count` grades and comparisons behind a place (the time in ms and the id of a verdict), newest
        first; `answers`: those to the same question that are still kept, by respondent."""
        grades = self.rows(
            "SELECT 'grade:' || response_id AS id, 'grade' AS kind, time, query_id, session_id, response_id, "
            "NULL AS winner, score, NULL AS score_a, NULL AS score_b, rubric, feedback AS words, judges FROM critiques "
            "WHERE time<=?1 AND (time, 'grade:' || response_id) < (?1, ?2) "
            "ORDER BY time DESC, response_id DESC LIMIT ?3",
            *before, count,
        )  # fmt: skip
        comparisons = self.rows(
            "SELECT 'comparison:' || query_id AS id, 'comparison' AS kind, time, query_id, session_id, "
            "NULL AS response_id, winner, NULL AS score, score_a, score_b, NULL AS rubric, reason AS words, judges "
            "FROM pairs "
            "WHERE time<=?1 AND (time, 'comparison:' || query_id) < (?1, ?2) "
            "ORDER BY time DESC, query_id DESC LIMIT ?3",
            *before, count,
        )  # fmt: skip
        page = sorted([*grades, *comparisons], key=lambda row: (row["time"], row["id"]), reverse=True)[:count]
        for row in page:
            row["answers"] = self.rows(
                "SELECT respondent, response_id, user_id, query, answer, config FROM responses "
                "WHERE response_id>=?1 || ':' AND response_id<?1 || ';' AND query_id=?1 ORDER BY respondent",
                row["query_id"],
            )
        return page

    def consent(self, user_id: str) -> bool | None:
        """None: the user was never asked."""
        found = self.rows("SELECT given FROM consents WHERE user_id=?", user_id)
        return bool(found[0]["given"]) if found else None

    def comparisons(self, intent: str | None = None) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT p.config_a, p.config_b, p.winner, p.forward, p.swapped, p.session_id, r.user_id, r.intent "
            "FROM pairs p LEFT JOIN responses r ON r.response_id = p.response_a "
            "WHERE ? IS NULL OR r.intent = ? ORDER BY p.query_id",
            intent, intent,
        )  # fmt: skip

    def ratings(self, intent: str | None = None) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT r.config, v.reward, v.session_id, v.user_id, r.intent "
            "FROM standing v JOIN responses r USING (response_id) "
            "WHERE ? IS NULL OR r.intent = ? ORDER BY v.response_id",
            intent, intent,
        )  # fmt: skip

    def judged_and_rated(self) -> list[dict[str, Any]]:
        """Answers with a grade, by one of several judges at least, and a vote."""
        return self.rows(
            "SELECT c.score, c.judges, v.reward FROM critiques c JOIN standing v USING (response_id) "
            "WHERE c.score IS NOT NULL"
        )

    def jury_grades(self) -> list[str]:
        """What several judges said of each answer, as JSON."""
        return [row["judges"] for row in self.rows("SELECT judges FROM critiques WHERE judges != ''")]

    def judged_pairs(self) -> list[dict[str, Any]]:
        """Verdicts with the lengths of both answers, in characters; None of one that is not known any more."""
        found = self.rows(
            "SELECT p.winner, p.forward, p.swapped, p.judges, length(a.answer) AS length_a, "
            "length(b.answer) AS length_b, p.config_a, p.config_b FROM pairs p "
            "LEFT JOIN responses a ON a.response_id = p.response_a "
            "LEFT JOIN responses b ON b.response_id = p.response_b ORDER BY p.query_id"
        )
        for row in found:
            row["model_a"], row["model_b"] = (orjson.loads(row.pop(f"config_{side}")).get("model") for side in "ab")
        return found

    def pair_rows(self, after: str, limit: int) -> list[dict[str, Any]]:
        """Verdicts whose two answers are both known with their conversations, with the votes on them, in the order of
        their query ids."""
        found = self.rows(
            "SELECT p.*, va.reward AS vote_a, vb.reward AS vote_b FROM pairs p "
            "JOIN responses a ON a.response_id = p.response_a JOIN responses b ON b.response_id = p.response_b "
            "LEFT JOIN standing va ON va.response_id = p.response_a "
            "LEFT JOIN standing vb ON vb.response_id = p.response_b "
            "WHERE p.query_id > ? AND a.messages != '' AND b.messages != '' ORDER BY p.query_id LIMIT ?",
            after, limit,
        )  # fmt: skip
        return [{**row, "a": self.response(row["response_a"]), "b": self.response(row["response_b"])} for row in found]

    def answer_rows(self, after: str, limit: int) -> list[dict[str, Any]]:
        """Answers that were graded or rated and have their conversation, in the order of their ids."""
        return self.rows(
            "SELECT r.*, c.score, c.feedback, c.rubric, c.prompt AS judged, coalesce(c.judges, '') AS judges, "
            "v.reward AS vote FROM responses r "
            "LEFT JOIN critiques c USING (response_id) LEFT JOIN standing v USING (response_id) "
            "WHERE r.response_id > ? AND r.messages != '' AND (c.score IS NOT NULL OR v.reward IS NOT NULL) "
            "ORDER BY r.response_id LIMIT ?",
            after, limit,
        )  # fmt: skip

    def consents(self) -> dict[str, bool]:
        return {row["user_id"]: bool(row["given"]) for row in self.rows("SELECT user_id, given FROM consents")}

    def counts(self) -> dict[str, int]:
        sources = {table: "standing" if table == "votes" else table for table in TABLES}
        return {table: self.rows(f"SELECT count(*) AS n FROM {source}")[0]["n"] for table, source in sources.items()}

    def tallies(self) -> dict[str, dict[str, int]]:
        """How many answers have which grade (`none`: no score could be had), winner and sentiment."""
        sign = "CASE WHEN reward > 0 THEN 'positive' WHEN reward < 0 THEN 'negative' ELSE 'neutral' END"
        asked = (
            ("grades", "critiques", "coalesce(score, 'none')", ("1", "2", "3", "4", "5", "none")),
            ("verdicts", "pairs", "winner", ("A", "B", "tie")),
            ("sentiments", "standing", sign, ("positive", "negative", "neutral")),
        )
        found: dict[str, dict[str, int]] = {}
        for what, table, of, values in asked:
            rows = self.rows(f"SELECT {of} AS name, count(*) AS n FROM {table} GROUP BY name")
            found[what] = dict.fromkeys(values, 0) | {str(row["name"]): row["n"] for row in rows}
        return found

    def census(self, before: int) -> tuple[int, int | None, int]:
        """How many answers, grades, comparisons and votes there are, the time of the oldest (ms), and how many are from
        before a moment (ms)."""
        every = " UNION ALL ".join(f"SELECT {column} AS time FROM {table}" for table, column in _TIMES.items())
        return self._census(every, before)

    def unused(self, before: int) -> tuple[int, int | None, int]:
        """The same of answers that nobody compared or rated."""
        return self._census(
            "SELECT time FROM responses r "
            "WHERE NOT EXISTS (SELECT 1 FROM standing v WHERE v.response_id = r.response_id) "
            "AND NOT EXISTS (SELECT 1 FROM pairs p WHERE p.query_id = r.query_id)",
            before,
        )

    def _census(self, times: str, before: int) -> tuple[int, int | None, int]:
        sql = f"SELECT count(*) AS kept, min(time) AS oldest, count(*) FILTER (WHERE time < ?) AS due FROM ({times})"
        (found,) = self.rows(sql, before)
        return found["kept"], found["oldest"], found["due"]

    # ── experiments ──────────────────────────────────────────────────────────────────────────────────────────

    def begin_experiment(self, row: Mapping[str, Any], active: Sequence[str]) -> str | None:
        """Keeps a new experiment; else says why not: one at a time, and each name once."""
        with self._transaction() as db:
            marks = ", ".join("?" * len(active))
            running = db.execute(f"SELECT name, state FROM experiments WHERE state IN ({marks})", active).fetchone()
            if running is not None:
                return (
                    f"the experiment {running['name']} is {running['state']}: one at a time; stop or promote it first"
                )
            if db.execute("SELECT 1 FROM experiments WHERE name=?", (row["name"],)).fetchone() is not None:
                return f"there was an experiment {row['name']} before: take another name"
            self._put(db, "experiments", row)
        return None

    def move_experiment(self, name: str, before: str, after: str, **fields: Any) -> bool:
        """Takes an experiment from one state to another, and sets columns with it; False when it is in another one."""
        columns = ", ".join(f"{column}=?" for column in ("state", *fields))
        with self._transaction() as db:
            done = db.execute(
                f"UPDATE experiments SET {columns} WHERE name=? AND state=?", (after, *fields.values(), name, before)
            )
            return done.rowcount == 1

    def experiment(self, name: str) -> dict[str, Any] | None:
        return next(iter(self.rows("SELECT * FROM experiments WHERE name=?", name)), None)

    def experiments(self, state: str | None = None) -> list[dict[str, Any]]:
        """All, or those in a state; the one that ended last, or goes on, first."""
        return self.rows(
            "SELECT * FROM experiments WHERE ? IS NULL OR state=? "
            "ORDER BY ended IS NULL DESC, ended DESC, started DESC",
            state, state,
        )  # fmt: skip

    def trial_rows(self, experiment: Mapping[str, Any], until: int | None) -> list[dict[str, Any]]:
        """Verdicts on questions since the experiment's start, in the order in which they came; `counts`: whether both
        answers are of its configurations."""
        return self.rows(
            "SELECT p.session_id, p.winner, r.intent, p.config_a=? AND p.config_b=? AS counts FROM pairs p "
            "LEFT JOIN responses r ON r.response_id = p.response_a "
            "WHERE CAST(p.query_id AS INTEGER) >= ? AND (? IS NULL OR CAST(p.query_id AS INTEGER) < ?) "
            "ORDER BY p.time, p.query_id",
            experiment["config_a"], experiment["config_b"], experiment["started"], until, until,
        )  # fmt: skip

    def vote_counts(self, config: str, since: int, until: int | None) -> dict[str, int]:
        """People's votes on what A answered with a configuration in a time."""
        (found,) = self.rows(
            "SELECT count(*) FILTER (WHERE v.reward > 0) AS positive, count(*) FILTER (WHERE v.reward < 0) AS negative "
            "FROM standing v JOIN responses r USING (response_id) WHERE r.respondent = 'A' AND r.config = ? "
            "AND r.time >= ? AND (? IS NULL OR r.time < ?)",
            config, since, until, until,
        )  # fmt: skip
        return found

    # ── backup ───────────────────────────────────────────────────────────────────────────────────────────────

    def page(self, table: str, after: str, limit: int) -> list[dict[str, Any]]:
        """Rows of a table behind a key, in its order."""
        key = _KEYS[_known(table)]
        return self.rows(f"SELECT * FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT ?", after, limit)

    def load(self, table: str, rows: list[dict[str, Any]], *, replace: bool) -> int:
        """Puts rows of a backup back; those that are there stay unless `replace`. The number written."""
        key, written = _KEYS[_known(table)], 0
        with self._transaction() as db:
            for row in rows:
                there = db.execute(f"SELECT 1 FROM {table} WHERE {key}=?", (row[key],)).fetchone()
                if there is not None and replace:
                    # as a whole: an earlier release's row does not name every column
                    db.execute(f"DELETE FROM {table} WHERE {key}=?", (row[key],))
                if there is None or replace:
                    written += self._put(db, table, row)
        return written


def _known(table: str) -> str:
    if table not in TABLES:
        raise ValueError(f"there is no table {table}")
    return table


def key_of(table: str, row: Mapping[str, Any]) -> str:
    return str(row[_KEYS[table]])
