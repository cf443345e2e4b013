"""Following journals by rings, without a server: what a ring gives, and what is looked for without one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.scripted_redis import ScriptedRedis
from support.waiting import eventually

from shared.bus import Command, Link, ReplyError
from shared.bus import bell as module
from shared.bus.bell import Bell, _Line, open_bell
from shared.bus.endpoint import Server as Place
from shared.bus.follow import directly_before

JOURNAL = "local2:journal:7-0:A"


class Line:
    """The connection to the server, of which the test says what it listens to."""

    made: list[Line]

    trouble = ""

    def __init__(self, _bell: Bell, server: Any) -> None:
        self.server = server
        self.listening: set[str] = set()
        self.asked: list[str] = []
        self.forgotten: list[str] = []
        self.state = "new"
        Line.made.append(self)

    def open(self) -> None:
        self.state = "open"

    def listen(self, stream: str) -> bool:
        self.asked.append(stream)
        return stream in self.listening

    def forget(self, stream: str) -> None:
        self.forgotten.append(stream)

    async def __aexit__(self) -> None:
        self.state = "closed"


class Server:
    """Has nothing new; `asked` are the streams that were looked at, and behind which entry."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def server_of(self, _stream: str) -> Server:
        return self

    async def submit(self, commands: list[Command], _retry: bool, *, until: float) -> list[Any]:
        self.asked += [(command[1], command[3]) for command in commands]
        return [[] for _ in commands]


class Follower:
    def __init__(self, stream: str = JOURNAL, position: str = "0-0") -> None:
        self.stream, self.position = stream, position
        self.offered: list[Any] = []
        self.looks = 0

    def offer(self, at: Any, entry: Any, size: int) -> None:
        self.offered.append((at, entry, size))

    def look(self) -> None:
        self.looks += 1


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> Bell:
    Line.made = []
    monkeypatch.setattr(module, "_Line", Line)
    return Bell(cast(Any, SimpleNamespace(link=Server(), source="test/1", block=2.0)))


def join(bell: Bell, *followers: Follower) -> None:
    for follower in followers:
        bell.join(cast(Any, follower))


def leave(bell: Bell, *followers: Follower) -> None:
    for follower in followers:
        bell.leave(cast(Any, follower))


async def test_one_connection_is_opened_for_all_and_who_joins_what_rings_already_looks_once(bell: Bell) -> None:
    first, second, other = Follower(), Follower(), Follower("other")
    join(bell, first, other)
    (line,) = Line.made
    assert (line.state, line.server, line.asked) == ("open", bell.bus.link, [JOURNAL, "other"])
    # what was written before its rings come is looked for when they do
    assert (first.looks, other.looks) == (0, 0)
    line.listening = {JOURNAL}
    join(bell, second)
    assert (first.looks, second.looks) == (0, 1)
    assert bell.streams_of(cast(Any, line)) == [JOURNAL, "other"]
    await bell.close()
    assert line.state == "closed"


async def test_a_stream_rings_until_its_last_follower_has_gone(bell: Bell) -> None:
    first, second, other = Follower(), Follower(), Follower("other")
    join(bell, first, second, other)
    (line,) = Line.made
    leave(bell, first)
    bell.rang(JOURNAL, b"1-1 kind 5 {}")
    assert (len(first.offered), len(second.offered), line.forgotten) == (0, 1, [])
    assert bell._followed.is_set()
    leave(bell, second)
    assert line.forgotten == [JOURNAL]
    assert bell._followed.is_set()
    leave(bell, other)
    assert (line.forgotten, bell._followed.is_set()) == ([JOURNAL, "other"], False)
    assert (bell.look("other"), bell._followers) == (False, {})
    # once more harms nobody, nor one who never came
    leave(bell, second, Follower("never"))
    # who is rung and not there any more
    bell.rang(JOURNAL, b"1-2 kind 5 {}")
    assert not bell.look(JOURNAL)
    assert len(second.offered) == 1
    join(bell, second)
    assert bell.look(JOURNAL) is True
    assert second.looks == 1


@pytest.mark.parametrize(
    ("message", "after", "at", "entry"),
    [
        (b"1-1 token 170 {}", (0, 0), (1, 1), ("1-1", [b"type", b"token", b"time", b"170", b"data", b"{}"])),
        (b'2-1 t 1 {"a": 1}', (2, 0), (2, 1), ("2-1", [b"type", b"t", b"time", b"1", b"data", b'{"a": 1}'])),
        (b"1-8 t 1 ", (1, 7), (1, 8), ("1-8", [b"type", b"t", b"time", b"1", b"data", b""])),
    ],
)
async def test_a_ring_brings_the_entry_with_the_place_behind_which_it_comes(
    message: bytes, after: Any, at: Any, entry: Any, bell: Bell
) -> None:
    follower, other = Follower(), Follower("other")
    join(bell, follower, other)
    bell.rang(JOURNAL, message)
    assert follower.offered == [(at, entry, len(message))]
    assert directly_before(at) == after
    assert (follower.looks, other.offered) == (0, [])


@pytest.mark.parametrize("message", [b"1-5", b"1-5 token 170", b"", b"x t 1 {}", b"1-5x t 1 {}", b"\xff t 1 {}"])
async def test_a_ring_that_brings_nothing_has_the_stream_looked_at(message: bytes, bell: Bell) -> None:
    follower, other = Follower(), Follower("other")
    join(bell, follower, other)
    bell.rang(JOURNAL, message)
    assert (follower.offered, follower.looks, other.looks) == ([], 1, 0)


async def test_a_look_finds_where_every_stream_rings_now_and_what_did_not_ring(bell: Bell) -> None:
    server = cast(Server, bell.bus.link)
    join(bell, Follower("rings"), Follower("quiet"))
    # what brings no entry, or not the next one, may lie
    for message in (b"1-1 t 1 {}", b"x t 1 {}", b"1-2", b"1-3 t 1 {}", b"9-9 t 1 {}"):
        bell.rang("rings", message)
    await bell._look_around()
    assert server.asked == [("rings", "(1-1"), ("quiet", "(0-0")]
    assert Line.made[0].asked == ["rings", "quiet", "rings", "quiet"]


class Wire:
    def __init__(self) -> None:
        self.sent: list[Command] = []

    def send(self, commands: list[Command]) -> None:
        self.sent += commands


class Told:
    """A bell that notes what its connection tells it."""

    bus = SimpleNamespace(source="test/1", timeout=1.0)

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.followed = {JOURNAL}

    def rang(self, stream: str, message: bytes) -> None:
        self.heard.append(("rang", stream, message))

    def streams_of(self, _line: _Line) -> list[str]:
        return [JOURNAL]

    def look(self, stream: str) -> bool:
        self.heard.append(("look", stream))
        return stream in self.followed


async def test_a_connection_listens_to_what_was_confirmed_and_forgets_what_nobody_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, wire, said = Told(), Wire(), list[str]()
    line = _Line(cast(Any, told), Place())
    monkeypatch.setattr(line, "_report", lambda text, _generation: said.append(text))
    # not connected yet: it is asked for when it is
    assert not line.listen(JOURNAL)
    line.forget(JOURNAL)
    line._wire = cast(Any, wire)
    assert not line.listen(JOURNAL)
    line._receive([[b"ssubscribe", JOURNAL.encode(), 1], [b"smessage", JOURNAL.encode(), b"1-1 t 1 {}"]])
    assert told.heard == [("look", JOURNAL), ("rang", JOURNAL, b"1-1 t 1 {}")]
    # a connection that brings rings is one that answers
    assert line._useful
    assert line.listen(JOURNAL)
    assert wire.sent == [("SSUBSCRIBE", JOURNAL)]
    # who asked for it has left before it was confirmed
    line._receive([[b"ssubscribe", b"left", 2]])
    assert wire.sent[1:] == [("SUNSUBSCRIBE", "left")]
    assert not line.listen("left")
    line.forget(JOURNAL)
    line.forget(JOURNAL)
    assert wire.sent[3:] == [("SUNSUBSCRIBE", JOURNAL)]
    line._receive([[b"ssubscribe", JOURNAL.encode(), 1], [b"sunsubscribe", JOURNAL.encode(), 0]])
    assert not line.listen(JOURNAL)
    told.heard.clear()
    line._receive([ReplyError("MOVED 1 x:1"), ReplyError("NOPERM no"), b"PONG", [b"something", b"else"]])
    # where a stream is now, a look finds out
    assert (told.heard, said) == ([], ["NOPERM no"])
    line._wire = None


async def test_a_silent_server_is_asked_after_a_while_and_given_up_when_it_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = 1_000.0, list[float]()
    wire = SimpleNamespace(heard=now, sent=[])
    wire.send = wire.sent.append

    async def sleep(seconds: float) -> None:
        nonlocal now
        waited.append(seconds)
        now += seconds
        # it says something once, when it was asked for the first time
        if len(wire.sent) == 2 and wire.heard < 1_001:
            wire.heard = now

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    line = _Line(cast(Any, Told()), Place())
    monkeypatch.setattr(line, "_loop", SimpleNamespace(time=lambda: now), raising=False)
    with pytest.raises(TimeoutError, match="has not answered"):
        await line._watch(cast(Any, wire))
    # what rings here is asked for first
    assert wire.sent == [[("SSUBSCRIBE", JOURNAL)], [("PING",)], [("PING",)]]
    assert waited == [module._SILENCE, line._patience, module._SILENCE, line._patience]


async def test_a_server_that_says_something_all_the_time_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = SimpleNamespace(heard=1_000.0, sent=[])
    wire.send = wire.sent.append
    now, waited = 1_000.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal now, waited
        now += seconds
        waited += 1
        # silent at last
        if waited < 5:
            wire.heard = now - 0.5

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    line = _Line(cast(Any, Told()), Place())
    monkeypatch.setattr(line, "_loop", SimpleNamespace(time=lambda: now), raising=False)
    with pytest.raises(TimeoutError, match="has not answered"):
        await line._watch(cast(Any, wire))
    # four rounds in which it said something, one in which it did not, and the time for an answer
    assert (waited, wire.sent[1:]) == (6, [[("PING",)]])


def confirmed(what: bytes, stream: bytes) -> list[Any]:
    return [what.lower(), stream, 1]


async def test_a_bell_asks_for_its_rings_with_every_connection_and_ends_with_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # nothing is left to the rounds
    monkeypatch.setattr(Bell, "pause", 3_600.0)
    redis = ScriptedRedis(SSUBSCRIBE=confirmed, SUNSUBSCRIBE=confirmed, XREVRANGE=[])
    async with redis.listening() as server, Link(server, name="test/1", timeout=60.0) as link:
        bus = cast(Any, SimpleNamespace(link=link, source="test/1", timeout=77.0, block=2.0))
        await link.call("PING")
        async with open_bell(bus) as bell:
            first, second, late = Follower(), Follower("other"), Follower()
            join(bell, first, second)
            await eventually(lambda: first.looks and second.looks)
            (line,) = bell._lines.values()
            assert bell.streams_of(line) == [JOURNAL, "other"]
            client = redis.answers["CLIENT"]
            redis.answers["CLIENT"] = ReplyError("ERR no")
            redis.cut()
            await eventually(lambda: line.trouble == "ERR no")
            # nothing rings as long as it is away
            join(bell, late)
            assert (line.listen(JOURNAL), late.looks) == (False, 0)
            looked = first.looks, second.looks
            redis.answers["CLIENT"] = client
            await eventually(lambda: first.looks > looked[0] and second.looks > looked[1] and late.looks)
            assert line.listen(JOURNAL)
            asked = next(asked for asked in reversed(redis.asked) if (b"SSUBSCRIBE", b"other") in asked)
            assert asked[1] == (b"CLIENT", b"SETNAME", b"test/1:bell")
            rings = [one for one in asked if one[0] == b"SSUBSCRIBE"]
            assert rings[:2] == [(b"SSUBSCRIBE", JOURNAL.encode()), (b"SSUBSCRIBE", b"other")]
            leave(bell, second)
            await eventually(lambda: (b"SUNSUBSCRIBE", b"other") in asked)
        # the one for commands is left
        await eventually(lambda: redis.connections == 1)
        assert [task for task in asyncio.all_tasks() if task.get_name() == "bell"] == []
