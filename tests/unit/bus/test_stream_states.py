"""What operators are told of a stream, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.bus import Bus, Command, Reply, ReplyError
from shared.bus.streams import GroupState

WORK = "local2:tool.request.probe"


def group(name: str, lag: int | None) -> list[Any]:
    return [b"name", name.encode(), b"consumers", 2, b"pending", 3, b"last-delivered-id", b"6-0", b"lag", lag]


class Server:
    """A Redis with one stream."""

    def __init__(self, length: Reply, first: Reply, groups: Reply, *, undelivered: int = 0) -> None:
        self.replies = [length, first, groups]
        self.undelivered = undelivered
        self.bus = Bus("redis://127.0.0.1:1", "test/1")
        self.bus.link = self  # type: ignore[assignment]
        self.bus.now_ms = lambda: 12_000  # type: ignore[method-assign]

    async def pipe_raw(self, commands: Sequence[Command]) -> list[Reply]:
        assert [(name, stream) for name, stream, *_ in commands if name != "XINFO"] == [
            ("XLEN", WORK),
            ("XRANGE", WORK),
        ]
        return self.replies

    async def call(self, *command: Any) -> Reply:
        assert command[:4] == ("XRANGE", WORK, "(6-0", "+")
        return [[b"7-0", []]] * self.undelivered


async def test_a_stream_is_told_with_its_age_and_what_each_group_has_still_to_do() -> None:
    server = Server(9, [[b"5000-1", []]], [group("a", 4), group("b", 0), group("c", None)], undelivered=7)
    state = await server.bus.state(WORK)
    assert (state.name, state.length, state.oldest_ms) == (WORK, 9, 7_000)
    assert state.groups == [GroupState(name, 2, 3, lag, "6-0") for name, lag in (("a", 4), ("b", 0), ("c", 7))]


async def test_what_is_not_there_or_no_stream_has_nothing_and_what_may_not_be_read_is_an_error() -> None:
    wrong = ReplyError("WRONGTYPE it holds another kind of value")
    for replies in ((0, [], ReplyError("ERR no such key")), (wrong, wrong, wrong)):
        state = await Server(*replies).bus.state(WORK)
        assert (state.length, state.oldest_ms, state.groups) == (0, None, [])
    refused = ReplyError("NOPERM no permissions to access a key")
    with pytest.raises(ReplyError, match="NOPERM"):
        await Server(refused, refused, refused).bus.state(WORK)
