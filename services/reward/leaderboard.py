"""Rankings by the judge's comparisons and by people's votes, over all and for each intent. Rows in, values out."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import orjson

from services.reward.ranking import BAR, Comparison, Ranking, from_rating, rank
from services.reward.reliability import agreement

# With fewer users than this, drawing users would say more of who happens to be there than of the configurations
# (Cameron, Gelbach and Miller 2008 on few clusters): sessions are drawn then.
_USERS = 20
Row = Mapping[str, Any]


class Leaderboard:
    """Makes leaderboards; a ranking whose rows are those of the last time is not made again.

    Used by any thread; one makes a leaderboard at a time, and those that wait find it made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[bytes, dict[str, Any]] = {}

    def make(self, pairs: Sequence[Row], ratings: Sequence[Row], both: Sequence[Row], samples: int) -> dict[str, Any]:
        """`pairs`: verdicts; `ratings`: votes; `both`: answers with a grade and a vote, rows of the store each.

        samples: bootstrap repetitions.
        """
        with self._lock:
            used: dict[bytes, dict[str, Any]] = {}

            def ranked(rows: Sequence[Row], comparison: Callable[[Row, Hashable], Comparison]) -> dict[str, Any]:
                key = sha256(orjson.dumps([samples, comparison.__name__, rows])).digest()
                used[key] = used.get(key) or self._made.get(key) or _ranking(rows, comparison, samples)
                return used[key]

            def rankings(pairs: Sequence[Row], ratings: Sequence[Row]) -> dict[str, Any]:
                # one configuration against itself tells nothing of it
                apart = [pair for pair in pairs if pair["config_a"] != pair["config_b"]]
                return {"judge": ranked(apart, _judged), "people": ranked(ratings, _rated)}

            of_intent: dict[str, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
            for pair in pairs:
                of_intent[pair["intent"] or "unknown"][0].append(pair)
            for rating in ratings:
                of_intent[rating["intent"]][1].append(rating)
            board = {
                **rankings(pairs, ratings),
                "agreement": agreement(both),
                "intents": {intent: rankings(*own) for intent, own in sorted(of_intent.items())},
            }
            self._made = used
            return board


def _judged(pair: Row, cluster: Hashable) -> Comparison:
    return Comparison(pair["config_a"], pair["config_b"], pair["winner"], pair["forward"], pair["swapped"], cluster)


def _rated(rating: Row, cluster: Hashable) -> Comparison:
    return from_rating(rating["config"], rating["reward"], cluster)


def _ranking(rows: Sequence[Row], comparison: Callable[[Row, Hashable], Comparison], samples: int) -> dict[str, Any]:
    """The ranking as it is shown, by what is drawn as one when it is asked how sure it is."""
    users = {row["user_id"] for row in rows}
    # whose a verdict is may not be known: its answer was removed
    unit = "user" if len(users) >= _USERS and None not in users else "session"
    ranking = rank([comparison(row, row[f"{unit}_id"]) for row in rows], samples=samples)
    value = asdict(ranking)
    for row in value["rows"]:
        row["config"] = None if row["name"] == BAR else orjson.loads(row["name"])
        row["name"] = row["name"] if row["name"] == BAR else label(row["config"])
    return {**value, "resampled": unit, "note": _note(ranking)}


def _note(ranking: Ranking) -> str | None:
    if ranking.groups < 2:
        return None
    return (
        f"{ranking.groups} groups of configurations were never compared with each other, directly or by way of others: "
        "the order holds inside a group only, and nothing can be said between them. An experiment whose B is a "
        "configuration of another group connects them."
    )


def label(config: Mapping[str, Any]) -> str:
    """A configuration in a few words: model, sampling, prompt."""
    options = " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                       for name, value in sorted((config.get("options") or {}).items()))  # fmt: skip
    parts = [str(config.get("model", "?")), options, f"prompt {v}" if (v := config.get("prompt_version")) else ""]
    return " · ".join(part for part in parts if part)
