"""The batch of a training, the order of its rows, and its progress lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLACE = Path(__file__).parents[2] / "deploy" / "train" / "batching.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("batching", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["batching"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


batching = loaded()
GB = 10**9


class Memory:
    """A device. of_a_row: bytes of a row in a step, four times those with checkpointing. tried: the tried steps."""

    def __init__(self, of_a_row: int, room: int) -> None:
        self.of_a_row, self.room = of_a_row, room
        self.tried: list[tuple[int, bool]] = []

    def needed(self, plan: batching.Plan) -> int:  # type: ignore[name-defined]
        self.tried.append((plan.batch, plan.checkpointing))
        size = plan.batch * self.of_a_row // (4 if plan.checkpointing else 1)
        if size > self.room:
            raise batching.OutOfMemory
        return size


@pytest.mark.parametrize(
    ("wish", "rows", "of_a_row", "plan"),
    [
        # a small model on a large device takes all 16 rows at once
        ({}, 1_000, GB, (16, 1, False)),
        # nine tenths of the memory may be used
        ({}, 1_000, 5 * GB, (8, 2, False)),
        ({}, 1_000, 9 * GB, (8, 2, False)),
        ({}, 1_000, 10 * GB, (4, 4, False)),
        ({}, 1_000, 70 * GB, (1, 16, False)),
        # none fits without gradient checkpointing
        ({}, 1_000, 80 * GB, (2, 8, True)),
        ({}, 1_000, 200 * GB, (1, 16, True)),
        # kto needs two rows
        ({"least": 2}, 1_000, GB, (16, 1, False)),
        ({"least": 2}, 1_000, 60 * GB, (4, 4, True)),
        ({"least": 2}, 1_000, 140 * GB, (2, 8, True)),
        # few rows
        ({}, 5, GB, (4, 4, False)),
        ({}, 1, GB, (1, 16, False)),
        ({"least": 2}, 1, GB, (2, 8, False)),
        # set by hand
        ({"batch": 8}, 1_000, GB, (8, 2, False)),
        ({"batch": 6}, 1_000, 20 * GB, (6, 2, True)),
        ({"batch": 32}, 1_000, GB, (32, 1, False)),
        ({"accumulate": 4}, 1_000, GB, (16, 4, False)),
    ],
)
def test_choose_takes_the_largest_batch_that_fits(
    wish: dict[str, int], rows: int, of_a_row: int, plan: tuple[int, int, bool]
) -> None:
    memory = Memory(of_a_row, 80 * GB)
    found = batching.choose(batching.Wish(**wish), rows, memory.needed, 80 * GB)
    assert (found.batch, found.accumulate, found.checkpointing) == plan
    # the trial ends at the first that fits
    assert memory.tried[-1] == (plan[0], plan[2])


def test_choose_without_room_for_one_row_raises() -> None:
    with pytest.raises(batching.NothingFits):
        batching.choose(batching.Wish(), 10, Memory(400 * GB, 80 * GB).needed, 80 * GB)


@pytest.mark.parametrize(
    ("batch", "checkpointing", "longest", "gigabytes"),
    [(1, False, 2_048, 11.5), (8, False, 2_048, 92), (8, True, 2_048, 11.5), (8, False, 256, 11.5)],
)
def test_estimate_grows_with_rows_and_tokens(batch: int, checkpointing: bool, longest: int, gigabytes: float) -> None:
    """A model of 2.8 B parameters in bfloat16, as an example of the size."""
    shape = batching.Shape(layers=32, hidden=2_560, vocabulary=50_304, width=2)
    plan = batching.Plan(batch, 1, checkpointing)
    assert batching.step_bytes(shape, plan, longest) == pytest.approx(gigabytes * GB, rel=0.1)


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (8, 4), (3, 4), (33, 2), (1, 1), (0, 4)])
def test_batches_have_rows_of_similar_length(rows: int, batch: int) -> None:
    lengths = [(7 * n) % 37 for n in range(rows)]
    order = batching.by_length(lengths, batch, seed=1)
    assert sorted(order) == list(range(rows))
    assert order == batching.by_length(lengths, batch, seed=1)
    batches = [[lengths[row] for row in order[start : start + batch]] for start in range(0, rows, batch)]
    for one in batches:
        # The rows of a batch are neighbours in the order of lengths.
        assert sorted(lengths, reverse=True)[sorted(lengths, reverse=True).index(max(one)) :][: len(one)] == one
    if batches:
        assert max(batches[0]) == max(lengths)
        assert all(len(one) == batch for one in batches[:-1])


@pytest.mark.parametrize(("rows", "least", "kept"), [(9, 1, 9), (9, 2, 8), (10, 2, 10), (8, 2, 8), (1, 2, 0)])
def test_incomplete_batch_below_the_least_is_left_out(rows: int, least: int, kept: int) -> None:
    assert len(batching.by_length(list(range(rows)), 4, seed=1, least=least)) == kept


def test_order_of_batches_depends_on_the_seed() -> None:
    lengths = list(range(64))
    assert batching.by_length(lengths, 4, seed=1) != batching.by_length(lengths, 4, seed=2)


@pytest.mark.parametrize(
    ("done", "rows", "seconds", "line"),
    [
        (16, 64, 8.0, "16 of 64 rows, 2 rows per second, 0:24 left"),
        (64, 64, 8.0, "64 of 64 rows, 8 rows per second, 0:00 left"),
        (1_600, 20_000, 320.0, "1,600 of 20,000 rows, 5 rows per second, 1:01:20 left"),
        (16, 64, 0.0, "16 of 64 rows, 0 rows per second, 0:00 left"),
    ],
)
def test_progress_line_has_speed_and_time_left(done: int, rows: int, seconds: float, line: str) -> None:
    assert batching.progress(done, rows, seconds) == line


@pytest.mark.parametrize(
    ("pairs", "share"),
    [([], None), ([(-1.0, -2.0)], 1.0), ([(-1.0, -2.0), (-3.0, -2.0)], 0.5), ([(-1.0, -1.0)], 0.5)],
)
def test_accuracy_is_the_share_of_better_answers(pairs: list[tuple[float, float]], share: float | None) -> None:
    assert batching.accuracy(pairs) == share
