"""Vectors of embeddings."""

import math
from collections.abc import Sequence
from typing import Any


def unit(vector: Sequence[float]) -> list[float]:
    """The vector at length one; a zero vector stays as it is."""
    length = math.hypot(*vector)
    return [x / length for x in vector] if length else list(vector)


def unit_vectors(found: Any, texts: int) -> list[list[float]]:
    """What a server sent as the vectors of so many texts, each at length one.

    Raises ValueError with the half-sentence that says what is wrong: not a list of as many lists of finite numbers, all
    of the same length.
    """
    if not isinstance(found, list):
        raise ValueError(f"{type(found).__name__} in the place of a list of vectors")
    if len(found) != texts:
        raise ValueError(f"{len(found)} vectors for {texts} texts")
    for vector in found:
        if not isinstance(vector, list) or not vector:
            raise ValueError("a vector that is not a list of numbers")
        if not all(type(x) in (float, int) and -1e100 < x < 1e100 for x in vector):
            raise ValueError("a vector with something in it that is not a number")
    if len({len(vector) for vector in found}) > 1:
        raise ValueError("vectors of different lengths")
    return [unit(vector) for vector in found]
