"""Shares of counted cases."""

from __future__ import annotations

import math

# Of the normal distribution, for intervals of 95 %.
Z = 1.959964


def wilson(times: int, cases: int) -> tuple[float, float]:
    """The 95 % interval of the share `times / cases`; `cases` is not 0.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    part, square = times / cases, Z * Z
    middle = (part + square / (2 * cases)) / (1 + square / cases)
    reach = Z * math.sqrt(part * (1 - part) / cases + square / (4 * cases * cases)) / (1 + square / cases)
    return max(0.0, middle - reach), min(1.0, middle + reach)
