"""Rankings by the judge's comparisons and by people's votes, over all and for each intent. Rows in, values out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from services.reward.ranking import BAR, Comparison, Ranking, agreement, from_ratings, rank


def leaderboard(
    pairs: Sequence[Mapping[str, Any]],
    ratings: Sequence[Mapping[str, Any]],
    both: Sequence[Mapping[str, Any]],
    samples: int,
) -> dict[str, Any]:
    by_intent: dict[str, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = defaultdict(lambda: ([], []))
    for pair in pairs:
        by_intent[pair["intent"] or "unknown"][0].append(pair)
    for rating in ratings:
        by_intent[rating["intent"]][1].append(rating)
    agreed = agreement([(row["score"] >= 4, row["reward"] > 0) for row in both if row["score"] != 3 and row["reward"]])
    return {
        "judge": _by_judge(pairs, samples),
        "people": _by_people(ratings, samples),
        "agreement": asdict(agreed),
        "intents": {
            intent: {"judge": _by_judge(own_pairs, samples), "people": _by_people(own_ratings, samples)}
            for intent, (own_pairs, own_ratings) in sorted(by_intent.items())
        },
    }


def _by_judge(pairs: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    return _shown(
        rank(
            [
                Comparison(pair["config_a"], pair["config_b"], pair["winner"], pair["forward"], pair["swapped"])
                for pair in pairs
                # one configuration against itself tells nothing of it
                if pair["config_a"] != pair["config_b"]
            ],
            samples=samples,
        )
    )


def _by_people(ratings: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    votes: list[tuple[Hashable, float]] = [(rating["config"], rating["reward"]) for rating in ratings]
    return _shown(rank(from_ratings(votes), samples=samples))


def _shown(ranking: Ranking) -> dict[str, Any]:
    value = asdict(ranking)
    for row in value["rows"]:
        row["config"] = None if row["name"] == BAR else orjson.loads(row["name"])
        row["name"] = row["name"] if row["name"] == BAR else label(row["config"])
    return value


def label(config: Mapping[str, Any]) -> str:
    """A configuration in a few words: model, sampling, prompt."""
    options = " ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                       for name, value in sorted((config.get("options") or {}).items()))  # fmt: skip
    parts = [str(config.get("model", "?")), options, f"prompt {v}" if (v := config.get("prompt_version")) else ""]
    return " · ".join(part for part in parts if part)
