"""Where an engram lies: a vector, and whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Space(NamedTuple):
    """Vectors can be compared that are of one model and one dimension. Without a model: those that have none yet."""

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


# Of an engram that no model has seen: the store wants a vector for everything. It is found by its words.
NO_VECTOR = Vector("", (1.0,))
NOWHERE = NO_VECTOR.space
