"""Whether the judge can be trusted: what it agrees with, and what it is led by besides the answers' quality.

Agreement with people is Cohen's kappa (1960) with the large-sample interval of Fleiss, Cohen and Everitt (1969).
Shares have Wilson's interval (1927). The pull of length is the slope of a logistic regression of "A won" on the
logarithm of how much longer A's answer is; its constant is what A and B differ in otherwise.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from shared.shares import Z, wilson

# With fewer cases than this nothing is said about the judge.
FEW = 30
_ROUNDS = 50
# Keeps the slope finite where length tells winners from losers without an exception: a normal prior, very wide.
_PRIOR = 0.01
_SPLIT_OFTEN, _HARDLY, _UNREAD_OFTEN = 0.3, 0.2, 0.2


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure with its 95 % interval, from so many cases; None without enough to tell."""

    cases: int
    value: float | None
    low: float | None
    high: float | None


_NOTHING = (None, None, None)


def share(times: int, cases: int) -> Measured:
    """A share with Wilson's interval."""
    if not cases:
        return Measured(0, *_NOTHING)
    return Measured(cases, times / cases, *wilson(times, cases))


def kappa(pairs: Sequence[tuple[bool, bool]]) -> Measured:
    """Return Cohen's kappa; no value where both always say the same.

    pairs: whether the judge and whether the person liked the same answer.
    """
    n = len(pairs)
    each = (
        {(i, j): sum(pair == (i, j) for pair in pairs) / n for i in (True, False) for j in (True, False)} if n else {}
    )
    judge = {i: sum(part for (said, _), part in each.items() if said == i) for i in (True, False)}
    person = {j: sum(part for (_, said), part in each.items() if said == j) for j in (True, False)}
    chance = sum(judge[i] * person[i] for i in (True, False))
    if not n or chance > 1 - 1e-12:
        return Measured(n, *_NOTHING)
    agreed = each[True, True] + each[False, False]
    value = (agreed - chance) / (1 - chance)
    same = sum(each[i, i] * ((1 - chance) - (person[i] + judge[i]) * (1 - agreed)) ** 2 for i in (True, False))
    other = (1 - agreed) ** 2 * sum(each[i, not i] * (person[i] + judge[not i]) ** 2 for i in (True, False))
    variance = (same + other - (agreed * chance - 2 * chance + agreed) ** 2) / (n * (1 - chance) ** 4)
    reach = Z * math.sqrt(max(0.0, variance))
    return Measured(n, value, max(-1.0, value - reach), min(1.0, value + reach))


def liked(rated: Sequence[Mapping[str, Any]]) -> list[tuple[bool, bool]]:
    """Return whether the judge and whether the person liked each answer.

    rated: rows with `score` and `reward`; a score of 3 and a withdrawn vote are neither, and left out.
    """
    return [(row["score"] >= 4, row["reward"] > 0) for row in rated if row["score"] != 3 and row["reward"]]


def agreement(rated: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cases, the share of them in which judge and person agree, and Cohen's kappa.

    rated: as for `liked`. The share is None without cases, kappa also where one of them always says the same.
    """
    pairs = liked(rated)
    return {
        "cases": len(pairs),
        "share": share(sum(judge == person for judge, person in pairs), len(pairs)).value,
        "kappa": kappa(pairs).value,
    }


def length_pull(verdicts: Sequence[tuple[float, bool]]) -> Measured:
    """Return the slope of a logistic regression of "A won" on how much longer A's answer is.

    verdicts: the logarithm of the ratio of lengths, and whether A won. No value with fewer than FEW verdicts, or where
    all lengths are alike.
    """
    # Imported at first use: an idle reward service does not need its memory.
    import numpy as np

    n = len(verdicts)
    if n < FEW or len({x for x, _ in verdicts}) < 2:
        return Measured(n, *_NOTHING)
    inputs = np.array([(1.0, x) for x, _ in verdicts])
    won = np.array([won for _, won in verdicts])
    weights, curvature = np.zeros(2), np.eye(2)
    for _ in range(_ROUNDS):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        curvature = _PRIOR * np.eye(2) + (inputs.T * (chance * (1 - chance))) @ inputs
        step = np.linalg.solve(curvature, inputs.T @ (won - chance) - _PRIOR * weights)
        # A long step from a flat place would overshoot.
        weights += step * min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-9:
            break
    reach = Z * math.sqrt(float(np.linalg.inv(curvature)[1, 1]))
    slope = float(weights[1])
    return Measured(n, slope, slope - reach, slope + reach)


def report(
    rated: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    grades: Mapping[str, int],
    judges: Sequence[str],
    by_several: Sequence[str] = (),
) -> dict[str, Any]:
    """What is known of the judge, and of each where several judge.

    rated: answers with `score` and `reward`. pairs: verdicts with `winner`, `forward`, `swapped`, `model_a`, `model_b`,
    and `length_a`, `length_b` (characters; None where the answer is not known any more). Both with `judges`: what each
    of several said, as JSON; empty where one judged alone. grades: how many answers have which score, `none` those
    without. judges: the models that judge now. by_several: of all answers that several judged, what each said.
    """
    found = _measured(rated, pairs, share(grades.get("none", 0), sum(grades.values())), judges)
    return {
        "judge": " + ".join(judges) or None,
        **{name: asdict(value) for name, value in found.items()},
        "warnings": _warnings(judges, found),
        "judges": [
            {
                "judge": name,
                **{what: asdict(value) for what, value in each.items()},
                "warnings": _warnings([name], each),
            }
            for name, each in _by_judge(rated, pairs, by_several).items()
        ],
    }


def _by_judge(
    rated: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], by_several: Sequence[str]
) -> dict[str, dict[str, Measured]]:
    """The same figures of each judge by itself, of what several judged."""
    rated_by, pairs_by, said_by = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list), Counter[str]()
    silent_by = Counter[str]()
    for rows, by in ((rated, rated_by), (pairs, pairs_by)):
        for row in rows:
            for said in orjson.loads(row["judges"]) if row.get("judges") else ():
                by[said["model"]].append({**row, **said})
    for text in by_several:
        for said in orjson.loads(text):
            said_by[said["model"]] += 1
            silent_by[said["model"]] += said["score"] is None
    return {
        name: _measured(
            [row for row in rated_by[name] if row["score"] is not None],
            [row for row in pairs_by[name] if row["winner"] is not None],
            share(silent_by[name], said_by[name]),
            [name],
        )
        for name in sorted({*rated_by, *pairs_by, *said_by})
    }


def _measured(
    rated: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], unread: Measured, judges: Sequence[str]
) -> dict[str, Measured]:
    both = [(pair["forward"], pair["swapped"]) for pair in pairs if pair["forward"] and pair["swapped"]]
    first = both.count(("A", "B"))
    split = first + both.count(("B", "A"))
    decided = [pair for pair in pairs if pair["winner"] != "tie"]
    longer = [
        (math.log(pair["length_a"] / pair["length_b"]), pair["winner"] == "A")
        for pair in decided
        if pair["length_a"] and pair["length_b"]
    ]
    own = [
        pair["winner"] == ("A" if pair["model_a"] in judges else "B")
        for pair in decided
        if (pair["model_a"] in judges) != (pair["model_b"] in judges)
    ]
    return {
        "agreement": kappa(liked(rated)),
        "disagreement": share(split, len(both)),
        "first_wins": share(first, split),
        "length": length_pull(longer),
        "own_model": share(sum(own), len(own)),
        "unread": unread,
    }


def _warnings(judges: Sequence[str], found: Mapping[str, Measured]) -> list[str]:
    """In plain words, why the judge should not be trusted; what is not known is said as well."""
    agreed, split, first = found["agreement"], found["disagreement"], found["first_wins"]
    length, own, unread = found["length"], found["own_model"], found["unread"]
    said = []
    if agreed.cases < FEW:
        said.append(
            f"{agreed.cases} answers have a grade and a vote: whether judge and people agree is not known before there "
            f"are {FEW}"
        )
    elif agreed.value is None:
        said.append("judge or people always say the same: whether they agree cannot be told")
    elif agreed.value < _HARDLY:
        said.append(f"judge and people agree hardly more than by chance (kappa {agreed.value:.2f})")
    if split.cases >= FEW and split.value is not None and split.value > _SPLIT_OFTEN:
        said.append(
            f"in {split.value:.0%} of the comparisons the judge names another winner when the answers change places"
        )
    if first.cases >= FEW and first.low is not None and first.high is not None and not first.low <= 0.5 <= first.high:
        place = "first" if first.low > 0.5 else "second"
        said.append(f"the judge prefers whichever answer stands {place}")
    if length.value is not None and length.low is not None and length.high is not None:
        if length.low > 0:
            odds = 2**length.value
            said.append(
                f"longer answers win: one that is twice as long has {odds:.1f} times the odds, whatever it says"
            )
        elif length.high < 0:
            said.append("shorter answers win, whatever they say")
    if own.cases:
        told = (
            "" if own.value is None or own.cases < FEW else f"; it won {own.value:.0%} of {own.cases} decided verdicts"
        )
        said.append(
            f"{' + '.join(judges)} judges answers of its own{told}: models tend to like what they would have written "
            "themselves"
        )
    if unread.cases >= FEW and unread.value is not None and unread.value > _UNREAD_OFTEN:
        said.append(f"{unread.value:.0%} of the grades could not be had or read")
    return said
