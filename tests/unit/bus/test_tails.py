"""Following streams, without a server: which are looked at, from where, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from shared.bus import Bus, Command, ConnectionLost, ReplyError, Tail, order
from shared.bus import follow as module
from shared.bus.cluster import ClusterLink
from shared.bus.endpoint import Endpoint
from shared.bus.endpoint import Server as Place
from shared.bus.hash_slots import slot_of_key
from shared.errors import BusUnavailable


class Server:
    """Tells the newest entry of each stream; `asked` are the streams of each write, with what is known of them."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[dict[str, str]] = []
        self.fails: list[BaseException] = []

    def server_of(self, _stream: str) -> None:
        return None

    async def submit(self, commands: list[Command], retry: bool, *, until: float) -> list[Any]:
        # nothing of an entry behind which none would ever come
        assert {(command[0], *command[2:3], *command[4:]) for command in commands} == {
            ("XREVRANGE", "(100000000000000-0", "COUNT", 1)
        }
        # what cannot be sent before the next look is asked for by that
        assert 0 < until - asyncio.get_running_loop().time() < Tail.pause + 0.001
        assert retry is False
        self.asked.append({command[1]: command[3].removeprefix("(") for command in commands})
        if self.fails:
            raise self.fails.pop()
        return [self._newer(self.answers.get(command[1]), command[3][1:]) for command in commands]

    def _newer(self, newest: Any, after: str) -> Any:
        if not isinstance(newest, str):
            return newest or []
        return [[newest.encode(), [b"a", b"b"]]] if order(newest) > order(after) else []


class Follower:
    def __init__(self, stream: str, position: str = "0-0") -> None:
        self.stream, self.position = stream, position
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


async def test_followers_are_told_once_of_what_is_behind_the_least_position() -> None:
    server = Server()
    tail = tail_of(server)
    followers = [Follower("j", "1-10"), Follower("j", "1-9")]
    quiet, strange = Follower("quiet"), Follower("strange")
    join(tail, *followers, quiet, strange)
    server.answers = {"j": "1-12", "strange": ReplyError("WRONGTYPE")}
    await tail._look_around()
    assert server.asked.pop() == {"j": "1-9", "quiet": "0-0", "strange": "0-0"}
    assert [one.looks for one in (*followers, quiet, strange)] == [1, 1, 0, 0]
    # whoever comes for it or not
    await tail._look_around()
    assert server.asked.pop()["j"] == "1-12"
    assert [one.looks for one in followers] == [1, 1]
    # who came later has read less
    late = Follower("j", "1-11")
    join(tail, late)
    await tail._look_around()
    assert server.asked.pop()["j"] == "1-11"
    assert [one.looks for one in (*followers, late)] == [2, 2, 1]
    for one in (*followers, late):
        tail.leave(cast(Any, one))
    join(tail, Follower("j", "1-3"))
    await tail._look_around()
    assert server.asked.pop()["j"] == "1-3"


class Line:
    """The tail's own connection: `answers` are what its reads are told in turn, `asked` behind what they were."""

    def __init__(self, tail: Tail, *answers: Any) -> None:
        self.asked: list[dict[str, str]] = []
        self._answers = list(answers)
        tail.bus.line = lambda _stream, _kind: self  # type: ignore[method-assign, assignment, return-value]
        tail.bus.sane = Bus.sane.__get__(tail.bus)  # type: ignore[method-assign]

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        pass

    async def call(self, *command: Any, retry: bool, block: float) -> Any:
        assert command[:6] == ("XREAD", "COUNT", 16, "BLOCK", int(1000 * block), "STREAMS")
        streams = command[6:]
        self.asked.append(dict(zip(streams[: len(streams) // 2], streams[len(streams) // 2 :], strict=True)))
        if not self._answers:
            raise asyncio.CancelledError
        answer = self._answers.pop(0)
        if callable(answer):
            answer = answer()
        return answer


def rows(stream: str, *ids: str) -> list[Any]:
    return [stream.encode(), [[entry_id.encode(), [b"a", b"b"]] for entry_id in ids]]


JUNK = "100000000000000-0"


async def test_a_read_waits_behind_what_was_told_and_not_at_once_where_nothing_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail = Tail(cast(Any, SimpleNamespace(link=SimpleNamespace(one_server=True), block=2.0)))
    one, two, gone = Follower("one", "1-1"), Follower("two"), Follower("gone")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def left() -> Any:
        tail.leave(cast(Any, gone))
        return [rows("gone", "1-1"), rows("two", JUNK)]

    line = Line(tail, None, [rows("one", "1-2", "1-3", JUNK), rows("two", JUNK)], left, [rows("two", JUNK)])
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    join(tail, one, two, gone)
    with pytest.raises(asyncio.CancelledError):
        await tail.run()
    before, after = {"one": "1-1", "two": "0-0"}, {"one": "1-3", "two": "0-0"}
    assert line.asked == [before | {"gone": "0-0"}, before | {"gone": "0-0"}, after | {"gone": "0-0"}, after, after]
    assert [follower.looks for follower in (one, two, gone)] == [1, 0, 0]
    # nothing was found but an entry behind which none would come
    assert slept == [0.1]


async def test_many_streams_are_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 2)
    server = Server()
    tail = tail_of(server)
    join(tail, *(Follower(f"s{number}") for number in range(5)))
    await tail._look_around()
    assert sorted(len(asked) for asked in server.asked) == [1, 2, 2]
    assert {stream for asked in server.asked for stream in asked} == {f"s{number}" for number in range(5)}


async def test_a_look_that_failed_is_made_up_for_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tail, "pause", 0.01)
    server = Server()
    tail = tail_of(server)
    one = Follower("one")
    join(tail, one)
    server.answers = {"one": "1-1"}
    for fault in (BusUnavailable("away"), ConnectionLost("gone"), TimeoutError()):
        server.fails = [fault]
        await tail._look_around()
    assert one.looks == 0
    await tail._look_around()
    assert (server.asked, one.looks) == ([{"one": "0-0"}] * 4, 1)


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
        server.answers = {"j": "1-1"}
        join(tail, second)
        await eventually(lambda: second.looks)
        assert first.looks == 0


async def test_a_node_that_says_nothing_keeps_no_other_from_being_asked() -> None:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1"), name="test")
    tail = tail_of(link)
    tail.bus.block = 0.05
    followers = {stream: Follower(stream) for stream in ("silent", "nobody's", "there")}
    link._owners[slot_of_key("silent")] = cast(Any, SimpleNamespace(at=Place("one", 1)))
    link._owners[slot_of_key("there")] = cast(Any, SimpleNamespace(at=Place("two", 2)))
    asked: list[str] = []

    async def submit(commands: list[Command], _retry: bool, *, until: float) -> list[Any]:
        ((_name, stream, *_),) = commands
        asked.append(stream)
        if stream != "there":
            await asyncio.sleep(3_600)
        return [[[f"1-{len(asked)}".encode(), [b"a", b"b"]]]]

    link.submit = submit  # type: ignore[method-assign, assignment]
    join(tail, *followers.values())
    for _ in range(2):
        await tail._look_around()
    assert sorted(asked) == sorted([*followers] * 2)
    assert [one.looks for one in followers.values()] == [0, 0, 2]
