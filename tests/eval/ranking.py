"""How well the ranking tells what is true: `make eval-ranking` simulates judges and looks what comes of them.

Each run plants strengths of four configurations, a judge with noise (its decisions are logistic draws, perhaps with a
mood) and a preference for the answer that stands first, and ranks from its comparisons in both orders. Is the planted
order recovered, do the 95 % intervals hold the truth, and what does judging in one order alone do to both? In some
worlds a whole conversation leans one way, and in some the configurations fall into two groups that never met: then no
run may put members of both into one group. The status is 0 only when the intervals hold the truth in 93 to 98 % of the
runs, the order is recovered, groups are kept apart, and swapping removes the bias.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from services.reward.ranking import Comparison, Outcome, Ranking, rank

STRENGTHS = {"w": 1.0, "x": 0.4, "y": -0.3, "z": -1.1}
ORDER = sorted(STRENGTHS, key=lambda name: -STRENGTHS[name])
LEAST, MOST = 0.93, 0.98


@dataclass(frozen=True, slots=True)
class World:
    """bias: log-odds that the judge adds to the answer that stands first. noise: how much its own mood of a comparison
    moves both of its verdicts (standard deviation). comparisons: how many. placed: who stands first is not by chance:
    the weaker one does, as when a fixed respondent is always A. session: comparisons of one conversation, all between
    the same two, and `lean`: how much the conversation moves them all (standard deviation). apart: w meets only x, and
    y only z.
    """

    name: str
    bias: float = 0.6
    noise: float = 0.0
    comparisons: int = 400
    placed: bool = False
    session: int = 1
    lean: float = 0.0
    apart: bool = False

    @property
    def groups(self) -> list[list[str]]:
        return [ORDER[:2], ORDER[2:]] if self.apart else [ORDER]


WORLDS = (
    World("a fair judge", bias=0.0),
    World("a judge that likes what stands first", bias=0.6),
    World("the same, and the weaker always first", bias=0.6, placed=True),
    World("the same, and moods", bias=0.6, noise=0.5),
    World("few comparisons", bias=0.6, comparisons=120),
    World("conversations of 8 that lean one way", session=8, lean=1.0, comparisons=800),
    World("two groups that never met", apart=True),
    World("the same, in conversations that lean", apart=True, session=8, lean=1.0, comparisons=800),
)


def judged(world: World, rng: random.Random) -> Iterator[Comparison]:
    """The world's comparisons, one after the other."""
    for session in count():
        a, b = rng.sample(rng.choice(world.groups), 2)
        if world.placed and STRENGTHS[a] > STRENGTHS[b]:
            a, b = b, a
        lean = rng.gauss(0, world.lean)
        for _ in range(world.session):
            ahead = STRENGTHS[a] - STRENGTHS[b] + lean + rng.gauss(0, world.noise)
            forward: Outcome = "A" if rng.random() < _chance(ahead + world.bias) else "B"
            swapped: Outcome = "A" if rng.random() < _chance(ahead - world.bias) else "B"
            yield Comparison(a, b, forward if forward == swapped else "tie", forward, swapped, session)


def _chance(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


@cache
def truth(world: World) -> tuple[dict[str, float], float]:
    """The strengths and the bias that a ranking should find. Moods and leanings draw them together: what endless
    judging would show."""
    if world.noise or world.lean:
        endless = replace(world, comparisons=400_000)
        found = rank(list(islice(judged(endless, random.Random(0)), endless.comparisons)), samples=50)
        return {row.name: row.strength for row in found.rows}, found.bias or 0.0
    means = {name: sum(map(STRENGTHS.__getitem__, group)) / len(group) for group in world.groups for name in group}
    return {name: strength - means[name] for name, strength in STRENGTHS.items()}, world.bias


@dataclass(frozen=True, slots=True)
class Run:
    """hits: intervals of strengths that hold the truth. in_order: the planted order came back in each group. apart: the
    groups are those of the world."""

    hits: int
    in_order: bool
    bias_hit: bool
    tau: float
    apart: bool


def one(world: World, how: str, samples: int, seed: int) -> Run:
    """how: `both` orders; `single`: in one order alone, the first verdict is the verdict; `pairs`: each comparison is
    drawn alone, as if nothing connected those of a conversation."""
    seen = list(islice(judged(world, random.Random(seed)), world.comparisons))
    if how == "single":
        seen = [replace(c, winner=c.forward or "tie", forward=None, swapped=None) for c in seen]
    if how == "pairs":
        seen = [replace(c, cluster=None) for c in seen]
    result = rank(seen, samples=samples, seed=seed)
    wanted, bias = truth(world)
    hits = sum(row.low <= wanted[row.name] <= row.high for row in result.rows)
    found = [[row.name for row in result.rows if row.group == n + 1] for n in range(result.groups)]
    in_order = all(sorted(names, key=ORDER.index) == names for names in found)
    apart = sorted(map(sorted, found)) == sorted(map(sorted, world.groups))
    taus = [kendall(names) for names in found]
    return Run(hits, in_order, _bias_held(result, bias), sum(taus) / len(taus), apart)


def _bias_held(result: Ranking, bias: float) -> bool:
    low, high = result.bias_low, result.bias_high
    return low is not None and high is not None and low <= bias <= high


def kendall(names: Sequence[str]) -> float:
    """How alike the order is to the planted one: 1 the same, -1 turned round."""
    pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
    right = sum(STRENGTHS[names[i]] > STRENGTHS[names[j]] for i, j in pairs)
    return 2 * right / len(pairs) - 1


@dataclass(frozen=True, slots=True)
class Report:
    coverage: float
    in_order: float
    tau: float
    bias: float
    apart: float


def report(runs: Sequence[Run]) -> Report:
    n = len(runs)
    return Report(
        coverage=sum(run.hits for run in runs) / (n * len(ORDER)),
        in_order=sum(run.in_order for run in runs) / n,
        tau=sum(run.tau for run in runs) / n,
        bias=sum(run.bias_hit for run in runs) / n,
        apart=sum(run.apart for run in runs) / n,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="eval-ranking", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000, help="bootstrap repetitions")
    parser.add_argument("--seed", type=int, default=90, help="the published table's was never used while building")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{options.runs} runs each; 4 configurations; {options.samples} bootstrap samples; seed {options.seed}\n")
    print(f"{'':<46}{'comparisons':>12}{'in order':>10}{'tau':>7}{'95 % holds':>12}{'bias held':>11}{'groups':>8}")
    bad = []
    with ProcessPoolExecutor() as pool:
        for world in WORLDS:
            reports = {}
            for how in ("both", "pairs" if world.lean else "single"):
                seeds = range(options.seed * 10_000, options.seed * 10_000 + options.runs)
                runs = list(pool.map(partial(one, world, how, options.samples), seeds, chunksize=10))
                found = reports[how] = report(runs)
                bias = "-" if how == "single" else f"{found.bias:.1%}"
                name = world.name + _HOW[how] if how == "both" else _HOW[how]
                print(f"{name:<46}{world.comparisons:>12}{found.in_order:>10.1%}{found.tau:>7.2f}"
                      f"{found.coverage:>12.1%}{bias:>11}{found.apart:>8.0%}", flush=True)  # fmt: skip
            bad += _wrong(world, reports["both"], reports.get("single"))
    print(f"\n{time.monotonic() - began:.0f} s")
    for text in bad:
        print(f"FAILED  {text}")
    return 1 if bad else 0


_HOW = {"both": "", "single": "  … judged in one order alone", "pairs": "  … each comparison drawn alone"}


def _wrong(world: World, both: Report, single: Report | None) -> list[str]:
    wrong = []
    if not LEAST <= both.coverage <= MOST:
        wrong.append(f"{world.name}: the intervals hold the truth in {both.coverage:.1%}, not 93 to 98 %")
    if both.tau < 0.9:
        wrong.append(f"{world.name}: the planted order is not recovered (tau {both.tau:.2f})")
    if both.apart < 1:
        wrong.append(f"{world.name}: groups that never met are ranked together, or one that met is not")
    if world.placed and single is not None and not single.coverage < 0.5 < both.coverage:
        wrong.append(f"{world.name}: one order alone is not fooled, so that swapping shows nothing")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
