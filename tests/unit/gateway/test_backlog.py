"""When a gateway asks how many queries are unfinished."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.http.gateway import Gateway
from services.gateway.settings import GatewaySettings


class Counting:
    """A bus with so many unfinished queries."""

    def __init__(self, unfinished: int) -> None:
        self.unfinished = unfinished
        self.asked = 0

    async def backlog(self, _stream: str, _group: str) -> int:
        self.asked += 1
        return self.unfinished


async def test_the_backlog_is_told_by_accepting_and_asked_for_only_when_it_is_high_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Counting(7)
    monkeypatch.setattr(Gateway, "bus", bus)
    gateway = Gateway(GatewaySettings(data_dir=tmp_path))

    async def told(most: int, *, later: bool = True) -> int:
        if later:
            gateway._backlog_until = float("-inf")
        return await gateway.backlog(most)

    assert (await told(3), bus.asked) == (0, 0)
    gateway.accepted("chat", 3)
    assert (await told(3), bus.asked) == (3, 0)
    # too many: others may have finished some
    gateway.accepted("chat", 4)
    assert (await told(3), bus.asked) == (7, 1)
    assert (await told(3, later=False), bus.asked) == (7, 1)
    bus.unfinished = 2
    assert (await told(3), bus.asked) == (2, 2)
    assert (await told(3), bus.asked) == (2, 2)
    # Redis has lost count
    gateway.accepted("chat", None)
    bus.unfinished = 5
    assert (await told(3), bus.asked) == (5, 3)
    gateway.accepted("chat", 1)
    assert (await told(3), bus.asked) == (1, 3)
