"""What is known of answers, and of what people and the judge think of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.reward.database import KEYS, TABLES, Database, asked_ms, taken_back
from services.reward.votes import Cast, Part, Vote
from shared.contracts import VotePart

# Where each of them says when it was.
_TIMES = {"responses": "time", "pairs": "time", "critiques": "time", "votes": "cast_ms"}
# Rows that pruning looks at in one transaction.
_PRUNED = 200
# Where pruning begins: the table, and the time and id of the row before.
FIRST = ("responses", 0, "")


def config_name(config: Mapping[str, Any]) -> str:
    """One text for one configuration: model, sampling, prompt version, in a fixed order."""
    kept = {name: value for name, value in config.items() if value not in (None, "", {})}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()


class Store(Database):
    """Used by one thread at a time."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def put_response(self, row: Mapping[str, Any], turns: Sequence[str]) -> bool:
        """Keeps an answer, to a conversation with the `turns` (ids of their queries). Where one of them was taken
        back meanwhile, the conversation is not kept: see `take_back`. False when its session was deleted."""
        with self._transaction() as db:
            kept = not any(self._gone(db, row["session_id"], turn) for turn in turns)
            done = self._put(db, "responses", row if kept else {**row, "messages": ""})
            self._blank_prompts(db, "response_id", row["response_id"])
            return done

    def put_critique(self, row: Mapping[str, Any]) -> bool:
        """Keeps a grade. What its judge read is not kept where the conversation is not."""
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
                self._put(db, "forgotten", {"session_id": taken_back(query_id), "at": at})
                for table in ("responses", "pairs", "critiques", "votes"):
                    db.execute(f"DELETE FROM {table} WHERE query_id=?", (query_id,))
            db.execute(
                "UPDATE responses SET messages = '' WHERE session_id=? AND time>=? "
                "AND messages != '' AND (SELECT count(*) FROM json_each(messages) "
                "WHERE json_extract(messages, fullkey || '.role') IS NOT 'system') > 1",
                (session_id, min(map(asked_ms, query_ids), default=0)),
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
                    f"DELETE FROM {table} WHERE {KEYS[table]} IN "
                    f"(SELECT {KEYS[table]} FROM {table} WHERE {column} < ? ORDER BY {column} LIMIT {_PRUNED})",
                    (before,),
                ).rowcount
                for table, column in _TIMES.items()
            )

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
        """The same of answers that nobody compared or rated, and of their grades: what `prune` removes."""
        each = " UNION ALL ".join(
            f"SELECT time FROM {table} r "
            "WHERE NOT EXISTS (SELECT 1 FROM standing v WHERE v.response_id = r.response_id) "
            "AND NOT EXISTS (SELECT 1 FROM pairs p WHERE p.query_id = r.query_id)"
            for table in ("responses", "critiques")
        )
        return self._census(each, before)

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
