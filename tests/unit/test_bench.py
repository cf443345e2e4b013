"""The verdicts of `make bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(6.0, True, "PASS"), (6.1, True, "MISS"), (48.0, True, "MISS"), (48.1, True, "FAR"),
     (6.0, False, "PASS"), (5.9, False, "MISS"), (0.75, False, "MISS"), (0.7, False, "FAR")],
)  # fmt: skip
def test_a_target_that_is_missed_by_far_is_told_from_one_that_is_missed(
    value: float, most: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    from tables import Target

    # what differs from run to run is never that
    assert not Target("added time", value, 6.0, " ms", most).far
    target = Target("added time", value, 6.0, " ms", most, steady=True)
    assert str(target).split()[0] == shown
    assert (target.met, target.far) == (shown == "PASS", shown == "FAR")
