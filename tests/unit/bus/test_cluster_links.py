"""Whom a command of a cluster goes to when a node does not answer, and who is asked about it; without servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from shared.bus import Bell, Bus, ConnectionLost, ReplyError
from shared.bus.bell import _Line
from shared.bus.cluster import ClusterLink
from shared.bus.cluster_map import NodeLink, StreamLink
from shared.bus.endpoint import Endpoint, Server
from shared.bus.hash_slots import slot_of, slot_of_key
from shared.bus.link import _Batch, _Unit
from shared.errors import BusUnavailable, PermanentError

ONE, TWO = Server("one", 1), Server("two", 2)


def cluster(*masters: Server) -> ClusterLink:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test")
    link.masters = {node(link, server): number for number, server in enumerate(masters)}
    link.connected.set()
    return link


def node(link: ClusterLink, server: Server) -> NodeLink:
    """A connection that never begins to connect."""
    made = NodeLink(server, name="test", timeout=60.0, lost=link.lost)
    made._loop = asyncio.get_running_loop()
    link.nodes[server] = made
    return made


async def test_nothing_waits_for_a_node_that_is_lost() -> None:
    link = cluster(ONE).nodes[ONE]
    unsent, sent, heard = (asyncio.get_running_loop().create_future() for _ in range(3))
    heard.set_result([])
    link._queue += [_Unit(b"", 1, one, False, 0.0, None, False) for one in (heard, unsent)]
    link._inflight.append(_Batch([_Unit(b"", 1, sent, False, 0.0, None, False)], b"", 0.0, 0.0))
    link._requeue()
    assert (type(unsent.exception()), type(sent.exception())) == (ConnectionLost, ConnectionLost)
    assert not link._queue


async def test_a_node_whose_connection_failed_says_so() -> None:
    failing = cluster(ONE).nodes[ONE]

    async def fail() -> None:
        raise RuntimeError("a fault")

    failing._run = fail  # type: ignore[method-assign]
    failing.open()
    # whoever waits for it is told
    await asyncio.wait_for(failing.connected.wait(), 60)
    with pytest.raises(PermanentError, match="a fault of this program"):
        await failing.submit([("GET", "x")], False)


async def test_a_read_that_waits_goes_to_where_its_stream_is_or_where_it_was_sent() -> None:
    link = cluster(ONE)
    one, two = link.nodes[ONE], node(link, Server("one", 2))
    doubts: list[int] = []
    link.doubt = lambda: doubts.append(1)  # type: ignore[method-assign]
    line = StreamLink(link, "s", name="test", timeout=60.0)
    with pytest.raises(ConnectionError, match="has no master"):
        await line.server()
    # whom it is sent to by nobody does not matter
    line._report("MOVED 1 one:1", 0)
    link._owners[slot_of_key("s")] = one
    assert (await line.server(), line.node) == (ONE, one)
    for word in ("MOVED", "ASK"):
        before = len(doubts)
        line._report(f"{word} {slot_of_key('s')} :2", 0)
        assert (await line.server(), line.node, len(doubts)) == (two.at, two, before + 1)
        # once: when nobody is there the map says where it is
        assert await line.server() == ONE
    line._report("it went away", 0)
    assert (await line.server(), link.trouble, len(doubts)) == (ONE, "one:1: it went away", 4)


async def test_a_read_stays_with_the_master_and_leaves_who_is_none_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus.cluster_map._VISIT", 0.01)
    link = cluster(ONE, TWO)
    one, two = link.nodes.values()
    line = link.line("s", "test/1:inbox")
    line.node = one
    # as long as nobody is known to be it, whoever was asked may be
    for owner in (one, None):
        link._owners[slot_of_key("s")] = owner
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(line._visit(), 0.05)
    link._owners[slot_of_key("s")] = two
    with pytest.raises(ConnectionError, match="the visit is over"):
        await asyncio.wait_for(line._visit(), 30)
    # which is no trouble
    line._report("the visit is over", 1)
    assert link.trouble == ""


async def test_a_stream_is_with_the_master_of_its_slot_and_with_nobody_as_long_as_there_is_none() -> None:
    link = cluster(ONE)
    assert link.server_of("s") is None
    link._owners[slot_of_key("s")] = link.nodes[ONE]
    assert link.server_of("s") == ONE
    line = link.line("s", "test/1:inbox")
    assert (type(line), line._name, line._timeout, line._slot) == (StreamLink, "test/1:inbox", 5.0, slot_of_key("s"))


async def test_a_node_without_slots_is_given_up_when_it_is_lost_and_not_while_it_is_first_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = cluster(ONE)
    coming, gone = node(link, TWO), node(link, Server("three", 3))
    closed: list[NodeLink] = []

    async def close(self: NodeLink, *_exc: object) -> None:
        closed.append(self)

    monkeypatch.setattr(NodeLink, "__aexit__", close)
    for lost in (link.nodes[ONE], gone):
        lost._report("it went away", 0)
    await link._forget()
    assert (closed, list(link.nodes.values())) == ([gone], [link.nodes[ONE], coming])


async def test_the_map_is_asked_of_connected_nodes_in_turn_and_where_there_is_none_those_of_the_url_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, tried = cluster(ONE, TWO), list[Server]()
    links = [*link.nodes.values(), node(link, Server("three", 3))]
    monkeypatch.setattr(link, "to", tried.append)
    assert link._someone() is None
    assert tried == list(link._endpoint.several) == [ONE]
    for one in links[1:]:
        one.connected.set()
    asked = [link._someone() for _ in range(4)]
    assert asked in ([*links[1:]] * 2, [*links[:0:-1]] * 2)


async def test_who_is_lost_makes_the_map_be_read_again_once_for_each_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_UNEASY", "_ROUTINE", "_SOON"):
        monkeypatch.setattr(f"shared.bus.cluster_map.{name}", 3_600.0)
    link = cluster()
    read = 0

    async def slots(_asked: Any) -> list[Any]:
        nonlocal read
        read += 1
        return []

    monkeypatch.setattr(link, "_someone", lambda: "a node")
    monkeypatch.setattr(link, "_slots", slots)
    async with link:
        for expected in (1, 2, 3):
            await eventually(lambda expected=expected: read == expected)
            await asyncio.sleep(0.03)
            assert read == expected
            link.lost("one:1: it went away")
    assert link.trouble == "one:1: it went away"


@pytest.mark.parametrize(
    "error", [ConnectionLost("x"), BusUnavailable("x"), ReplyError("ERR x")], ids=lambda one: repr(one)
)
async def test_a_node_that_cannot_tell_the_map_ends_nothing(error: Exception) -> None:
    link = cluster(ONE)

    async def call(*command: Any, retry: bool) -> Any:
        assert (command, retry) == (("CLUSTER", "SLOTS"), False)
        raise error

    assert await link._slots(cast(NodeLink, SimpleNamespace(call=call, at=ONE))) == []
    assert ("ERR x" in link.trouble) == isinstance(error, ReplyError)


async def test_what_is_sent_through_a_cluster_is_said_again_unless_the_caller_says_otherwise() -> None:
    link = cluster(ONE)
    given: list[tuple[bool, dict[str, Any]]] = []

    async def submit(_commands: Any, retry: bool, **options: Any) -> list[Any]:
        given.append((retry, options))
        return []

    link.submit = submit  # type: ignore[method-assign]
    await link.commit([("SET", "x", "y")], until=7.0)
    await link.commit([("SET", "x", "y")], retry=False)
    assert given == [(True, {"until": 7.0, "all_or_error": True}), (False, {"until": None, "all_or_error": True})]
    given.clear()

    async def carry(_commands: Any, _slots: Any, *, retry: bool, **options: Any) -> list[Any]:
        given.append((retry, options))
        return [b"OK"]

    link.carry = carry  # type: ignore[method-assign, assignment]
    assert await ClusterLink.submit(link, [("SET", "x", "y")], False, block=3.0) == [b"OK"]
    assert given == [(False, {"block": 3.0, "until": None})]


async def test_a_cluster_that_ends_ends_its_connections_and_tells_whoever_waits_for_its_map() -> None:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test")
    closed: list[bool] = []

    async def close() -> None:
        closed.append(link.connected.is_set())

    async def learn() -> None:
        await asyncio.Event().wait()

    link.nodes[ONE] = cast(Any, SimpleNamespace(__aexit__=close))
    link._learn = learn  # type: ignore[method-assign]
    async with link:
        assert not link.connected.is_set()
    assert closed == [True]


class Wire:
    """A connection to a server that answers so many of the questions whether it lives."""

    def __init__(self, answers: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self.asked = 0
        self._answers = answers

    def send(self, commands: Any) -> None:
        if not commands:
            # nothing is followed
            return
        assert commands == [("PING",)]
        self.asked += 1
        if self.asked <= self._answers:
            self._loop.call_later(0.001, self.hear)

    def hear(self) -> None:
        self.heard = self._loop.time()


@pytest.mark.parametrize("answers", [0, 3])
async def test_a_bell_that_is_silent_is_asked_and_given_up_when_it_does_not_answer(
    answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.bell._SILENCE", 0.01)
    line = _Line(Bell(Bus("redis://one:1", "test/1", timeout=0.5)), ONE)
    line._loop = asyncio.get_running_loop()
    wire = Wire(answers)
    with pytest.raises(TimeoutError, match=r"has not answered for 0\.5 s"):
        await line._watch(cast(Any, wire))
    assert wire.asked == answers + 1


async def test_every_master_is_asked_by_one_of_its_slots_and_tells_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = cluster(TWO, ONE)
    bus = Bus("redis+cluster://one:1/", "test/1")
    bus.link = link
    asked: list[tuple[int, Any]] = []
    pages = [[b"7", [b"a"]], [b"0", [b"b"]], [b"5", [b"c"]], [b"0", []]]
    replies: list[Any] = [*pages, ReplyError("ERR invalid cursor")]

    async def carry(commands: list[Any], slots: list[int], *, retry: bool) -> list[Any]:
        assert retry
        asked.extend(zip(slots, commands, strict=True))
        return [replies.pop(0)]

    monkeypatch.setattr(link, "carry", carry)
    assert await link.places() == [0, 1]
    assert [keys async for keys in bus.scan("x*")] == [[b"a"], [b"b"], [b"c"], []]
    rest = ("MATCH", "x*", "COUNT", 1_000)
    cursors = ((0, b"0"), (0, b"7"), (1, b"0"), (1, b"5"))
    assert asked == [(slot, ("SCAN", cursor, *rest)) for slot, cursor in cursors]
    with pytest.raises(ReplyError, match="ERR invalid cursor"):
        await anext(bus.scan("x*"))


async def test_a_map_that_cannot_be_used_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.cluster_map._UNEASY", 0.01)
    link = cluster()
    maps = ["no map", "a map"]
    applied: list[str] = []

    async def slots(_asked: Any) -> Any:
        return maps.pop(0) if maps else []

    def apply(found: str) -> None:
        if found == "no map":
            raise IndexError(found)
        applied.append(found)

    monkeypatch.setattr(link, "_someone", lambda: "a node")
    monkeypatch.setattr(link, "_slots", slots)
    monkeypatch.setattr(link, "_apply", apply)
    async with link:
        await eventually(lambda: applied == ["a map"])


class Scripted:
    """A connection whose units get the outcomes that the test gives, in their order; `given`: what they were."""

    def __init__(self, at: Server, outcomes: list[Any], given: list[tuple[Any, ...]]) -> None:
        self.at = at
        self.connected = asyncio.Event()
        self.connected.set()
        self._outcomes = outcomes
        self._given = given

    async def submit(self, commands: Any, retry: bool, *, block: float, until: float | None) -> Any:
        self._given.append((self.at.host, *commands, retry, block, until))
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


KEYS = {"a": ONE, "b": TWO, "{a}2": ONE}
GETS = [("GET", key) for key in KEYS]
LATER, MOVED = ReplyError("TRYAGAIN later"), ReplyError(f"MOVED {slot_of_key('a')} one:1")


class Carried:
    """What became of some commands: `pauses` between the tries, and how often there was doubt about the map."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> None:
        self.link = cluster()
        self.given: list[tuple[Any, ...]] = []
        left = list(outcomes)
        self.link.nodes = {at: cast(NodeLink, Scripted(at, left, self.given)) for at in (ONE, TWO)}
        for key, at in KEYS.items():
            self.move(key, at)
        self.pauses: list[float] = []
        self.doubts = 0
        monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", self._sleep)
        monkeypatch.setattr(self.link, "doubt", self._doubt)

    def move(self, key: str, at: Server | None) -> None:
        self.link._owners[slot_of_key(key)] = at and self.link.nodes[at]

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def _doubt(self) -> None:
        self.doubts += 1

    async def __call__(self, *commands: Any, retry: bool = False, **limits: float) -> list[Any]:
        commands = commands or tuple(GETS)
        return await self.link.carry(commands, [slot_of(one) for one in commands], retry=retry, **limits)


async def test_each_node_is_given_its_commands_as_they_are_with_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carried(monkeypatch, [b"1", b"3"], [b"2"])
    until = asyncio.get_running_loop().time() + 3_600
    assert await carried(block=2.0, until=until) == [b"1", b"2", b"3"]
    assert carried.given == [("one", GETS[0], GETS[2], False, 2.0, until), ("two", GETS[1], False, 2.0, until)]
    assert (carried.pauses, carried.doubts) == ([], 0)
    with pytest.raises(ConnectionLost, match="there was no connection to the Redis Cluster in time"):
        await carried(until=until - 7_200)
    assert len(carried.given) == 2


async def test_what_a_node_cannot_do_is_tried_after_ever_longer_pauses_and_in_the_first_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carried = Carried(monkeypatch, *[[LATER, MOVED], [LATER]] * 7, [b"1", b"3"], [b"2"])
    assert await carried() == [b"1", b"2", b"3"]
    assert carried.pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    assert carried.doubts == 7
    carried = Carried(monkeypatch, [LATER, LATER], [LATER], [b"1", b"2", b"3"])
    sleep = carried._sleep

    async def moved(seconds: float) -> None:
        await sleep(seconds)
        carried.move("b", ONE)

    monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", moved)
    assert await carried() == [b"1", b"2", b"3"]
    assert carried.given[-1][:4] == ("one", *GETS)


async def test_nodes_that_send_each_other_what_neither_wants_are_not_asked_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carried = Carried(monkeypatch, *[[MOVED]] * 10, [b"1"])
    assert await carried(GETS[0]) == [b"1"]
    assert (len(carried.pauses), carried.doubts) == (10, 10)
    # whoever is only to be asked elsewhere has no reason to read the map
    ask = ReplyError(f"ASK {slot_of_key('a')} one:1")
    carried = Carried(monkeypatch, [ask], *[[b"OK", ask]] * 9, [b"OK", b"1"])
    assert await carried(GETS[0]) == [b"1"]
    assert (len(carried.pauses), carried.doubts) == (10, 0)
    assert [given[1:-3] for given in carried.given] == [(GETS[0],), *[(("ASKING",), GETS[0])] * 10]


async def test_who_is_sent_to_somebody_who_is_not_there_goes_by_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carried(monkeypatch, [ReplyError(f"ASK {slot_of_key('a')} two:2"), b"3"], [b"1"])
    carried.link.nodes[TWO].connected.clear()
    assert await carried(GETS[0], GETS[2]) == [b"1", b"3"]
    assert [given[:-3] for given in carried.given] == [("one", GETS[0], GETS[2]), ("one", GETS[0])]
    assert (len(carried.pauses), carried.doubts) == (2, 1)


async def test_only_what_was_sent_elsewhere_asks_to_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ReplyError(f"ASK {slot_of_key('a')} two:2")
    carried = Carried(monkeypatch, [ask, LATER], [b"2"], [b"OK", b"1"], [b"3"])
    assert await carried() == [b"1", b"2", b"3"]
    assert [given[:-3] for given in carried.given[2:]] == [("two", ("ASKING",), GETS[0]), ("one", GETS[2])]
    assert carried.doubts == 1


class Held:
    """A connection whose answers the test gives when it likes: `sent` are whose they are to be, in their order."""

    def __init__(self, at: Server, sent: list[tuple[str, Any, asyncio.Future[Any]]]) -> None:
        self.at = at
        self.connected = asyncio.Event()
        self.connected.set()
        self._sent = sent

    async def submit(self, commands: Any, _retry: bool, **_limits: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._sent.append((self.at.host, commands, answer))
        return await answer


class InOrder(Carried):
    """Commands of one slot whose answers the test gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.sent: list[tuple[str, Any, asyncio.Future[Any]]] = []
        self.link.nodes = {at: cast(NodeLink, Held(at, self.sent)) for at in (ONE, TWO)}
        self.slept: list[asyncio.Future[None]] = []
        self.move("a", ONE)

    async def _sleep(self, _seconds: float) -> None:
        self.slept.append(asyncio.get_running_loop().create_future())
        await self.slept[-1]

    async def say(self, value: int, **options: Any) -> asyncio.Task[list[Any]]:
        task = asyncio.create_task(self(("SET", "a", value), **options))
        await turns()
        return task

    async def answer(self, n: int, *replies: Any) -> None:
        self.sent[n][2].set_result(list(replies))
        await turns()

    async def wake(self, n: int) -> None:
        self.slept[n].set_result(None)
        await turns()

    def heard(self) -> list[tuple[str, int]]:
        """Who was sent which values so far."""
        return [(host, command[2]) for host, commands, _ in self.sent for command in commands if command[0] == "SET"]


async def turns() -> None:
    """Lets everything run that can."""
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    for _ in range(10):
        seen.clear()
        loop.call_soon(seen.set)
        await seen.wait()


ASK = ReplyError(f"ASK {slot_of_key('a')} two:2")
ELSEWHERE = ReplyError(f"MOVED {slot_of_key('a')} two:2")


@pytest.mark.parametrize("refusal", [ASK, ELSEWHERE, ReplyError("CLUSTERDOWN no")], ids=lambda one: one.code)
async def test_what_has_to_be_sent_again_is_not_overtaken_by_what_comes_later(
    refusal: ReplyError, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = InOrder(monkeypatch)
    first, second = await carried.say(1), await carried.say(2)
    # as long as all is well nothing waits for an answer
    assert carried.heard() == [("one", 1), ("one", 2)]
    for n in range(2):
        await carried.answer(n, refusal)
    # the move is over meanwhile, and everybody knows
    carried.move("a", TWO)
    third = await carried.say(3)
    # whoever wakes up first
    await carried.wake(1)
    assert len(carried.sent) == 2
    await carried.wake(0)
    assert carried.heard()[2:] == [("two", 1), ("two", 2), ("two", 3)]
    for n in range(3):
        await carried.answer(2 + n, *[b"OK"] * len(carried.sent[2 + n][1]))
    assert [await one for one in (first, second, third)] == [[b"OK"]] * 3
    # and nothing is left of it
    assert not carried.link._queues


async def test_what_is_on_its_way_to_another_node_is_answered_before_anything_is_sent_to_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carried = InOrder(monkeypatch)
    first = await carried.say(1)
    carried.move("a", TWO)
    second, third = await carried.say(2), await carried.say(3)
    # of other slots nothing waits for it
    carried.move("b", TWO)
    other = asyncio.create_task(carried(("GET", "b")))
    await turns()
    assert [host for host, *_ in carried.sent] == ["one", "two"]
    await carried.answer(1, b"2")
    assert await other == [b"2"]
    await carried.answer(0, ELSEWHERE)
    # who has left is waited for by nobody
    second.cancel()
    await carried.wake(0)
    assert carried.heard() == [("one", 1), ("two", 1), ("two", 3)]
    for n in (2, 3):
        await carried.answer(n, b"OK")
    assert [await one for one in (first, third)] == [[b"OK"]] * 2


async def test_what_is_given_up_on_its_way_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = InOrder(monkeypatch)
    until = asyncio.get_running_loop().time() + 0.05
    first = await carried.say(1)
    carried.move("a", TWO)
    second, third = await carried.say(2, until=until), await carried.say(3)
    with pytest.raises(ConnectionLost, match="in time"):
        await second
    first.cancel()
    await turns()
    assert carried.heard() == [("one", 1), ("two", 3)]
    await carried.answer(1, b"OK")
    assert await third == [b"OK"]


async def test_what_waits_for_its_second_key_lets_everything_by(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = InOrder(monkeypatch)
    first = await carried.say(1)
    await carried.answer(0, LATER)
    second = await carried.say(2)
    assert carried.heard() == [("one", 1), ("one", 2)]
    await carried.wake(0)
    assert carried.heard() == [("one", 1), ("one", 2), ("one", 1)]
    for n in (1, 2):
        await carried.answer(n, b"OK")
    assert [await one for one in (first, second)] == [[b"OK"]] * 2


@pytest.mark.parametrize("alone", [True, False])
async def test_what_is_lost_is_said_again_if_it_may_be(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, beside = (GETS[:1], []) if alone else (GETS[:2], [[b"2"]])
    wanted = [b"1", b"2"][: len(commands)]
    carried = Carried(monkeypatch, ConnectionLost("x"), *beside, [b"1"])
    assert await carried(*commands, retry=True) == wanted
    assert (len(carried.given), carried.pauses) == (len(commands) + 1, [0.01])
    for error in (ConnectionLost("x"), BusUnavailable("x")):
        carried = Carried(monkeypatch, error, *beside)
        with pytest.raises(type(error), match="x"):
            await carried(*commands, retry=isinstance(error, BusUnavailable))
        assert len(carried.given) == len(commands)


async def test_what_has_no_master_waits_for_one_and_keeps_nothing_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carried(monkeypatch, [b"1"], [b"2"])
    carried.move("b", None)
    sleep = carried._sleep

    async def found(seconds: float) -> None:
        await sleep(seconds)
        carried.move("b", TWO)

    monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", found)
    assert await carried(*GETS[:2]) == [b"1", b"2"]
    assert [given[:2] for given in carried.given] == [("one", GETS[0]), ("two", GETS[1])]
    assert (carried.pauses, carried.doubts) == ([0.01], 1)


@pytest.mark.parametrize(
    ("place", "host"), [(":7", "one"), ("?:7", "one"), ("two:7", "two"), ("[::1]:7", "::1"), ("::1:7", "::1")]
)
async def test_a_node_that_does_not_know_its_own_name_is_where_it_was_asked(place: str, host: str) -> None:
    link = cluster(ONE)
    link.to = lambda server: cast(Any, server)  # type: ignore[method-assign]
    assert link.named(f"ASK 3 {place}", link.nodes[ONE]) == cast(Any, Server(host, 7))

    async def call(*_command: Any, retry: bool) -> Any:
        told = host if host != "one" else place.removesuffix(":7")
        return [[0, 5, [told.encode(), 7], [b"replica", 9]], [6, 9, [None, 8]]]

    found = await link._slots(cast(NodeLink, SimpleNamespace(call=call, at=ONE)))
    assert found == [(0, 5, Server(host, 7)), (6, 9, Server("one", 8))]


async def test_each_slot_has_the_master_that_the_map_says_in_whatever_order_it_does() -> None:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test")
    one, two = node(link, ONE), node(link, TWO)
    link._apply([(12_000, 16_383, two), (8_192, 11_999, one), (0, 8_000, two)])
    edges = {0: two, 8_000: two, 8_001: None, 8_191: None, 8_192: one, 11_999: one, 12_000: two, 16_383: two}
    assert {slot: link.owner(slot) for slot in edges} == edges
    # with one of the slots of each
    assert {link.owner(slot): slot for slot in link.masters.values()} == link.masters
    assert list(link.masters) == [two, one]
    assert link.connected.is_set()
    # what is not said any more has none
    link._apply([(0, 1, one)])
    assert (link.owner(2), list(link.masters)) == (None, [one])


async def test_whoever_waits_for_a_map_that_never_comes_is_told_when_the_cluster_is_closed() -> None:
    async with ClusterLink(Endpoint.parse("redis+cluster://127.0.0.1:1/"), name="test") as link:
        waiting = [asyncio.create_task(link.call(*command)) for command in (("GET", "a"), ("PING",))]
        waiting.append(asyncio.create_task(link.at_place(0, [("SCAN", 0)])))
        places = asyncio.create_task(link.places())
        await asyncio.sleep(0)
    for one in (*waiting, places, link.call("GET", "a"), link.commit([("SET", "a", 1)])):
        with pytest.raises(BusUnavailable, match="the bus is closed"):
            await asyncio.wait_for(one, 30)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "cluster test"] == []
