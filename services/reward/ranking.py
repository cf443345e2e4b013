"""A ranking of respondent configurations from comparisons: Bradley–Terry with intervals.

Each comparison says which of two answers is better, once with A first and once with B first. Both verdicts are
observations of the model logit P(first wins) = s(first) − s(second) + bias: Bradley and Terry (1952) with the order
effect of Davidson and Beaver (1977). The bias of the judge for a position is thereby estimated instead of mixed into
the strengths.

Only configurations that are connected by comparisons, directly or by way of others, can be ranked against each other
(Ford 1957): each connected group has a ranking and a mean of its own.

Intervals are bias-corrected percentiles of a bootstrap (Efron and Tibshirani 1993, chapter 14) over clusters of
comparisons (Davison and Hinkley 1997, section 3.8): what one conversation or one user says more than once is not
independent evidence, and the two verdicts of a comparison are not either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Outcome = Literal["A", "B", "tie"]
Floats = NDArray[np.float64]

# Half a drawn comparison's weight against everybody's mean: keeps who never lost at a finite strength.
_PRIOR = 0.002
_ROUNDS = 60
# A step this small ends the search: in log-odds, far below what any interval shows.
_NEAR = 1e-5
# Numbers held at a time while samples are fitted.
_NUMBERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """`a` and `b` name configurations. `forward` is the winner when a stood first, `swapped` when b did; an outcome
    without known orders has its `winner` alone, and tells nothing about the judge's bias. Comparisons of one `cluster`
    (a session, a user) are drawn together; one without is alone.
    """

    a: Hashable
    b: Hashable
    winner: Outcome
    forward: Outcome | None = None
    swapped: Outcome | None = None
    cluster: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration. `group`: the connected group it belongs to, from 1; strengths and win rates are of that group
    alone. `strength` is a log-odds, 0 for the group's mean; `win_rate` is the chance against the others of the group,
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
    group: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """`rows`: by group, the one with most comparisons first, and in each the strongest first. `groups`: how many there
    are; members of different ones cannot be compared. `clusters`: independent pieces of evidence that were drawn from.
    `bias`: log-odds that the judge adds to whichever answer stands first, None without comparisons in both orders;
    `disagreement`: share of comparisons whose two orders name different answers."""

    rows: list[Ranked]
    comparisons: int
    bias: float | None
    bias_low: float | None
    bias_high: float | None
    disagreement: float | None
    groups: int = 0
    clusters: int = 0


def rank(comparisons: Sequence[Comparison], *, samples: int = 500, level: float = 0.95, seed: int = 0) -> Ranking:
    """The same comparisons give the same ranking, whatever their order.

    samples: bootstrap repetitions. level: of the intervals.
    """
    both = [c for c in comparisons if c.forward is not None and c.swapped is not None]
    names = sorted({name for c in comparisons for name in (c.a, c.b) if c.a != c.b}, key=str)
    if not names:
        return Ranking([], len(comparisons), None, None, None, _disagreement(both))
    tally = _tally(comparisons)
    group = _groups(comparisons, tally)
    model = _Model(comparisons, {name: n for n, name in enumerate(names)}, [group[name] for name in names])
    estimate, middle, resampled = model.bootstrap(samples, seed)
    strengths, spread = estimate[:-1], _around(estimate, _interval(middle, resampled, level))
    rates = model.win_rates(estimate[None, :-1])[0]
    of_rates = _interval(model.win_rates(middle[None, :-1])[0], model.win_rates(resampled[:, :-1]), level)
    rate_spread = _around(rates, of_rates)
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
            group=group[name],
        )
        for n, name in enumerate(names)
    ]
    rows.sort(key=lambda row: (row.group, -row.strength, str(row.name)))
    groups = max(group.values())
    if not both:
        return Ranking(rows, len(comparisons), None, None, None, None, groups, model.clusters)
    bias, low, high = (float(value) for value in (estimate[-1], *spread[:, -1]))
    return Ranking(rows, len(comparisons), bias, low, high, _disagreement(both), groups, model.clusters)


def _groups(comparisons: Iterable[Comparison], tally: Mapping[tuple[Hashable, str], int]) -> dict[Hashable, int]:
    """The number of each name's connected group, from 1: the one with most comparisons first."""
    beside: dict[Hashable, set[Hashable]] = defaultdict(set)
    for c in comparisons:
        if c.a != c.b:
            beside[c.a].add(c.b)
            beside[c.b].add(c.a)
    found: list[set[Hashable]] = []
    left = set(beside)
    while left:
        members, new = set[Hashable](), {left.pop()}
        while new:
            members |= new
            new = {other for name in new for other in beside[name]} - members
        left -= members
        found.append(members)
    weight = [sum(tally[name, end] for name in members for end in ("win", "tie", "loss")) for members in found]
    order = sorted(range(len(found)), key=lambda n: (-weight[n], min(map(str, found[n]))))
    return {name: place for place, n in enumerate(order, 1) for name in found[n]}


def _interval(middle: Floats, draws: Floats, level: float) -> Floats:
    """Lower and upper bounds of each parameter; `draws` has one row per repetition."""
    normal = NormalDist()
    reach = normal.inv_cdf(0.5 + level / 2)
    bounds = np.empty((2, len(middle)))
    for n, value in enumerate(middle):
        values = draws[:, n]
        # ties count half: a discrete parameter is not off its middle for that
        below = (np.mean(values < value) + np.mean(values <= value)) / 2
        shift = 2 * normal.inv_cdf(float(np.clip(below, 0.001, 0.999)))
        bounds[:, n] = np.quantile(values, [normal.cdf(shift - reach), normal.cdf(shift + reach)])
    return bounds


def _around(estimate: Floats, bounds: Floats) -> Floats:
    """The estimate from a handful of comparisons may lie beyond what resampling shows: an interval holds it anyway."""
    held = np.vstack([bounds, estimate])
    return np.array([held.min(axis=0), held.max(axis=0)])


# One verdict: the pair of names' places, the order it was given in, and what it gives to the first of the pair.
_Verdict = tuple[int, int, int, float]


class _Model:
    """Comparisons as a logistic regression on the edges of a graph; its fits are done for many weightings at once.

    A cell is a pair of names in one order (1: the pair's first stood first, 2: its second did, 0: not known).
    """

    def __init__(self, comparisons: Sequence[Comparison], place: Mapping[Hashable, int], group: Sequence[int]) -> None:
        self._size = len(place)
        clusters: dict[Hashable, Counter[_Verdict]] = defaultdict(Counter)
        for n, c in enumerate(comparisons):
            if c.a != c.b:
                clusters[("alone", n) if c.cluster is None else ("cluster", c.cluster)].update(_verdicts(c, place))
        self.clusters = len(clusters)
        # clusters that say the same are drawn as one kind
        kinds = Counter(tuple(sorted(said.items())) for said in clusters.values())
        size = sum(sum(said.values()) for said in clusters.values()) / self.clusters
        seen = sorted(kinds.items())
        unseen = _unseen([verdict for said, _ in seen for verdict, _ in said])
        self._count = np.array([float(count) for _, count in seen] + [0.0] * len(unseen))
        self._chance = self._count.copy()
        self._chance[len(seen) :] = [weight for _, weight in unseen]
        told = [(kind, verdict, float(times)) for kind, (said, _) in enumerate(seen) for verdict, times in said]
        told += [
            (kind, verdict, size / len(verdicts))
            for kind, (verdicts, _) in enumerate(unseen, len(seen))
            for verdict in verdicts
        ]
        pairs = sorted({verdict[:2] for _, verdict, _ in told})
        self._i, self._j = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
        self._edges = len(pairs)
        number = {pair: n for n, pair in enumerate(pairs)}
        told.sort(key=lambda one: (one[1][2], number[one[1][:2]], one))
        cell = np.array([verdict[2] * len(pairs) + number[verdict[:2]] for _, verdict, _ in told])
        self._cells, self._starts = np.unique(cell, return_index=True)
        self._kind = np.array([kind for kind, _, _ in told])
        self._times = np.array([times for _, _, times in told])
        self._given = np.array([times * verdict[3] for _, verdict, times in told])
        self._towards = np.zeros((self._edges, self._size))
        self._towards[np.arange(self._edges), self._i] = 1.0
        self._towards[np.arange(self._edges), self._j] = -1.0
        self._same = np.equal.outer(group, group).astype(np.float64)
        self._others = self._same.sum(axis=1) - 1
        # strengths are relative: this alone says where the mean of each group is, at nought
        self._ridge = _PRIOR * np.eye(self._size + 1)

    def bootstrap(self, samples: int, seed: int) -> tuple[Floats, Floats, Floats]:
        """The estimate, what samples would come to if it had no bias of its own, and one row for each sample."""
        estimate = self.fit(self._count[None, :])[0]
        middle = self.fit(self._chance[None, :], estimate)[0]
        share = self._chance / self._chance.sum()
        rng = np.random.default_rng(seed)
        held = max(len(self._kind), 3 * self._edges, (self._size + 1) ** 2, len(share))
        some = max(1, _NUMBERS // held)
        parts = [
            self.fit(rng.multinomial(self.clusters, share, size=min(some, samples - done)).astype(np.float64), estimate)
            for done in range(0, samples, some)
        ]
        return estimate, middle, np.concatenate(parts)

    def _cellwise(self, drawn: Floats, worth: Floats) -> Floats:
        """What each cell has of it; shape: weightings × order × edge."""
        found = np.zeros((len(drawn), 3 * self._edges))
        found[:, self._cells] = np.add.reduceat(drawn[:, self._kind] * worth, self._starts, axis=1)
        return found.reshape(len(drawn), 3, self._edges)

    def fit(self, drawn: Floats, start: Floats | None = None) -> Floats:
        """Parameters (strengths, bias) for each row of weights of the kinds of clusters, by Newton's method."""
        times, given = self._cellwise(drawn, self._times), self._cellwise(drawn, self._given)
        size = self._size
        theta = np.zeros((len(drawn), size + 1)) if start is None else np.tile(start, (len(drawn), 1))
        order = np.array([0.0, 1.0, -1.0])[None, :, None]
        curvature = np.empty((len(drawn), size + 1, size + 1))
        moving = np.arange(len(drawn))
        for _ in range(_ROUNDS):
            now = theta[moving]
            ahead = (now[:, self._i] - now[:, self._j])[:, None, :] + order * now[:, -1, None, None]
            chance = 1.0 / (1.0 + np.exp(-ahead))
            missing = given[moving] - times[moving] * chance
            weight = times[moving] * chance * (1 - chance)
            gradient = -now @ self._ridge
            gradient[:, :-1] += missing.sum(axis=1) @ self._towards
            gradient[:, -1] += (missing[:, 1] - missing[:, 2]).sum(axis=1)
            curve = curvature[: len(moving)]
            curve[:] = self._ridge
            pulled = weight.sum(axis=1)
            curve[:, self._i, self._j] -= pulled
            curve[:, self._j, self._i] -= pulled
            curve[:, range(size), range(size)] += pulled @ np.abs(self._towards)
            crossed = (weight[:, 1] - weight[:, 2]) @ self._towards
            curve[:, :-1, -1] += crossed
            curve[:, -1, :-1] += crossed
            curve[:, -1, -1] += (weight[:, 1] + weight[:, 2]).sum(axis=1)
            step = np.linalg.solve(curve, gradient[:, :, None])[:, :, 0]
            far = np.abs(step).max(axis=1)
            # a far step from a flat place would overshoot
            theta[moving] += step * np.minimum(1.0, 2.0 / np.maximum(far, 1e-12))[:, None]
            moving = moving[far >= _NEAR]
            if not len(moving):
                break
        return theta

    def win_rates(self, strengths: Floats) -> Floats:
        """Chance of each against the others of its group, averaged; one row per fit."""
        some = max(1, _NUMBERS // self._size**2)
        parts = []
        for first in range(0, len(strengths), some):
            part = strengths[first : first + some]
            chance = self._same / (1.0 + np.exp(part[:, None, :] - part[:, :, None]))
            parts.append((chance.sum(axis=2) - 0.5) / self._others)
        return np.concatenate(parts)


def _verdicts(c: Comparison, place: Mapping[Hashable, int]) -> list[_Verdict]:
    i, j = place[c.a], place[c.b]
    first, second = min(i, j), max(i, j)

    def one(order: int, verdict: Outcome) -> _Verdict:
        share = {"A": 1.0, "B": 0.0, "tie": 0.5}[verdict]
        return (first, second, order, share) if i == first else (first, second, (0, 2, 1)[order], 1.0 - share)

    if c.forward is None or c.swapped is None:
        return [one(0, c.winner)]
    return [one(1, c.forward), one(2, c.swapped)]


def _unseen(verdicts: Iterable[_Verdict]) -> list[tuple[list[_Verdict], float]]:
    """What resampling adds to the clusters that were seen: one win and one loss for each configuration.

    Five wins out of five say little, but every sample of them is five wins. With this the interval of one that always
    won is about that of Clopper and Pearson, and among hundreds of clusters it makes no difference.
    """
    orders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for first, second, order, _ in verdicts:
        orders[first, second].add(order)
    opponents = Counter(place for pair in orders for place in pair)
    return [
        ([(i, j, order, share) for order in seen], 1.0 / min(opponents[i], opponents[j]))
        for (i, j), seen in sorted(orders.items())
        for share in (1.0, 0.0)
    ]


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


def from_rating(name: Hashable, reward: float, cluster: Hashable | None = None) -> Comparison:
    """A person's vote on a single answer as a comparison with what readers expect: above 0 it is won, below 0 lost.

    Strengths are then the log-odds of a good vote (a Bradley–Terry model with one common opponent).
    """
    return Comparison(name, BAR, "A" if reward > 0 else "B" if reward < 0 else "tie", cluster=cluster)
