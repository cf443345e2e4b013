"""A ranking of respondent configurations from comparisons: Bradley–Terry with intervals.

Each comparison says which of two answers is better, once with A first and once with B first. Both verdicts are
observations of the model logit P(first wins) = s(first) − s(second) + bias: Bradley and Terry (1952) with the order
effect of Davidson and Beaver (1977). The bias of the judge for a position is thereby estimated instead of mixed into
the strengths. Intervals are bias-corrected percentiles of a bootstrap over comparisons (Efron and Tibshirani 1993,
chapter 14), so that the two verdicts of one comparison need not be independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Outcome = Literal["A", "B", "tie"]
Floats = NDArray[np.float64]
# The places of the two among the names, the winner, and the winners of the two orders.
Kind = tuple[int, int, Outcome, Outcome | None, Outcome | None]

# Half a drawn comparison's weight against everybody's mean: keeps who never lost at a finite strength.
_PRIOR = 0.002
_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Comparison:
    """`a` and `b` name configurations. `forward` is the winner when a stood first, `swapped` when b did; an outcome
    without known orders has its `winner` alone, and tells nothing about the judge's bias.
    """

    a: Hashable
    b: Hashable
    winner: Outcome
    forward: Outcome | None = None
    swapped: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration. `strength` is a log-odds, 0 for the mean of all; `win_rate` is the chance against the others,
    averaged. Each with the bounds of its interval."""

    name: Any
    strength: float
    low: float
    high: float
    win_rate: float
    win_rate_low: float
    win_rate_high: float
    comparisons: int
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """`rows`: the strongest first. `bias`: log-odds that the judge adds to whichever answer stands first, None without
    comparisons in both orders; `disagreement`: share of comparisons whose two orders name different answers."""

    rows: list[Ranked]
    comparisons: int
    bias: float | None
    bias_low: float | None
    bias_high: float | None
    disagreement: float | None


def rank(comparisons: Sequence[Comparison], *, samples: int = 500, level: float = 0.95, seed: int = 0) -> Ranking:
    """The same comparisons give the same ranking, whatever their order.

    samples: bootstrap repetitions. level: of the intervals.
    """
    names = sorted({name for c in comparisons for name in (c.a, c.b)}, key=str)
    both = [c for c in comparisons if c.forward is not None and c.swapped is not None]
    if len(names) < 2:
        return Ranking([], len(comparisons), None, None, None, _disagreement(both))
    position = {name: n for n, name in enumerate(names)}
    cells = Counter((position[c.a], position[c.b], c.winner, c.forward, c.swapped) for c in comparisons)
    unseen = _unseen(cells)
    kinds = sorted({*cells, *unseen}, key=str)
    counts = np.array([cells[kind] for kind in kinds], dtype=np.float64)
    design = _Design(kinds, len(names))
    estimate = design.fit(counts[None, :])[0]
    drawn_from = counts + np.array([unseen.get(kind, 0.0) for kind in kinds])
    draws = np.random.default_rng(seed).multinomial(len(comparisons), drawn_from / drawn_from.sum(), size=samples)
    resampled = design.fit(draws.astype(np.float64), start=estimate)
    # what the samples would come to if the estimate had no bias of its own
    middle = design.fit(drawn_from[None, :])[0]
    strengths, spread = estimate[:-1], _around(estimate, _interval(middle, resampled, level))
    rates = _win_rates(estimate[None, :-1])[0]
    of_rates = _interval(_win_rates(middle[None, :-1])[0], _win_rates(resampled[:, :-1]), level)
    rate_spread = _around(rates, of_rates)
    low, high = spread[:, -1]
    tally = _tally(comparisons)
    rows = [
        Ranked(
            name=name,
            strength=float(strengths[n]),
            low=float(spread[0, n]),
            high=float(spread[1, n]),
            win_rate=float(rates[n]),
            win_rate_low=float(rate_spread[0, n]),
            win_rate_high=float(rate_spread[1, n]),
            comparisons=sum(tally[name, end] for end in ("win", "tie", "loss")),
            wins=tally[name, "win"],
            ties=tally[name, "tie"],
            losses=tally[name, "loss"],
        )
        for n, name in enumerate(names)
    ]
    rows.sort(key=lambda row: (-row.strength, str(row.name)))
    if not both:
        return Ranking(rows, len(comparisons), None, None, None, None)
    return Ranking(rows, len(comparisons), float(estimate[-1]), float(low), float(high), _disagreement(both))


def _unseen(cells: Mapping[Kind, int]) -> dict[Kind, float]:
    """What resampling adds to the comparisons that were seen: one win and one loss for each configuration.

    Five wins out of five say little, but every sample of them is five wins. With this the interval of one that always
    won is about that of Clopper and Pearson, and among hundreds of comparisons it makes no difference.
    """
    pairs = {tuple(sorted(kind[:2])): kind[3] is not None for kind in cells if kind[0] != kind[1]}
    opponents = Counter(place for pair in pairs for place in pair)
    added: dict[Kind, float] = {}
    for (a, b), ordered in pairs.items():
        weight = 1.0 / min(opponents[a], opponents[b])
        sides: tuple[Outcome, ...] = ("A", "B")
        for side in sides:
            added[a, b, side, side if ordered else None, side if ordered else None] = weight
    return added


def _interval(middle: Floats, draws: Floats, level: float) -> Floats:
    """Lower and upper bounds of each parameter; `draws` has one row per repetition."""
    normal = NormalDist()
    reach = normal.inv_cdf(0.5 + level / 2)
    bounds = np.empty((2, len(middle)))
    for n, (value, values) in enumerate(zip(middle, draws.T, strict=True)):
        # ties count half: a discrete parameter is not off its middle for that
        below = (np.mean(values < value) + np.mean(values <= value)) / 2
        shift = 2 * normal.inv_cdf(float(np.clip(below, 0.001, 0.999)))
        bounds[:, n] = np.quantile(values, [normal.cdf(shift - reach), normal.cdf(shift + reach)])
    return bounds


def _around(estimate: Floats, bounds: Floats) -> Floats:
    """The estimate from a handful of comparisons may lie beyond what resampling shows: an interval holds it anyway."""
    return np.array([np.minimum(bounds[0], estimate), np.maximum(bounds[1], estimate)])


class _Design:
    """The distinct comparisons as rows of a logistic regression; its fits are done for many weightings at once."""

    def __init__(self, kinds: Sequence[Kind], size: int) -> None:
        rows: list[tuple[int, Floats, float]] = []
        for kind, (a, b, winner, forward, swapped) in enumerate(kinds):
            towards = np.zeros(size + 1)
            towards[a], towards[b] = 1.0, -1.0
            if forward is None or swapped is None:
                rows.append((kind, towards, _share(winner)))
                continue
            for order, verdict in ((1.0, forward), (-1.0, swapped)):
                row = towards.copy()
                row[-1] = order
                rows.append((kind, row, _share(verdict)))
        self._kind = np.array([kind for kind, _, _ in rows])
        self._x = np.array([row for _, row, _ in rows])
        self._y = np.array([share for _, _, share in rows])
        self._ridge = _PRIOR * np.eye(size + 1)
        # strengths are relative: their mean is held at nought
        self._ridge[:-1, :-1] += 1.0 / size
        self._size = size

    def fit(self, counts: Floats, start: Floats | None = None) -> Floats:
        """Parameters (strengths, bias) for each row of `counts`, by Newton's method."""
        weights = counts[:, self._kind]
        theta = np.zeros((len(counts), self._size + 1)) if start is None else np.tile(start, (len(counts), 1))
        for _ in range(_ROUNDS):
            chance = 1.0 / (1.0 + np.exp(-theta @ self._x.T))
            gradient = (weights * (self._y - chance)) @ self._x - theta @ self._ridge
            curvature = np.einsum("bn,ni,nj->bij", weights * chance * (1 - chance), self._x, self._x) + self._ridge
            step = np.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
            # a far step from a flat place would overshoot
            step *= np.minimum(1.0, 2.0 / np.maximum(np.abs(step).max(axis=1, keepdims=True), 1e-12))
            theta += step
            if np.abs(step).max() < 1e-8:
                break
        theta[:, :-1] -= theta[:, :-1].mean(axis=1, keepdims=True)
        return np.asarray(theta)


def _share(verdict: Outcome) -> float:
    """What the verdict gives to A."""
    return {"A": 1.0, "B": 0.0, "tie": 0.5}[verdict]


def _win_rates(strengths: Floats) -> Floats:
    """Chance of each against the others, averaged; one row per fit."""
    size = strengths.shape[1]
    chance = 1.0 / (1.0 + np.exp(strengths[:, None, :] - strengths[:, :, None]))
    return np.asarray((chance.sum(axis=2) - 0.5) / (size - 1))


def _tally(comparisons: Sequence[Comparison]) -> Counter[tuple[Hashable, str]]:
    tally: Counter[tuple[Hashable, str]] = Counter()
    for c in comparisons:
        end_a, end_b = {"A": ("win", "loss"), "B": ("loss", "win"), "tie": ("tie", "tie")}[c.winner]
        tally[c.a, end_a] += 1
        tally[c.b, end_b] += 1
    return tally


def _disagreement(both: Sequence[Comparison]) -> float | None:
    if not both:
        return None
    return sum(c.forward != c.swapped for c in both) / len(both)


# ── people ───────────────────────────────────────────────────────────────────────────────────────────────────────

# What a rated answer is compared with: the least that its reader would have been content with.
BAR = "(what readers expect)"


def from_ratings(ratings: Sequence[tuple[Hashable, float]]) -> list[Comparison]:
    """People's votes on single answers as comparisons with what they expect: a vote above 0 is won, below 0 lost.

    Strengths are then the log-odds of a good vote (a Bradley–Terry model with one common opponent).
    """
    return [Comparison(name, BAR, "A" if reward > 0 else "B" if reward < 0 else "tie") for name, reward in ratings]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often judge and people say the same; `kappa` is Cohen's, beyond chance. None without enough cases."""

    cases: int
    share: float | None
    kappa: float | None


def agreement(pairs: Sequence[tuple[bool, bool]]) -> Agreement:
    """`pairs`: whether the judge and whether the person thought well of the same answer."""
    if not pairs:
        return Agreement(0, None, None)
    n = len(pairs)
    share = sum(judge == person for judge, person in pairs) / n
    judge_yes, person_yes = sum(j for j, _ in pairs) / n, sum(p for _, p in pairs) / n
    chance = judge_yes * person_yes + (1 - judge_yes) * (1 - person_yes)
    return Agreement(n, share, None if chance == 1 else (share - chance) / (1 - chance))
