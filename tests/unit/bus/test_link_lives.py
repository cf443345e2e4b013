"""A connection's life with a server that answers what the test says: how it begins, what breaks it, and what then."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.scripted_redis import ScriptedRedis
from support.waiting import eventually

from shared.bus import BusFull, ConnectionLost, Link, ReplyError, Script
from shared.bus import link as module
from shared.bus.clock import BusClock
from shared.bus.endpoint import Server
from shared.bus.link import MOST_PATIENCE, MOST_TRIES, _Unit
from shared.bus.wire import Desync
from shared.errors import BusUnavailable, PermanentError


def shas() -> tuple[bytes, ...]:
    """Of all scripts: they become more as modules are imported."""
    return tuple(script.sha.encode() for script in Script.known.values())


def sources() -> list[bytes]:
    return [script.source.encode() for script in Script.known.values()]


def loaded(redis: ScriptedRedis) -> list[bytes]:
    """What the first connection has loaded."""
    return [one[2] for one in redis.asked[0] if one[:2] == (b"SCRIPT", b"LOAD")]


def scripts(there: Any, load: Any = "OK") -> Any:
    """there: what is answered to who asks for them, or what makes one of how many there are."""

    def answer(_name: bytes, what: bytes, *asked: bytes) -> Any:
        if what != b"EXISTS":
            return load
        return there(len(asked)) if callable(there) else there

    return answer


async def test_a_connection_introduces_itself_and_loads_the_scripts_that_the_server_lacks() -> None:
    there = [number % 2 for number in range(len(shas()))]
    redis, clock = ScriptedRedis(SCRIPT=scripts(there), GET=b"1"), BusClock()
    async with redis.listening() as server:
        me = replace(server, username="me", password="p", database=3)
        async with Link(me, name="test/1", timeout=60.0, clock=clock) as link:
            assert await link.call("GET", "x") == b"1"
            assert (link.client_id, link.generation, link.connected.is_set(), link.trouble) == (1, 1, True, "")
            assert link.one_server
        assert not link.connected.is_set()
        await eventually(lambda: not redis.connections)
        await eventually(lambda: len(asyncio.all_tasks()) == 1)
    assert redis.asked == [
        [
            *((b"AUTH", b"me", b"p"), (b"SELECT", b"3"), (b"CLIENT", b"ID"), (b"CLIENT", b"SETNAME", b"test/1")),
            *((b"TIME",), (b"SCRIPT", b"EXISTS", *shas())),
            *[(b"SCRIPT", b"LOAD", source) for source in sources()[::2]],
            *((b"GET", b"x"), (b"ECHO", b"1")),
        ]
    ]
    assert clock.now_ms() == pytest.approx(5_000_000, abs=300_000)


async def test_who_may_not_ask_for_scripts_loads_them_all_and_who_has_them_loads_none() -> None:
    for answer, wanted in ((ReplyError("NOPERM no"), sources()), ([1] * len(shas()), [])):
        redis = ScriptedRedis(SCRIPT=scripts(answer))
        async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
            assert await link.call("PING") == b"PONG"
        assert loaded(redis) == wanted


async def test_a_server_that_does_not_tell_the_time_is_used_all_the_same() -> None:
    clock = BusClock()
    redis = ScriptedRedis(TIME=ReplyError("NOPERM no"))
    async with redis.listening() as server, Link(server, name="test", timeout=60.0, clock=clock) as link:
        assert await link.call("PING") == b"PONG"
    assert clock.now_ms() == pytest.approx(time.time() * 1000, abs=300_000)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"CLIENT": ReplyError("LOADING Redis is loading")}, "LOADING Redis is loading"),
        ({"CLIENT": lambda *parts: 1 if parts[1] == b"ID" else ReplyError("ERR no name")}, "ERR no name"),
        ({"SCRIPT": ReplyError("ERR no scripts")}, "ERR no scripts"),
        ({"SCRIPT": scripts(lambda count: [0] * count, ReplyError("ERR too long"))}, "ERR too long"),
        ({"SCRIPT": scripts(ReplyError("ERR not now"), ReplyError("NOPERM no"))}, "ERR not now"),
        (
            {"SCRIPT": scripts(lambda count: [0] * count, ReplyError("NOPERM no"))},
            "Redis does not have the scripts of the bus yet, and this user of it may not load them",
        ),
    ],
)
async def test_who_cannot_begin_says_why_and_tries_again(answers: dict[str, Any], reason: str) -> None:
    redis = ScriptedRedis(**answers)
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        await eventually(lambda: link.trouble)
        assert link.trouble.startswith(reason)
        assert not link.connected.is_set()
        redis.answers |= ScriptedRedis().answers
        assert await link.call("PING") == b"PONG"
        assert (link.trouble, link.generation) == ("", 1)
    # of a script that keeps nobody waiting nothing is ended
    assert (b"SCRIPT", b"KILL") not in [one for asked in redis.asked for one in asked]


async def test_a_script_that_keeps_everybody_waiting_is_ended_in_the_database_that_needs_no_choice() -> None:
    redis = ScriptedRedis(CLIENT=ReplyError("BUSY Redis is busy running a script"))

    def script(_name: bytes, what: bytes, *shas: bytes) -> Any:
        if what == b"KILL":
            del redis.answers["CLIENT"]
            redis.answers |= ScriptedRedis().answers
        return [1] * len(shas)

    redis.answers["SCRIPT"] = script
    async with redis.listening() as server, Link(replace(server, database=3), name="test", timeout=60.0) as link:
        assert await link.call("PING") == b"PONG"
        await eventually(lambda: redis.connections == 1)
    assert redis.asked[1] == [(b"SCRIPT", b"KILL")]


async def test_where_the_script_cannot_be_ended_it_is_waited_for() -> None:
    redis = ScriptedRedis(SCRIPT=ReplyError("UNKILLABLE it has written"))
    redis.answers["CLIENT"] = ReplyError("BUSY Redis is busy running a script")
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        await eventually(lambda: len(redis.asked) >= 4)
        redis.answers |= ScriptedRedis().answers
        assert await link.call("PING") == b"PONG"


CONDITIONS = [
    *("LOADING Redis is loading", "READONLY a replica", "MASTERDOWN no link", "CLUSTERDOWN no slot", "TRYAGAIN later"),
    *("NOSCRIPT no such script", "UNBLOCKED the key has gone", "BUSY a script runs"),
]


@pytest.mark.parametrize("text", CONDITIONS)
async def test_what_a_server_refuses_for_its_own_condition_is_said_again_on_a_new_connection(text: str) -> None:
    replies = [ReplyError(text), b"1"]
    redis = ScriptedRedis(GET=lambda *_: replies.pop(0))
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        assert await link.call("GET", "x") == b"1"
        assert link.generation == 2
        # of another command that is nobody's condition
        redis.answers["GET"] = ReplyError("BUSYGROUP exists")
        with pytest.raises(ReplyError, match="BUSYGROUP"):
            await link.call("GET", "x")
        redis.answers["GET"] = [ReplyError(text)]
        assert [str(one) for one in await link.call("GET", "x")] == [text]
        assert link.generation == 2
        redis.answers["GET"] = ReplyError(text)
        with pytest.raises(ConnectionLost, match="the connection to Redis was lost"):
            await link.call("GET", "x", retry=False)


async def test_a_transaction_that_a_server_began_to_refuse_for_its_condition_is_said_again() -> None:
    replies: list[Any] = [[ReplyError("READONLY a replica")], [7, ReplyError("WRONGTYPE no")]]
    redis = ScriptedRedis(INCR="QUEUED", EXEC=lambda *_: replies.pop(0))
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        one, other = await link.commit([("INCR", "x"), ("INCR", "y")])
        assert (one, str(other)) == (7, "WRONGTYPE no")
        # one that was refused for what it is ends nothing
        redis.answers |= {"INCR": ReplyError("OOM no room"), "EXEC": ReplyError("EXECABORT no")}
        with pytest.raises(BusFull, match="OOM no room"):
            await link.commit([("INCR", "x"), ("INCR", "y")])
    whole = [(b"MULTI",), (b"INCR", b"x"), (b"INCR", b"y"), (b"EXEC",)]
    assert redis.behind() == [whole, whole * 2]


async def test_after_a_lost_connection_what_may_be_repeated_is_said_again_in_its_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    redis = ScriptedRedis(GET=..., INCR=..., ECHO=...)
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        first = link.submit([("GET", "a"), ("GET", "b")], True)
        once = link.submit([("INCR", "c")], False)
        left = link.submit([("GET", "d")], True)
        last = link.submit([("GET", "e")], True)
        await eventually(lambda: redis.asked and (b"GET", b"e") in redis.asked[0])
        left.cancel()
        later = link.submit([("GET", "f")], True)
        redis.answers |= {"ECHO": lambda _name, text: text, "GET": lambda _name, key: key}
        redis.cut()
        assert [await each for each in (first, last, later)] == [[b"a", b"b"], [b"e"], [b"f"]]
        with pytest.raises(ConnectionLost, match="the connection to Redis was lost"):
            await once
    assert redis.behind()[1] == [(b"GET", key) for key in (b"a", b"b", b"e", b"f")]
    assert capsys.readouterr().err.count("bus.connection_lost") == 1


async def test_a_reply_that_got_lost_is_seen_at_the_next_number_and_not_at_the_time_out() -> None:
    replies = [..., b"1"]
    redis = ScriptedRedis(GET=lambda *_: replies.pop(0))
    async with redis.listening() as server, Link(server, name="test", timeout=3_600.0) as link:
        assert await link.call("PING") == b"PONG"
        assert await asyncio.wait_for(link.call("GET", "x"), 60) == b"1"
        # the one before is of no use
        await eventually(lambda: redis.connections == 1)
    assert redis.behind() == [[(b"PING",), (b"GET", b"x")], [(b"GET", b"x")]]


async def test_what_comes_up_while_an_answer_is_late_leaves_all_the_same() -> None:
    redis = ScriptedRedis(GET=..., ECHO=...)
    async with redis.listening() as server, Link(server, name="test", timeout=3_600.0) as link:
        asked = [link.submit([("GET", "first")], True)]
        # hurried
        await eventually(lambda: redis.asked and (b"ECHO", b"2") in redis.asked[0])
        for key in ("second", "third"):
            asked.append(link.submit([("GET", key)], True))
            await eventually(lambda key=key: (b"GET", key.encode()) in redis.asked[0], 5.0)
        redis.answers |= {"GET": lambda _name, key: key, "ECHO": lambda _name, text: text}
        redis.cut()
        assert [await one for one in asked] == [[b"first"], [b"second"], [b"third"]]


async def test_a_reply_that_got_lost_behind_another_is_seen_too() -> None:
    replies: list[Any] = [[b"1"], ..., [b"2"]]
    redis = ScriptedRedis(INCR="QUEUED", SET="QUEUED", EXEC=lambda *_: replies.pop(0))
    async with redis.listening() as server, Link(server, name="test", timeout=3_600.0) as link:
        await link.call("PING")
        # each in a flush of its own
        one, other = link.commit([("INCR", "x")]), link.commit([("SET", "y", "y" * 9_000)])
        assert await one == [b"1"]
        assert await asyncio.wait_for(other, 60) == [b"2"]
        assert link.generation == 2


async def test_what_is_asked_while_there_is_no_connection_waits_for_one() -> None:
    redis = ScriptedRedis(GET=lambda _name, key: key)
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        await link.call("PING")
        client = redis.answers["CLIENT"]
        redis.answers["CLIENT"] = ReplyError("ERR no")
        redis.cut()
        await eventually(lambda: link.trouble)
        # nothing of it was sent, so that it may be what must not be repeated
        asked = [link.submit([("GET", "x")], False), link.submit([("GET", "y")], False, now=True)]
        await asyncio.sleep(0.03)
        redis.answers["CLIENT"] = client
        assert [await one for one in asked] == [[b"x"], [b"y"]]
        assert link.generation == 2


async def test_a_read_that_may_wait_is_not_hurried() -> None:
    answered = asyncio.Event()
    redis = ScriptedRedis(XREAD=b"1")
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        for _ in range(2):
            assert await link.call("XREAD", "BLOCK", 9, block=9.0) == b"1"
        assert link.generation == 1
        redis.answers |= {"XREAD": ..., "ECHO": ...}
        reading = asyncio.create_task(link.call("XREAD", "BLOCK", 9, block=9.0))
        await eventually(lambda: (b"ECHO", b"3") in redis.asked[0])
        asyncio.get_running_loop().call_later(5 * module._LATE, answered.set)
        await answered.wait()
        assert redis.asked[0][-2:] == [(b"XREAD", b"BLOCK", b"9"), (b"ECHO", b"3")]
        reading.cancel()


async def test_a_server_that_does_not_answer_in_time_is_left_for_a_new_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    redis = ScriptedRedis(GET=..., ECHO=...)
    async with redis.listening() as server, Link(server, name="test", timeout=0.05) as link:
        asked = link.submit([("GET", "x")], True)
        await eventually(lambda: len(redis.asked) > 1)
        redis.answers |= {"GET": b"1", "ECHO": lambda _name, text: text}
        assert await asked == [b"1"]
        assert link.generation >= 2
    assert "Redis has not answered for 0.05 s" in capsys.readouterr().err


async def test_a_connection_that_nobody_can_watch_any_more_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, failed = Link._watch, list[bool]()

    async def watching(link: Link, wire: Any) -> None:
        if not failed:
            failed.append(True)
            raise RuntimeError("a fault of the watch")
        await watch(link, wire)

    monkeypatch.setattr(Link, "_watch", watching)
    redis = ScriptedRedis()
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        await eventually(lambda: link.generation == 2)
        assert await link.call("PING") == b"PONG"
    assert "a fault of the watch" in capsys.readouterr().err


async def test_where_nobody_listens_that_is_told_and_what_was_given_up_meanwhile_is_nobodys_matter() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with Link(Server("127.0.0.1", taken.getsockname()[1]), name="test", timeout=60.0) as link:
            left, waiting = link.submit([("GET", "x")], True), link.submit([("GET", "x")], True)
            left.cancel()
            await eventually(lambda: link.trouble)
            assert re.search("refused|Connect call failed", link.trouble)
        with pytest.raises(BusUnavailable, match="the bus is closed"):
            await waiting


class Watching:
    """A link's look at its connection, by a clock of the test's. events: what happens when, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *batches: module._Batch) -> None:
        self.now, self.unsent, self.heard = 0.0, 0, 0.0
        self.link = Link(Server(), name="test", timeout=1.0)
        self.link._loop = cast(Any, SimpleNamespace(time=lambda: self.now))
        self.link._inflight.extend(batches)
        self.happens: Any = lambda: None
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unsent)
        monkeypatch.setattr("shared.bus.link.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        if self.now > 20:
            raise RuntimeError("for ever")
        self.now += seconds
        self.happens()

    async def given_up(self) -> float:
        """When it gave the connection up; RuntimeError when it did not."""
        with pytest.raises(TimeoutError, match="Redis has not answered for 1 s"):
            await self.link._watch(cast(Any, self))
        return self.now


def batch(expires: float, block: float = 0.0) -> module._Batch:
    return module._Batch([], b"1", block, expires)


async def test_a_connection_is_given_up_when_a_reply_is_overdue_and_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1.0 < await Watching(monkeypatch, batch(1.0), batch(9.0)).given_up() < 1.5
    assert 4.0 < await Watching(monkeypatch, batch(4.0)).given_up() < 4.5
    assert 3.0 < await Watching(monkeypatch, batch(0.5, block=2.0)).given_up() < 3.5
    with pytest.raises(RuntimeError, match="for ever"):
        await Watching(monkeypatch).given_up()


@pytest.mark.parametrize("until", [3.0, 7.0])
async def test_what_still_moves_in_either_direction_is_no_silence(
    until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears = Watching(monkeypatch, batch(1.0, block=1.0))

    def hear() -> None:
        hears.heard = min(hears.now, until)

    hears.happens = hear
    assert until + 2.0 < await hears.given_up() < until + 2.5
    sends = Watching(monkeypatch, batch(1.0, block=1.0))
    sends.unsent = 1_000

    def send() -> None:
        sends.unsent = 1_000 - int(100 * min(sends.now, until))

    sends.happens = send
    assert until + 2.0 < await sends.given_up() < until + 2.5
    # one that only grows says nothing
    grows = Watching(monkeypatch, batch(1.0))

    def grow() -> None:
        grows.unsent += 1

    grows.happens = grow
    assert 1.0 < await grows.given_up() < 1.5


async def test_an_answer_that_was_only_not_read_yet_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching(monkeypatch, batch(1.0))

    def answered() -> None:
        # another one is the oldest at every look
        watching.link._inflight[0] = batch(1.0)

    watching.happens = answered
    with pytest.raises(RuntimeError, match="for ever"):
        await watching.given_up()


def test_a_flush_may_take_as_long_as_its_longest_read_and_its_bytes_do() -> None:
    link, written, later = Link(Server(), name="test", timeout=1.0), list[bytes](), list[float]()
    link._loop = cast(Any, SimpleNamespace(time=lambda: 100.0, call_later=lambda seconds, _do: later.append(seconds)))
    wire = cast(Any, SimpleNamespace(write=lambda parts: written.append(b"".join(parts))))
    units = [
        _Unit(data, 1, cast(Any, None), True, block, None, atomic)
        for data, block, atomic in ((b"a" * 3_000_000, 2.0, False), (b"b", 5.0, True), (b"c", 0.0, False))
    ]
    link._send(wire, units)
    (sent,) = link._inflight
    assert (sent.units, sent.marker, sent.expected, sent.block, sent.atomic) == (units, b"1", 4, 5.0, True)
    assert sent.expires == pytest.approx(109.0, abs=0.01)
    # somebody may wait in Redis: nothing is late
    assert later == []
    link._send(wire, [])
    assert later == []
    link._send(wire, units[2:])
    assert len(later) == 1
    assert [one.atomic for one in link._inflight] == [True, False, False]
    echo = [b"*2\r\n$4\r\nECHO\r\n$1\r\n%d\r\n" % number for number in (1, 2, 3)]
    assert written == [b"a" * 3_000_000 + b"bc" + echo[0], echo[1], b"c" + echo[2]]


async def test_what_was_given_up_or_came_too_late_is_never_sent() -> None:
    redis = ScriptedRedis(GET=lambda _name, key: key)
    async with redis.listening() as server, Link(server, name="test", timeout=60.0) as link:
        now = asyncio.get_running_loop().time()
        late = link.submit([("GET", "late")], True, until=now - 1)
        left = link.submit([("GET", "left")], True)
        good = [link.submit([("GET", "good")], True, until=now + 3_600), link.submit([("GET", "always")], True)]
        left.cancel()
        assert [await one for one in good] == [[b"good"], [b"always"]]
        with pytest.raises(ConnectionLost, match="there was no connection to Redis in time") as lost:
            await late
        assert lost.value.broken == 0
    assert redis.behind() == [[(b"GET", b"good"), (b"GET", b"always")]]


async def test_a_message_too_large_for_something_on_the_way_is_refused_after_some_tries_and_a_small_one_never() -> None:
    link = Link(Server(), name="test")
    loop = link._loop = asyncio.get_running_loop()
    large, small = b"x" * 2_000_000, b"x"
    units = [_Unit(data, 1, loop.create_future(), True, 0.0, 1.0, False) for data in (large, small, large, small)]
    for unit in units[2:]:
        unit.until = None
    for tries in range(1, MOST_TRIES):
        link._inflight.append(module._Batch(units, b"1", 0.0, 0.0))
        link._requeue()
        assert [unit.tries for unit in link._queue] == [tries] * 4
        if tries < MOST_TRIES - 1:
            link._queue.clear()
    # two of them are too late by now
    assert link._taken() == units[2:]
    for unit, broken in zip(units[:2], (MOST_TRIES - 1, 0), strict=True):
        error = unit.future.exception()
        assert isinstance(error, ConnectionLost)
        assert error.broken == broken
    assert not link._queue
    link._inflight.append(module._Batch(units, b"1", 0.0, 0.0))
    link._requeue()
    assert list(link._queue) == [units[3]]
    with pytest.raises(PermanentError, match=f"2000000 bytes broke the connection to Redis {MOST_TRIES} times"):
        await units[2].future


async def test_whoever_waits_when_a_link_closes_is_told_and_so_is_whoever_comes_later() -> None:
    redis = ScriptedRedis(GET=..., ECHO=...)
    async with redis.listening() as server:
        async with Link(server, name="test", timeout=60.0) as link:
            sent = link.submit([("GET", "x")], True)
            once = link.submit([("GET", "y")], False)
            await eventually(lambda: redis.asked and (b"GET", b"y") in redis.asked[0])
        for waiting in (sent, link.submit([("GET", "x")], True)):
            with pytest.raises(BusUnavailable, match="the bus is closed"):
                await waiting
        with pytest.raises(ConnectionLost):
            await once


class Failing(Link):
    """A link whose connections end as `ends` say: with an error, and behind it whether anything was answered."""

    def scripted(self, *ends: tuple[Exception, bool]) -> Failing:
        self.ends = list(ends)
        self.patiences: list[float] = []
        return self

    async def _once(self) -> None:
        self.patiences.append(self._patience)
        if not self.ends:
            await asyncio.Event().wait()
        error, useful = self.ends.pop(0)
        if useful:
            self._useful = True
            self.generation += 1
        raise error


@pytest.mark.parametrize(("timeout", "most"), [(1.0, MOST_PATIENCE), (7.0, 7.0)])
async def test_who_answers_too_late_is_given_more_time_up_to_a_bound_and_who_serves_is_asked_again_soon(
    timeout: float, most: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("shared.bus.link.asyncio.sleep", pause)
    late, away, odd = TimeoutError(), ConnectionError("away"), Desync("odd")
    ends = [*[(late, False)] * 5, (away, False), (away, False), (odd, True), (odd, True), (away, False), (late, True)]
    link = Failing(Server(), name="test", timeout=timeout).scripted(*ends, (away, False))
    async with link:
        while len(link.patiences) <= len(ends) + 1:
            await sleep(0)
    grows = [min(most, timeout * 2**number) for number in range(6)]
    assert link.patiences == [*grows, *[timeout] * 7]
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.02, 0.02, 0.04, 0.02, 0.04]
    told = [json.loads(line)["reason"] for line in capsys.readouterr().err.splitlines()]
    # once for each outage and each reason
    assert [reason for reason in told if not reason.startswith("no connection")] == [
        "away",
        "odd",
        "odd",
        "away",
        "away",
    ]
    assert link.trouble == "away"


def test_replies_that_nobody_asked_for_or_with_another_number_are_of_no_use() -> None:
    link = Link(Server(), name="test")
    with pytest.raises(Desync, match="nobody asked for"):
        link._receive([b"x"])
    link._inflight.append(module._Batch([], b"7", 0.0, 0.0))
    with pytest.raises(Desync, match="do not match"):
        link._receive([b"8"])
