"""When a gateway asks how many queries are unfinished."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.gateway.gateway import Gateway
from services.gateway.settings import GatewaySettings


class Counting:
    """A bus with so many unfinished queries."""

    def __init__(self, unfinished: int) -> None:
        self.unfinished = unfinished
        self.asked = 0

    async def backlog(self, _stream: str, _group: str) -> int:
        self.asked += 1
        await asyncio.sleep(0)
        return self.unfinished


async def test_the_backlog_is_told_by_accepting_and_asked_for_only_when_it_may_be_high(
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
    # some of them may be finished
    gateway.accepted("chat", 4)
    assert (await told(3), bus.asked) == (7, 1)
    assert (await told(3, later=False), bus.asked) == (7, 1)
    bus.unfinished = 2
    assert (await told(3), bus.asked) == (2, 2)
    # what is accepted before it is asked again counts
    gateway.accepted("chat", 9)
    gateway.accepted("chat", 10)
    assert (await told(4, later=False), bus.asked) == (4, 2)
    assert (await told(3, later=False), bus.asked) == (2, 3)
    assert (await told(3), bus.asked) == (2, 4)
    # the finished ones have gone
    gateway.accepted("chat", 1)
    assert (await told(3), bus.asked) == (1, 4)


async def test_nobody_is_refused_for_what_was_known_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Counting(2)
    monkeypatch.setattr(Gateway, "bus", bus)
    gateway = Gateway(GatewaySettings(data_dir=tmp_path))
    for held in range(1, 10):
        gateway.accepted("chat", held)
    # those that come together, too
    assert await asyncio.gather(*(gateway.backlog(3) for _ in range(3))) == [2, 2, 2]
