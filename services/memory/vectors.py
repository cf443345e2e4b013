"""Where an engram lies: a vector, and whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Space(NamedTuple):
    """Vectors can be compared that are of one model and one dimension.

    model: empty for engrams that have no vector. The store needs one for each record: see `no_vector`.
    """

    model: str
    dimension: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`values` are at length one."""

    model: str
    values: Sequence[float]

    @property
    def space(self) -> Space:
        return Space(self.model, len(self.values))


def no_vector(dimension: int) -> Vector:
    """Return what stands for the vector of an engram that has none. It is found by its words."""
    return Vector("", (1.0, *[0.0] * (dimension - 1)))


NO_VECTOR = no_vector(1)
