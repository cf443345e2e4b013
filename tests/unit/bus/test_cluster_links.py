"""Whom a command of a cluster goes to when a node does not answer, and who is asked about it; without servers."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from shared.bus import Bell, Bus, ConnectionLost, ReplyError
from shared.bus.bell import _Line
from shared.bus.cluster import ClusterLink, Lines, NodeLink, Unsent, _heard
from shared.bus.endpoint import Address, Endpoint
from shared.bus.hash_slots import slot_of, slot_of_key
from shared.bus.link import MOST_PATIENCE, _Batch, _Unit
from shared.errors import BusUnavailable

never = asyncio.timeout
ONE, TWO = Address("one", 1), Address("two", 2)


class Node:
    """A connection to a node. lost: so many commands are lost on it."""

    def __init__(self, address: Address, lost: int) -> None:
        self.address = address
        self.lost = lost
        self.given: list[Any] = []

    async def submit(self, commands: Any, _retry: bool) -> list[Any]:
        self.given.append(commands[0])
        if len(self.given) <= self.lost:
            raise ConnectionLost("x")
        return [self.address.host]


class Nodes:
    def __init__(self, **lost: int) -> None:
        self.nodes = {address: Node(address, lost[address.host]) for address in (ONE, TWO)}

    def to(self, address: Address) -> Node:
        return self.nodes[address]

    async def close(self) -> None:
        pass


def cluster(masters: list[tuple[Address, ...]], **lost: int) -> tuple[ClusterLink, Nodes]:
    """masters: those of each map that is read, one after the other."""
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test")
    nodes = Nodes(**lost)
    link.masters, *later = masters

    async def mapped() -> None:
        if later:
            link.masters = later.pop(0)

    link.commands = cast(Lines, nodes)
    link._mapped = mapped  # type: ignore[method-assign]
    return link, nodes


async def test_a_command_for_a_node_is_said_again_to_it_or_to_another_when_it_is_none_any_more() -> None:
    link, _ = cluster([(ONE, TWO), (ONE, TWO), (TWO,)], one=9, two=0)
    assert await link._tell(ONE, ("PING",), True) == "two"
    link, nodes = cluster([(ONE, TWO)], one=1, two=0)
    assert await link._tell(ONE, ("PING",), True) == "one"
    assert len(nodes.nodes[ONE].given) == 2


async def test_one_that_must_not_be_repeated_is_said_once() -> None:
    link, nodes = cluster([(ONE, TWO)], one=1, two=0)
    with pytest.raises(ConnectionLost):
        await link._tell(ONE, ("INCR", "x"), False)
    assert [len(node.given) for node in nodes.nodes.values()] == [1, 0]


async def test_connections_that_are_about_to_end_do_not_outlive_their_cluster() -> None:
    link, _ = cluster([(ONE,)], one=0, two=0)
    lines = Lines(link, "x")
    lines._links[ONE] = cast(Any, SimpleNamespace(retire=asyncio.Event().wait))
    lines._retire(ONE)
    (leaving,) = lines._leaving
    await asyncio.wait_for(lines.close(), 60)
    assert leaving.cancelled()


async def test_what_a_leaving_connection_has_not_sent_goes_elsewhere_while_answers_are_still_waited_for() -> None:
    endpoint = Endpoint.parse("redis+cluster://one:1/")
    link = NodeLink(endpoint, ONE, name="test", timeout=60.0, on_loss=lambda reason: None)
    link._task = asyncio.create_task(cast(Any, asyncio.Event().wait()))
    link.connected.set()
    link._inflight.append(cast(Any, "a batch that has been sent"))
    unsent: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
    link._queue.append(_Unit(b"", 1, unsent, True, 0.0, None, False))
    leaving = asyncio.create_task(link.retire())
    with pytest.raises(Unsent):
        await asyncio.wait_for(unsent, 60)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not leaving.done()
    # its answer has come
    link._inflight.clear()
    await asyncio.wait_for(leaving, 60)


async def test_a_leaving_connection_whose_answers_never_come_ends_and_gives_back_what_may_be_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus.cluster._FAREWELL", 0.01)
    endpoint = Endpoint.parse("redis+cluster://one:1/")
    link = NodeLink(endpoint, ONE, name="test", timeout=60.0, on_loss=lambda reason: None)
    link._task = asyncio.create_task(cast(Any, asyncio.Event().wait()))
    link.connected.set()
    again, once = (asyncio.get_running_loop().create_future() for _ in range(2))
    units = [_Unit(b"", 1, again, True, 0.0, None, False), _Unit(b"", 1, once, False, 0.0, None, False)]
    link._inflight.append(_Batch(units, b"", 0.0, 0.0))
    await asyncio.wait_for(link.retire(), 60)
    assert link._task.cancelled()
    assert isinstance(again.exception(), Unsent)
    assert type(once.exception()) is ConnectionLost


async def test_a_slot_that_has_moved_is_told_to_the_map() -> None:
    doubts: list[int] = []
    for url in ("redis+cluster://one:1/", "redis://one:1"):
        bus = Bus(url, "test/1")
        if isinstance(bus.link, ClusterLink):
            bus.link.doubt = lambda: doubts.append(1)  # type: ignore[method-assign]
        Bell(bus, 1.0).moved()
    assert doubts == [1]


async def test_the_map_is_asked_of_connected_nodes_in_turn_and_where_there_is_none_those_of_the_url_are_tried() -> None:
    link, _ = cluster([(ONE, TWO)], one=0, two=0)
    endpoint, tried = Endpoint.parse("redis+cluster://one:1/"), list[Address]()
    links = [
        NodeLink(endpoint, at, name="test", timeout=60.0, on_loss=lambda reason: None)
        for at in (ONE, TWO, Address("three", 3))
    ]
    link.commands = cast(Lines, SimpleNamespace(all=lambda: links, to=tried.append))
    assert link._someone() is None
    assert tried == list(link._endpoint.addresses) == [ONE]
    for one in links[1:]:
        one.connected.set()
    asked = [link._someone() for _ in range(4)]
    assert asked in ([*links[1:]] * 2, [*links[:0:-1]] * 2)
    assert not link._whole()
    links[0].connected.set()
    assert link._whole()


async def test_who_is_lost_makes_the_map_be_read_again_once_for_each_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_UNEASY", "_ROUTINE", "_SOON"):
        monkeypatch.setattr(f"shared.bus.cluster.{name}", 3_600.0)
    link, _ = cluster([(ONE,)], one=0, two=0)
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
            link._lost("one:1: it went away")
    assert link.trouble == "one:1: it went away"


@pytest.mark.parametrize(
    "error", [ConnectionLost("x"), BusUnavailable("x"), ReplyError("ERR x"), TimeoutError()], ids=lambda one: repr(one)
)
async def test_a_node_that_cannot_tell_the_map_ends_nothing(error: Exception) -> None:
    link, _ = cluster([(ONE,)], one=0, two=0)

    async def call(*command: Any, retry: bool) -> Any:
        assert (command, retry) == (("CLUSTER", "SLOTS"), False)
        raise error

    assert await link._slots(cast(NodeLink, SimpleNamespace(call=call, address=ONE))) == []
    assert ("ERR x" in link.trouble) == isinstance(error, ReplyError)


async def test_what_is_sent_through_a_cluster_is_said_again_unless_the_caller_says_otherwise() -> None:
    link, _ = cluster([(ONE,)], one=0, two=0)
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


async def test_commands_go_to_the_owner_of_their_slot_or_wait_for_one() -> None:
    link, _ = cluster([(ONE, TWO)], one=0, two=0)
    commands = [("GET", "a"), ("GET", "b"), ("GET", "a"), ("GET", "c")]
    link._owners[slot_of(commands[0]) or 0] = ONE
    link._owners[slot_of(commands[1]) or 0] = TWO
    parts, homeless = link._parts(commands, [0, 1, 2, 3], {2: TWO})
    assert parts == {(ONE, False): [0], (TWO, False): [1], (TWO, True): [2]}
    assert homeless == [3]


async def test_a_cluster_that_ends_ends_its_connections_and_tells_whoever_waits_for_its_map() -> None:
    link, nodes = cluster([(ONE,)], one=0, two=0)
    closed: list[bool] = []

    async def close() -> None:
        closed.append(link.connected.is_set())

    async def learn() -> None:
        await asyncio.Event().wait()

    nodes.close = close  # type: ignore[method-assign]
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
    line = _Line(Bell(Bus("redis://one:1", "test/1"), patience=0.5), None)
    line._loop = asyncio.get_running_loop()
    wire = Wire(answers)
    await asyncio.wait_for(line._watch(cast(Any, wire)), 60)
    assert wire.asked == answers + 1


async def test_a_scan_goes_from_one_master_to_the_next_and_tells_what_one_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, _ = cluster([(TWO, ONE)], one=0, two=0)
    asked: list[tuple[Address, Any]] = []
    pages = [[b"7", [b"a"]], [b"0", [b"b"]], [b"5", [b"c"]], [b"0", []]]
    replies: list[Any] = [*pages, ReplyError("ERR invalid cursor")]

    async def tell(address: Address, command: Any, retry: bool) -> Any:
        assert retry
        asked.append((address, command))
        return replies.pop(0)

    monkeypatch.setattr(link, "_tell", tell)
    cursor, found = b"0", []
    for _ in range(4):
        cursor, keys = await link.call("SCAN", cursor, "COUNT", 10)
        found += keys
    assert (cursor, found) == (b"0", [b"a", b"b", b"c"])
    assert asked == [(at, ("SCAN", n, "COUNT", 10)) for at, n in ((ONE, 0), (ONE, 7), (TWO, 0), (TWO, 5))]
    assert str(await link._scan(("SCAN", 0))) == "ERR invalid cursor"


async def test_a_map_that_cannot_be_used_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.cluster._UNEASY", 0.01)
    link, _ = cluster([(ONE,)], one=0, two=0)
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
    """Connections whose units get the outcomes that the test gives, in their order; `given`: what they were."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.given: list[tuple[Any, ...]] = []

    def to(self, address: Address) -> Any:
        async def submit(commands: Any, retry: bool, *, block: float, until: float | None) -> Any:
            self.given.append((address.host, *commands, retry, block, until))
            outcome = self.outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return SimpleNamespace(submit=submit)


KEYS = {"a": ONE, "b": TWO, "{a}2": ONE}
GETS = [("GET", key) for key in KEYS]
LATER, MOVED = ReplyError("TRYAGAIN later"), ReplyError(f"MOVED {slot_of_key('a')} one:1")


class Carried:
    """What became of some commands: `pauses` between the tries, and how often there was doubt about the map."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> None:
        self.link, _ = cluster([(ONE, TWO)], one=0, two=0)
        for key, address in KEYS.items():
            self.link._owners[slot_of_key(key)] = address
        self.lines = Scripted(*outcomes)
        self.pauses: list[float] = []
        self.doubts = 0
        monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", self._sleep)
        monkeypatch.setattr(self.link, "doubt", self._doubt)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def _doubt(self) -> None:
        self.doubts += 1

    async def __call__(self, *commands: Any, retry: bool = False, **limits: float) -> list[Any]:
        return await self.link.carry(cast(Lines, self.lines), commands or GETS, retry=retry, **limits)


async def test_each_node_is_given_its_commands_as_they_are_with_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carried(monkeypatch, [b"1", b"3"], [b"2"])
    until = asyncio.get_running_loop().time() + 3_600
    assert await carried(block=2.0, until=until) == [b"1", b"2", b"3"]
    assert carried.lines.given == [("one", GETS[0], GETS[2], False, 2.0, until), ("two", GETS[1], False, 2.0, until)]
    assert (carried.pauses, carried.doubts) == ([], 0)
    with pytest.raises(ConnectionLost, match="there was no connection to the Redis Cluster in time"):
        await carried(until=until - 7_200)
    assert len(carried.lines.given) == 2


async def test_what_a_node_cannot_do_is_tried_after_ever_longer_pauses_and_in_the_first_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carried = Carried(monkeypatch, *[[LATER, MOVED], [LATER]] * 7, [b"1", b"3"], [b"2"])
    assert await carried() == [b"1", b"2", b"3"]
    assert carried.pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    # of each slot that has moved, and with each pause
    assert carried.doubts == 14
    carried = Carried(monkeypatch, [LATER, LATER], [LATER], [b"1", b"2", b"3"])
    sleep = carried._sleep

    async def moved(seconds: float) -> None:
        await sleep(seconds)
        carried.link._owners[slot_of_key("b")] = ONE

    monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", moved)
    assert await carried() == [b"1", b"2", b"3"]
    assert carried.lines.given[-1][:4] == ("one", *GETS)


async def test_nodes_that_send_each_other_what_neither_wants_are_not_asked_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carried = Carried(monkeypatch, *[[MOVED]] * 10, [b"1"])
    assert await carried(GETS[0]) == [b"1"]
    assert 0 < len(carried.pauses) < 9
    # one is followed at once
    carried = Carried(monkeypatch, [MOVED], [b"1"])
    assert await carried(GETS[0]) == [b"1"]
    assert (carried.pauses, carried.doubts) == ([], 1)


@pytest.mark.parametrize("alone", [True, False])
async def test_what_is_lost_is_said_again_if_it_may_be_and_never_left_always(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, beside = (GETS[:1], []) if alone else (GETS[:2], [[b"2"]])
    wanted = [b"1", b"2"][: len(commands)]
    for outcome, retry in ((ConnectionLost("x"), True), (Unsent("x"), False)):
        carried = Carried(monkeypatch, outcome, *beside, [b"1"])
        assert await carried(*commands, retry=retry) == wanted
        assert (len(carried.lines.given), carried.pauses) == (len(commands) + 1, [])
    for error in (ConnectionLost("x"), BusUnavailable("x")):
        carried = Carried(monkeypatch, error, *beside)
        with pytest.raises(type(error), match="x"):
            await carried(*commands, retry=isinstance(error, BusUnavailable))
        assert len(carried.lines.given) == len(commands)


async def test_what_has_no_master_waits_for_one_and_keeps_nothing_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carried(monkeypatch, [b"1"], [b"2"])
    carried.link._owners[slot_of_key("b")] = None
    sleep = carried._sleep

    async def found(seconds: float) -> None:
        await sleep(seconds)
        carried.link._owners[slot_of_key("b")] = TWO

    monkeypatch.setattr("shared.bus.cluster.asyncio.sleep", found)
    assert await carried(*GETS[:2]) == [b"1", b"2"]
    assert [given[:2] for given in carried.lines.given] == [("one", GETS[0]), ("two", GETS[1])]
    assert (carried.pauses, carried.doubts) == ([0.01], 1)


@pytest.mark.parametrize(
    ("place", "host"), [(":7", "one"), ("?:7", "one"), ("two:7", "two"), ("[::1]:7", "::1"), ("::1:7", "::1")]
)
async def test_a_node_that_does_not_know_its_own_name_is_where_it_was_asked(place: str, host: str) -> None:
    link, _ = cluster([(ONE,)], one=0, two=0)
    assert link._verdict(f"ASK 3 {place}", ONE) == Address(host, 7)
    assert link._verdict(f"MOVED 3 {place}", ONE) == "again"
    assert link.owner(3) == Address(host, 7)

    async def call(*_command: Any, retry: bool) -> Any:
        told = host if host != "one" else place.removesuffix(":7")
        return [[0, 5, [told.encode(), 7], [b"replica", 9]], [6, 9, [None, 8]]]

    found = await link._slots(cast(NodeLink, SimpleNamespace(call=call, address=ONE)))
    assert found == [(0, 5, Address(host, 7)), (6, 9, Address("one", 8))]


async def test_each_slot_has_the_master_that_the_map_says_in_whatever_order_it_does() -> None:
    link, _ = cluster([()], one=0, two=0)
    wanted: list[Address] = []
    link.commands = cast(Lines, SimpleNamespace(keep=lambda found: wanted.extend(found), to=wanted.append))
    link._apply([(12_000, 16_383, TWO), (8_192, 11_999, ONE), (0, 8_000, TWO)])
    edges = {0: TWO, 8_000: TWO, 8_001: None, 8_191: None, 8_192: ONE, 11_999: ONE, 12_000: TWO, 16_383: TWO}
    assert {slot: link.owner(slot) for slot in edges} == edges
    assert (link.masters, wanted) == ((TWO, ONE), [TWO, ONE] * 2)
    assert link.connected.is_set()
    # what is not said any more has none
    link._apply([(0, 1, ONE)])
    assert (link.owner(2), link.masters) == (None, (ONE,))


@pytest.mark.parametrize(("timeout", "most"), [(1.0, MOST_PATIENCE), (7.0, 7.0)])
async def test_a_node_that_tells_the_map_too_late_has_the_next_given_more_time(
    timeout: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def limit(seconds: float) -> asyncio.Timeout:
        given.append(seconds)
        return never(None)

    monkeypatch.setattr("shared.bus.cluster.asyncio.timeout", limit)
    link = ClusterLink(Endpoint.parse("redis+cluster://one:1/"), name="test", timeout=timeout)
    answers: list[Any] = [*[TimeoutError()] * 4, [[0, 5, [b"one", 1]]], ReplyError("ERR x"), []]

    async def call(*_command: Any, retry: bool) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    for _ in range(7):
        await link._slots(cast(NodeLink, SimpleNamespace(call=call, address=ONE)))
    assert given == [*[min(most, timeout * 2**number) for number in range(5)], timeout, timeout]


async def test_a_question_for_any_node_goes_to_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = cluster([(TWO, ONE)], one=0, two=0)
    asked: list[Any] = []

    async def tell(address: Address, command: Any, retry: bool) -> Any:
        asked.append((address, command, retry))

    monkeypatch.setattr(link, "_tell", tell)
    links = [SimpleNamespace(address=at, connected=asyncio.Event()) for at in (ONE, TWO, Address("three", 3))]
    links[2].connected.set()
    for some in ([], links):
        link.commands = cast(Lines, SimpleNamespace(all=lambda some=some: some))
        await link.call("INFO", retry=bool(some))
    assert asked == [(TWO, ("INFO",), False), (Address("three", 3), ("INFO",), True)]


async def test_whoever_waits_for_a_map_that_never_comes_is_told_when_the_cluster_is_closed() -> None:
    async with ClusterLink(Endpoint.parse("redis+cluster://127.0.0.1:1/"), name="test") as link:
        waiting = [asyncio.create_task(link.call(*command)) for command in (("GET", "a"), ("PING",), ("SCAN", 0))]
        await asyncio.sleep(0)
    for one in (*waiting, link.call("GET", "a"), link.commit([("SET", "a", 1)])):
        with pytest.raises(BusUnavailable, match="the bus is closed"):
            await asyncio.wait_for(one, 30)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "cluster test"] == []


async def test_of_what_nobody_waits_for_an_error_is_nobodys_matter() -> None:
    loop, told = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _loop, context: told.append(context))
    for failed in (True, False):
        future: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(_heard)
        if failed:
            future.set_exception(ConnectionLost("x"))
        else:
            future.cancel()
        await asyncio.sleep(0)
        del future
        gc.collect()
    assert told == []
