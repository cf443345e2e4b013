"""The batch of a training step and the order of rows. Needs the standard library only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Rows of one optimizer step: rows of a batch times accumulated batches.
EFFECTIVE = 16
# The share of the free memory for a step: rows of other lengths fragment the memory differently.
SHARE = 0.9


class OutOfMemory(Exception):
    """The device has not enough memory for a step."""


class NothingFits(Exception):
    """Not even the smallest batch fits, with gradient checkpointing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """batch: rows at once on the device. accumulate: batches of one step. checkpointing: of gradients."""

    batch: int
    accumulate: int
    checkpointing: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """The caller's values; None: to be chosen. least: the smallest batch that the method can use."""

    batch: int | None = None
    accumulate: int | None = None
    least: int = 1


def choose(wish: Wish, rows: int, needed: Callable[[Plan], int], free: int) -> Plan:
    """Return a plan with the largest batch that fits; with gradient checkpointing only if no batch fits without it.

    rows: of the training. needed: returns the bytes of a step by a plan; may raise OutOfMemory. free: in bytes.
    Raises NothingFits.
    """
    for checkpointing in (False, True):
        for batch in [wish.batch] if wish.batch else _halving(rows, wish.least):
            plan = Plan(batch, wish.accumulate or max(1, EFFECTIVE // batch), checkpointing)
            try:
                if needed(plan) <= SHARE * free:
                    return plan
            except OutOfMemory:
                continue
    raise NothingFits


def _halving(rows: int, least: int) -> list[int]:
    """Return 16, 8, 4 … down to `least`, without batches larger than `rows`."""
    found, batch = [], EFFECTIVE
    while batch > least:
        if batch <= rows:
            found.append(batch)
        batch //= 2
    return [*found, least]


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a transformer. width: bytes of a number in an activation."""

    layers: int
    hidden: int
    vocabulary: int
    width: int


# Sequences of a row: for dpo its two answers, for kto its answer and one to another prompt.
_SEQUENCES = 2
# Activations per token and hidden unit: of a whole layer, and of its input alone.
# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2.
_LAYER, _INPUT = 17, 1


def step_bytes(shape: Shape, plan: Plan, longest: int) -> int:
    """Return the estimated memory of a step without the weights, in bytes. longest: tokens of the longest row."""
    tokens = plan.batch * _SEQUENCES * longest
    whole = shape.hidden * _LAYER
    kept = shape.layers * shape.hidden * _INPUT + whole if plan.checkpointing else shape.layers * whole
    return tokens * shape.width * (kept + shape.vocabulary)


def by_length(lengths: Sequence[int], batch: int, seed: int, least: int = 1) -> list[int]:
    """Return the order of rows in which each batch has rows of similar length, with the batches in a random order.

    The batch with the longest rows comes first: a lack of memory shows at once. An incomplete batch comes last, and is
    left out if it has fewer than `least` rows.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = [longest_first[start : start + batch] for start in range(0, len(lengths), batch)]
    last = [batches.pop()] if batches and len(batches[-1]) < batch else []
    last = [one for one in last if len(one) >= least]
    rest = batches[1:]
    random.Random(seed).shuffle(rest)
    return [row for one in (*batches[:1], *rest, *last) for row in one]


def progress(done: int, rows: int, seconds: float) -> str:
    """Return a line with the finished rows, the rows per second and the time left. seconds: since the start."""
    speed = done / seconds if seconds > 0 else 0.0
    left = round((rows - done) / speed) if speed else 0
    hours, minutes = left // 3600, left % 3600 // 60
    clock = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
    return f"{done:,} of {rows:,} rows, {speed:.3g} rows per second, {clock} left"


def accuracy(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of pairs whose better answer is likelier; ties count half. None without pairs."""
    if not pairs:
        return None
    return sum(1.0 if better > worse else 0.5 if better == worse else 0.0 for better, worse in pairs) / len(pairs)
