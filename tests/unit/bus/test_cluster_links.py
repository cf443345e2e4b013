"""Whom a command of a cluster goes to when a node does not answer, and who is asked about it; without servers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from shared.bus import Bell, Bus, ConnectionLost, ReplyError
from shared.bus.bell import _Line
from shared.bus.cluster import ClusterLink, NodeLink, StreamLink, _address
from shared.bus.endpoint import Address, Endpoint
from shared.bus.hash_slots import slot_of, slot_of_key
from shared.bus.link import _Batch, _Unit
from shared.errors import BusUnavailable, PermanentError

ONE, TWO = Address("one", 1), Address("two", 2)


def cluster(*masters: Address) -> ClusterLink:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test")
    link.masters = {address: number for number, address in enumerate(masters)}
    link.connected.set()
    return link


def node(link: ClusterLink, address: Address, *, there: bool = False) -> NodeLink:
    """A connection that never begins to connect. there: it is taken for connected."""
    made = NodeLink(link, address, name="test", timeout=60.0)
    made._loop = asyncio.get_running_loop()
    if there:
        made.connected.set()
    link.nodes[address] = made
    return made


async def test_nothing_waits_for_a_node_that_is_lost() -> None:
    link = node(cluster(ONE), ONE)
    unsent, sent, heard = (asyncio.get_running_loop().create_future() for _ in range(3))
    heard.set_result([])
    link._queue += [_Unit(b"", 1, one, False, 0.0, None, False) for one in (heard, unsent)]
    link._inflight.append(_Batch([_Unit(b"", 1, sent, False, 0.0, None, False)], b"", 0.0, 0.0))
    link._requeue()
    assert (type(unsent.exception()), type(sent.exception())) == (ConnectionLost, ConnectionLost)
    assert not link._queue


async def test_a_node_whose_connection_failed_says_so() -> None:
    failing = node(cluster(ONE), ONE)

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
    link.at = lambda address: cast(Any, address)  # type: ignore[method-assign]
    doubts: list[int] = []
    link.doubt = lambda: doubts.append(1)  # type: ignore[method-assign]
    line = StreamLink(link, "s", name="test", timeout=60.0)
    with pytest.raises(ConnectionError, match="has no master"):
        await line.server()
    # whom it is sent to by nobody does not matter
    line._report("MOVED 1 one:1", 0)
    link._owners[slot_of_key("s")] = ONE
    assert await line.server() == line.address == cast(Any, ONE)
    for word in ("MOVED", "ASK"):
        before = len(doubts)
        line._report(f"{word} {slot_of_key('s')} :2", 0)
        assert (await line.server(), len(doubts)) == (cast(Any, Address("one", 2)), before + 1)
        # once: when nobody is there the map says where it is
        assert await line.server() == cast(Any, ONE)
    line._report("it went away", 0)
    assert (await line.server(), link.trouble, len(doubts)) == (cast(Any, ONE), "one:1: it went away", 4)


async def test_a_slot_that_has_moved_is_told_to_the_map() -> None:
    doubts: list[int] = []
    for url in ("redis+cluster://one:1/", "redis://one:1"):
        bus = Bus(url, "test/1")
        if isinstance(bus.link, ClusterLink):
            bus.link.doubt = lambda: doubts.append(1)  # type: ignore[method-assign]
        Bell(bus).moved()
    assert doubts == [1]


async def test_the_map_is_asked_of_connected_nodes_in_turn_and_where_there_is_none_those_of_the_url_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, tried = cluster(ONE, TWO), list[Address]()
    links = [node(link, at) for at in (ONE, TWO, Address("three", 3))]
    monkeypatch.setattr(link, "to", tried.append)
    assert link._someone() is None
    assert tried == list(link._endpoint.addresses) == [ONE]
    for one in links[1:]:
        one.connected.set()
    asked = [link._someone() for _ in range(4)]
    assert asked in ([*links[1:]] * 2, [*links[:0:-1]] * 2)


async def test_who_is_lost_makes_the_map_be_read_again_once_for_each_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_UNEASY", "_ROUTINE", "_SOON"):
        monkeypatch.setattr(f"shared.bus.cluster.{name}", 3_600.0)
    link = cluster(ONE)
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

    assert await link._slots(cast(NodeLink, SimpleNamespace(call=call, address=ONE))) == []
    assert ("ERR x" in link.trouble) == isinstance(error, ReplyError)


async def test_what_is_sent_through_a_cluster_is_said_again_unless_the_caller_says_otherwise() -> None:
    link = cluster(ONE)
    staged: list[tuple[bool, dict[str, Any]]] = []

    async def _staged(_commands: Any, retry: bool, **options: Any) -> list[Any]:
        staged.append((retry, options))
        return []

    link._staged = _staged  # type: ignore[method-assign]
    await link.commit([("SET", "x", "y")], until=7.0)
    await link.commit([("SET", "x", "y")], retry=False)
    await link.submit([("SET", "x", "y")], False, block=3.0)
    assert staged == [
        (True, {"until": 7.0, "all_or_error": True}),
        (False, {"until": None, "all_or_error": True}),
        (False, {"until": None, "block": 3.0}),
    ]


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
    line = _Line(Bell(Bus("redis://one:1", "test/1", timeout=0.5)), None)
    line._loop = asyncio.get_running_loop()
    wire = Wire(answers)
    await asyncio.wait_for(line._watch(cast(Any, wire)), 60)
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
    monkeypatch.setattr("shared.bus.cluster._UNEASY", 0.01)
    link = cluster(ONE)
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

    def __init__(self, address: Address, outcomes: list[Any], given: list[tuple[Any, ...]]) -> None:
        self.address = address
        self.connected = asyncio.Event()
        self.connected.set()
        self._outcomes = outcomes
        self._given = given

    async def submit(self, commands: Any, retry: bool, *, block: float, until: float | None) -> Any:
        self._given.append((self.address.host, *commands, retry, block, until))
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
        self.link = cluster(ONE, TWO)
        self.given: list[tuple[Any, ...]] = []
        left = list(outcomes)
        for key, address in KEYS.items():
            self.link._owners[slot_of_key(key)] = address
            self.link.nodes.setdefault(address, cast(NodeLink, Scripted(address, left, self.given)))
        self.pauses: list[float] = []
        self.doubts = 0
        monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", self._sleep)
        monkeypatch.setattr(self.link, "doubt", self._doubt)

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
        carried.link._owners[slot_of_key("b")] = ONE

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
    carried.link._owners[slot_of_key("b")] = None
    sleep = carried._sleep

    async def found(seconds: float) -> None:
        await sleep(seconds)
        carried.link._owners[slot_of_key("b")] = TWO

    monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", found)
    assert await carried(*GETS[:2]) == [b"1", b"2"]
    assert [given[:2] for given in carried.given] == [("one", GETS[0]), ("two", GETS[1])]
    assert (carried.pauses, carried.doubts) == ([0.01], 1)


@pytest.mark.parametrize(
    ("place", "host"), [(":7", "one"), ("?:7", "one"), ("two:7", "two"), ("[::1]:7", "::1"), ("::1:7", "::1")]
)
async def test_a_node_that_does_not_know_its_own_name_is_where_it_was_asked(place: str, host: str) -> None:
    link = cluster(ONE)
    assert _address(f"ASK 3 {place}", ONE) == Address(host, 7)

    async def call(*_command: Any, retry: bool) -> Any:
        told = host if host != "one" else place.removesuffix(":7")
        return [[0, 5, [told.encode(), 7], [b"replica", 9]], [6, 9, [None, 8]]]

    found = await link._slots(cast(NodeLink, SimpleNamespace(call=call, address=ONE)))
    assert found == [(0, 5, Address(host, 7)), (6, 9, Address("one", 8))]


async def test_each_slot_has_the_master_that_the_map_says_in_whatever_order_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test")
    wanted: list[Address] = []
    monkeypatch.setattr(link, "to", wanted.append)
    link._apply([(12_000, 16_383, TWO), (8_192, 11_999, ONE), (0, 8_000, TWO)])
    edges = {0: TWO, 8_000: TWO, 8_001: None, 8_191: None, 8_192: ONE, 11_999: ONE, 12_000: TWO, 16_383: TWO}
    assert {slot: link.owner(slot) for slot in edges} == edges
    # with one of the slots of each
    assert ({link.owner(slot): slot for slot in link.masters.values()}, wanted) == (link.masters, [TWO, ONE])
    assert list(link.masters) == [TWO, ONE]
    assert link.connected.is_set()
    # what is not said any more has none
    link._apply([(0, 1, ONE)])
    assert (link.owner(2), list(link.masters)) == (None, [ONE])


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
