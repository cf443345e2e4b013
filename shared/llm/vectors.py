"""Vectors of embeddings."""

import math
from collections.abc import Sequence


def unit(vector: Sequence[float]) -> list[float]:
    """The vector at length one; a zero vector stays as it is."""
    length = math.sqrt(sum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)
