"""The soak's judgement: growth is found, noise and a late garbage collection are none."""

from __future__ import annotations

import random

import pytest
from support.slope import slope


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_growth_and_a_leak_is(seed: int) -> None:
    rng = random.Random(seed)
    flat = [(n * 20, 70 + rng.gauss(0, 0.5)) for n in range(1_000)]
    leak = [(at, value + at * 0.4 / 1000) for at, value in flat]
    assert not slope(flat).grows(0.25)
    found = slope(leak)
    assert found.grows(0.25)
    assert found.value == pytest.approx(0.4, abs=0.02)
    assert found.last - found.first == pytest.approx(0.4 * 20 * 0.9, abs=0.5)


def test_growth_below_the_bound_is_allowed() -> None:
    assert not slope([(n, 50 + n * 0.2 / 1000) for n in range(0, 20_000, 50)]).grows(0.25)


def test_a_saw_of_garbage_collections_is_no_growth() -> None:
    assert not slope([(n, 60 + (n % 700) / 100) for n in range(0, 20_000, 10)]).grows(0.25)


def test_a_single_step_is_shown_with_a_wide_interval() -> None:
    found = slope([(n, 60 if n < 10_000 else 66) for n in range(0, 20_000, 10)])
    assert found.value > 0.25
    assert found.error > 0.1


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 20 samples"):
        slope([(1, 1.0)] * 10)
