"""How well the ranking tells what is true: `make eval-ranking` simulates judges and looks what comes of them.

Each run plants strengths of four configurations, a judge with noise (its decisions are logistic draws, perhaps with a
mood) and a preference for the answer that stands first, and ranks from its comparisons in both orders. Is the planted
order recovered, do the 95 % intervals hold the truth, and what does judging in one order alone do to both? The status
is 0 only when the intervals hold it in 93 to 97 % of the runs, the order is recovered, and swapping removes the bias.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from services.reward.ranking import Comparison, Outcome, Ranking, rank

STRENGTHS = {"w": 1.0, "x": 0.4, "y": -0.3, "z": -1.1}
ORDER = sorted(STRENGTHS, key=lambda name: -STRENGTHS[name])
LEAST, MOST = 0.93, 0.97


@dataclass(frozen=True, slots=True)
class World:
    """bias: log-odds that the judge adds to the answer that stands first. noise: how much its own mood of a comparison
    moves both of its verdicts (standard deviation). comparisons: how many. placed: who stands first is not by chance:
    the weaker one does, as when a fixed respondent is always A.
    """

    name: str
    bias: float = 0.6
    noise: float = 0.0
    comparisons: int = 400
    placed: bool = False


WORLDS = (
    World("a fair judge", bias=0.0),
    World("a judge that likes what stands first", bias=0.6),
    World("the same, and the weaker always first", bias=0.6, placed=True),
    World("the same, and moods", bias=0.6, noise=0.5),
    World("few comparisons", bias=0.6, comparisons=120),
)


def judged(world: World, rng: random.Random) -> Comparison:
    a, b = rng.sample(ORDER, 2)
    if world.placed and STRENGTHS[a] > STRENGTHS[b]:
        a, b = b, a
    ahead = STRENGTHS[a] - STRENGTHS[b] + rng.gauss(0, world.noise)
    forward: Outcome = "A" if rng.random() < _chance(ahead + world.bias) else "B"
    swapped: Outcome = "A" if rng.random() < _chance(ahead - world.bias) else "B"
    return Comparison(a, b, forward if forward == swapped else "tie", forward, swapped)


def _chance(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


@cache
def truth(world: World) -> dict[str, float]:
    """The strengths that a ranking should find. Moods draw them together: what endless judging would show."""
    if world.noise:
        rng = random.Random(0)
        rows = rank([judged(world, rng) for _ in range(200_000)], samples=50).rows
        return {row.name: row.strength for row in rows}
    mean = sum(STRENGTHS.values()) / len(STRENGTHS)
    return {name: strength - mean for name, strength in STRENGTHS.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """hits: intervals of strengths that hold the truth. in_order: the planted order came back."""

    hits: int
    in_order: bool
    bias_hit: bool
    tau: float


def one(world: World, swap: bool, samples: int, seed: int) -> Run:
    rng = random.Random(seed)
    seen = [judged(world, rng) for _ in range(world.comparisons)]
    if not swap:
        # one order alone: the first verdict is the verdict
        seen = [replace(c, winner=c.forward or "tie", forward=None, swapped=None) for c in seen]
    result = rank(seen, samples=samples, seed=seed)
    wanted = truth(world)
    hits = sum(row.low <= wanted[row.name] <= row.high for row in result.rows)
    names = [row.name for row in result.rows]
    return Run(hits, names == ORDER, _bias_held(result, world), kendall(names))


def _bias_held(result: Ranking, world: World) -> bool:
    low, high = result.bias_low, result.bias_high
    return low is not None and high is not None and low <= world.bias <= high


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


def report(runs: Sequence[Run]) -> Report:
    n = len(runs)
    return Report(
        coverage=sum(run.hits for run in runs) / (n * len(ORDER)),
        in_order=sum(run.in_order for run in runs) / n,
        tau=sum(run.tau for run in runs) / n,
        bias=sum(run.bias_hit for run in runs) / n,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="eval-ranking", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000, help="bootstrap repetitions")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{options.runs} runs each; 4 configurations; {options.samples} bootstrap samples\n")
    print(f"{'':<40}{'comparisons':>12}{'in order':>10}{'tau':>7}{'95 % holds':>12}{'bias held':>11}")
    bad = []
    with ProcessPoolExecutor() as pool:
        for world in WORLDS:
            reports = {}
            for swap in (True, False):
                seeds = range(options.seed * 10_000, options.seed * 10_000 + options.runs)
                runs = list(pool.map(partial(one, world, swap, options.samples), seeds, chunksize=10))
                found = reports[swap] = report(runs)
                name = world.name if swap else "  … judged in one order alone"
                bias = f"{found.bias:.1%}" if swap else "-"
                print(f"{name:<40}{world.comparisons:>12}{found.in_order:>10.1%}{found.tau:>7.2f}{found.coverage:>12.1%}"
                      f"{bias:>11}", flush=True)  # fmt: skip
            bad += _wrong(world, reports[True], reports[False])
    print(f"\n{time.monotonic() - began:.0f} s")
    for text in bad:
        print(f"FAILED  {text}")
    return 1 if bad else 0


def _wrong(world: World, both: Report, single: Report) -> list[str]:
    wrong = []
    if not LEAST <= both.coverage <= MOST:
        wrong.append(f"{world.name}: the intervals hold the truth in {both.coverage:.1%}, not 93 to 97 %")
    if both.tau < 0.9:
        wrong.append(f"{world.name}: the planted order is not recovered (tau {both.tau:.2f})")
    if world.placed and not single.coverage < 0.5 < both.coverage:
        wrong.append(f"{world.name}: one order alone is not fooled, so that swapping shows nothing")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
