"""Following streams, without a server: which are looked at, from where, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from shared.bus import Command, ConnectionLost, ReplyError, Tail
from shared.bus import follow as module
from shared.bus.cluster import ClusterLink
from shared.bus.endpoint import Address, Endpoint
from shared.bus.hash_slots import slot_of_key
from shared.errors import BusUnavailable


class Server:
    """Answers XREAD by stream; `asked` are the streams and positions of each write."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[dict[str, str]] = []
        self.fails: list[BaseException] = []

    async def submit(self, commands: list[Command], retry: bool, *, until: float) -> list[Any]:
        assert {command[:4] for command in commands} == {("XREAD", "COUNT", 1, "STREAMS")}
        # what cannot be sent before the next look is asked for by that
        assert 0 < until - asyncio.get_running_loop().time() < Tail.pause + 0.001
        assert retry is False
        self.asked.append({command[4]: command[5] for command in commands})
        if self.fails:
            raise self.fails.pop()
        return [self.answers.get(command[4]) for command in commands]


class Follower:
    def __init__(self, stream: str, position: str = "0-0", *, waiting: bool = True) -> None:
        self.stream, self.position, self.waiting = stream, position, waiting
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


def tail_of(server: Any) -> Tail:
    return Tail(cast(Any, SimpleNamespace(link=server, block=2.0)))


def join(tail: Tail, *followers: Follower) -> None:
    for follower in followers:
        tail.join(cast(Any, follower))


@contextlib.asynccontextmanager
async def running(tail: Tail) -> AsyncIterator[None]:
    task = asyncio.create_task(tail.watch())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_who_waits_is_asked_for_from_the_least_position() -> None:
    server = Server()
    tail = tail_of(server)
    followers = [Follower("j", "1-10"), Follower("j", "1-9"), Follower("j", "1-1", waiting=False)]
    busy, quiet, strange = Follower("busy", waiting=False), Follower("quiet"), Follower("strange")
    join(tail, *followers, busy, quiet, strange)
    server.answers = {"j": [b"something"], "strange": ReplyError("WRONGTYPE")}
    await tail._look_around()
    assert server.asked == [{"j": "1-9", "quiet": "0-0", "strange": "0-0"}]
    assert [one.looks for one in (*followers, busy, quiet, strange)] == [1, 1, 1, 0, 0, 0]
    # who has something to read, or to take, need not be told that there is more
    for one in (*followers, quiet, strange):
        one.waiting = False
    await tail._look_around()
    assert len(server.asked) == 1


async def test_many_streams_are_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 2)
    server = Server()
    tail = tail_of(server)
    join(tail, *(Follower(f"s{number}") for number in range(5)))
    await tail._look_around()
    assert sorted(len(asked) for asked in server.asked) == [1, 2, 2]
    assert {stream for asked in server.asked for stream in asked} == {f"s{number}" for number in range(5)}


async def test_what_was_heard_of_is_not_looked_at_whatever_became_of_an_earlier_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tail, "pause", 0.01)
    server = Server()
    tail = tail_of(server)
    heard, quiet = Follower("heard"), Follower("quiet")
    join(tail, heard, quiet)
    tail._heard.add("heard")
    for fault in (None, BusUnavailable("away"), ConnectionLost("gone"), TimeoutError()):
        server.fails = [] if fault is None else [fault]
        await tail._look_around()
    assert server.asked == [{"quiet": "0-0"}, *[{"heard": "0-0", "quiet": "0-0"}] * 3]


async def test_it_looks_as_long_as_somebody_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tail, "pause", 0.01)
    server = Server()
    tail = tail_of(server)
    async with running(tail):
        await asyncio.sleep(0.05)
        assert server.asked == []
        first, second = Follower("j"), Follower("j")
        join(tail, first, second)
        await eventually(lambda: len(server.asked) > 2)
        for one in (first, first, Follower("never"), second):
            # once more harms nobody, nor one who never came
            tail.leave(cast(Any, one))
        await asyncio.sleep(0.02)
        looked = len(server.asked)
        await asyncio.sleep(0.05)
        assert len(server.asked) == looked
        assert tail.look("j") is False
        # who comes back is told
        server.answers = {"j": [b"something"]}
        join(tail, second)
        await eventually(lambda: second.looks)
        assert first.looks == 0


async def test_a_node_that_says_nothing_keeps_no_other_from_being_asked() -> None:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1"), name="test")
    tail = tail_of(link)
    tail.bus.block = 0.05
    followers = {stream: Follower(stream) for stream in ("silent", "nobody's", "there")}
    link._owners[slot_of_key("silent")] = Address("one", 1)
    link._owners[slot_of_key("there")] = Address("two", 2)
    asked: list[str] = []

    async def submit(commands: list[Command], _retry: bool, *, until: float) -> list[Any]:
        ((*_, stream, _position),) = commands
        asked.append(stream)
        if stream != "there":
            await asyncio.sleep(3_600)
        return [[b"something"]]

    link.submit = submit  # type: ignore[method-assign, assignment]
    join(tail, *followers.values())
    for _ in range(2):
        await tail._look_around()
    assert sorted(asked) == sorted([*followers] * 2)
    assert [one.looks for one in followers.values()] == [0, 0, 2]
