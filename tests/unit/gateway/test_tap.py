"""What an operator's tail looks up, and when, without a server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway import tap
from services.gateway.sse import KEEP_ALIVE
from shared.bus import Entry


class Streams:
    """A bus and its tail: the subjects that there are, and what the test lets each of them tell."""

    def __init__(self, *subjects: str) -> None:
        self.there = list(subjects)
        self.looks = 0
        self.followed: dict[str, asyncio.Queue[list[Entry]]] = {}
        self.closed: list[str] = []

    async def subjects(self) -> list[Any]:
        self.looks += 1
        return [SimpleNamespace(name=name) for name in self.there]

    async def newest(self, _stream: str) -> str:
        return "0-0"

    def follow(self, stream: str, _after: str) -> Any:
        queue = self.followed[stream.partition(":")[2]] = asyncio.Queue()
        return SimpleNamespace(next=queue.get, close=lambda: self.closed.append(stream))


@pytest.mark.parametrize("seconds", [3_600.0, 0.0])
async def test_subjects_are_looked_for_now_and_then_and_not_with_each_entry(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap, "_RESCAN_SECONDS", seconds)
    streams = Streams("one")
    live = tap.Tap(cast(Any, streams), cast(Any, streams), ["*"], last=0)
    async with aclosing(live.events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        streams.there.append("two")
        for n in range(3):
            streams.followed["one"].put_nowait([(f"{n}-0", [b"payload", b"{}"])])
            assert b'"entry_id":"%d-0"' % n in await anext(chunks)
    new = seconds == 0.0
    assert (streams.looks > 1, "two" in streams.followed) == (new, new)
    assert len(streams.closed) == 1 + new
