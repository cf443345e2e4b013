"""The short form of `make judging-chaos`."""

from __future__ import annotations

import pytest
from support.judging import judging

pytestmark = pytest.mark.slow


async def test_each_pair_is_judged_once_and_nothing_is_lost_whoever_is_killed_or_away() -> None:
    count = await judging(30, every=1.0, away=2.0, seed=7, seconds=120)
    assert count.details == []
    assert count.kills["critic"] >= 1
    assert (count.kills["reward"], count.kills["memory"]) == (1, 1)
