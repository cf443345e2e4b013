"""Tables as text, verdicts on targets, and the middle of several rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# A value this many times its target is no noise of a machine that has nothing else to do.
FAR = 8.0


@dataclass(frozen=True, slots=True)
class Target:
    """`most`: the value must not be larger; else it must not be smaller. steady: it differs so little between runs that
    something has broken where it is far off."""

    name: str
    value: float
    bound: float
    unit: str
    most: bool = True
    steady: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.most else self.value >= self.bound

    @property
    def far(self) -> bool:
        """Missed by so much that something has broken, and not merely become slower."""
        if not self.steady:
            return False
        return self.value > FAR * self.bound if self.most else self.value < self.bound / FAR

    def __str__(self) -> str:
        sign = "≤" if self.most else "≥"
        verdict = "FAR " if self.far else "PASS" if self.met else "MISS"
        return f"  {verdict}  {self.name}: {self.value:.2f}{self.unit} (target {sign} {self.bound:g}{self.unit})"


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left column as text, the others aligned to the right."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    shown = []
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        shown.append("  " + "  ".join(cells).rstrip())
    shown.insert(1, "  " + "  ".join("-" * width for width in widths))
    return "\n".join([f"\n{title}", *shown])


def middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each value over the rounds."""
    return {name: median(round_[name] for round_ in rounds) for name in rounds[0]}
