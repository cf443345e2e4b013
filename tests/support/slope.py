"""Whether something grows: the slope of a quantity over the queries answered, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, median

BLOCKS = 10
# Student's t for 95 % and BLOCKS - 2 degrees of freedom
_T = 2.306


@dataclass(frozen=True)
class Slope:
    """Per 1,000 queries; the true value lies between value ± error in 95 of 100 runs."""

    first: float
    last: float
    value: float
    error: float

    def grows(self, bound: float) -> bool:
        """Whether it grows for certain, and by more than is allowed."""
        return self.value > bound and self.value - self.error > 0


def slope(samples: Sequence[tuple[int, float]]) -> Slope:
    """Of (queries answered, value), in that order.

    A straight line through the medians of ten equal blocks: single samples that follow each other are too much alike
    for an interval to be honest, and a garbage collection that is late must not look like growth.
    """
    if len(samples) < 2 * BLOCKS:
        raise ValueError(f"at least {2 * BLOCKS} samples are needed, there are {len(samples)}")
    low, high = samples[0][0], samples[-1][0]
    width = (high - low) / BLOCKS or 1
    blocks: list[list[tuple[int, float]]] = [[] for _ in range(BLOCKS)]
    for at, value in samples:
        blocks[min(BLOCKS - 1, int((at - low) / width))].append((at, value))
    points = [(mean(at for at, _ in b) / 1000, median(v for _, v in b)) for b in blocks if b]
    if len(points) < BLOCKS:
        raise ValueError("a tenth of the run has no sample: sample more often")
    x, y = mean(p[0] for p in points), mean(p[1] for p in points)
    spread = sum((p[0] - x) ** 2 for p in points)
    value = sum((p[0] - x) * (p[1] - y) for p in points) / spread
    residual = sum((p[1] - y - value * (p[0] - x)) ** 2 for p in points)
    return Slope(points[0][1], points[-1][1], value, _T * sqrt(residual / (BLOCKS - 2) / spread))
