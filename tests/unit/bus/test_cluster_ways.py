"""Commands on their way through a cluster, with nodes that answer what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.scripted_redis import HangUp, ScriptedRedis
from support.waiting import eventually

from shared.bus import ConnectionLost, ReplyError, Script, open_bell
from shared.bus import cluster_map as module
from shared.bus.cluster import ClusterLink
from shared.bus.cluster_map import NodeLink, StreamLink
from shared.bus.endpoint import Endpoint, Server
from shared.bus.hash_slots import slot_of_key

# The first is of the one node, the second and the third of the other.
BAR, FOO, OOF = "bar", "foo", "{foo}2"
HALF = 8_192


class Nodes:
    """Two masters that share the slots; each answers GET with its own number before the key."""

    def __init__(self) -> None:
        self.one, self.two = (
            ScriptedRedis(
                GET=lambda _name, key, number=number: number + b":" + key,
                SET="OK",
                ASKING="OK",
                CLUSTER=lambda *_: self.rows,
            )
            for number in (b"1", b"2")
        )
        self.rows: Any = []

    @property
    def both(self) -> tuple[ScriptedRedis, ScriptedRedis]:
        return self.one, self.two

    def asked(self) -> list[list[tuple[bytes, ...]]]:
        """What both were asked, without the map and what shows that they are there."""
        left = (b"CLUSTER", b"PING")
        return [[one for asked in node.behind() for one in asked if one[0] not in left] for node in self.both]

    def maps(self) -> int:
        """How often the map was read."""
        return sum(asked.count((b"CLUSTER", b"SLOTS")) for node in self.both for asked in node.asked)

    def share(self) -> None:
        self.rows = [
            [0, HALF - 1, [b"127.0.0.1", self.one.port, b"id"]],
            [HALF, 16_383, [b"127.0.0.1", self.two.port, b"id"]],
        ]

    @contextlib.asynccontextmanager
    async def linked(self, timeout: float = 60.0) -> AsyncIterator[ClusterLink]:
        async with self.one.listening() as first, self.two.listening():
            self.share()
            endpoint = Endpoint.parse(f"redis+cluster://127.0.0.1:{first.port}/")
            async with ClusterLink(endpoint, name="test/1:commands", timeout=timeout) as link:
                # both are there, though nobody has asked for anything
                await eventually(lambda: self.one.connections and self.two.connections)
                assert await link.call("PING") == b"PONG"
                yield link
            await eventually(lambda: not self.one.connections + self.two.connections)


def at(node: ScriptedRedis) -> str:
    return f"127.0.0.1:{node.port}"


def once(first: Any, then: Any) -> Any:
    """An answer that is another one the first time."""
    answers = [first]
    return lambda *parts: answers.pop() if answers else then(*parts) if callable(then) else then


async def test_commands_go_to_the_masters_of_their_slots_and_their_replies_stand_in_their_order() -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        gets = [("GET", key) for key in (FOO, BAR, OOF)]
        assert await link.pipe_raw(gets) == [b"2:foo", b"1:bar", b"2:{foo}2"]
        assert await link.pipe([("SET", BAR, 1), ("SET", FOO, 1), ("GET", BAR)]) == [b"OK"] * 2 + [b"1:bar"]
        assert await link.commit([("SET", FOO, 2), ("SET", OOF, 2)]) == [b"OK"] * 2
        with pytest.raises(ConnectionLost, match="in time"):
            await link.commit([("SET", FOO, 3)], until=asyncio.get_running_loop().time() - 1)
        first, second = link.masters
        assert [node.at for node in link.masters] == [Server("127.0.0.1", node.port) for node in nodes.both]
        assert [link.owner(slot) for slot in (0, HALF - 1, HALF, 16_383)] == [first, first, second, second]
        assert (link.server_of(BAR), link.server_of(FOO)) == (first.at, second.at)
        assert not link.one_server
    assert nodes.asked() == [
        [(b"GET", b"bar"), (b"SET", b"bar", b"1"), (b"GET", b"bar")],
        [
            *((b"GET", b"foo"), (b"GET", b"{foo}2"), (b"SET", b"foo", b"1")),
            *((b"SET", b"foo", b"2"), (b"SET", b"{foo}2", b"2")),
        ],
    ]
    # one connection to each, which says whose it is
    assert [len(node.asked) for node in nodes.both] == [1, 1]
    assert [node.asked[0][1] for node in nodes.both] == [(b"CLIENT", b"SETNAME", b"test/1:commands")] * 2


async def test_what_is_refused_stands_at_its_place_and_ends_what_is_all_or_nothing() -> None:
    nodes = Nodes()
    nodes.one.answers["SET"] = ReplyError("WRONGTYPE no")
    nodes.two.answers["SET"] = once(ReplyError("OOM no room"), "OK")
    async with nodes.linked() as link:
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            await link.commit([("SET", BAR, 1), ("SET", FOO, 1)])
        first, second, third = await link.pipe_raw([("SET", BAR, 1), ("SET", FOO, 1), ("GET", FOO)])
        assert (str(first), str(second), third) == ("WRONGTYPE no", "OOM no room", b"2:foo")
    # nothing behind what was refused
    assert len(nodes.asked()[1]) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "", "?"])
async def test_a_slot_that_has_moved_is_followed_and_the_map_is_read_again(host: str) -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        slot = slot_of_key(BAR)
        nodes.one.answers["GET"] = ReplyError(f"MOVED {slot} {host}:{nodes.two.port}")
        nodes.rows = [[0, 16_383, [None if host == "?" else host.encode(), nodes.two.port]]]
        assert await link.call("GET", BAR, retry=False) == b"2:bar"
        # from now on it is asked there at once, and the first has no slot any more
        assert await link.pipe([("GET", BAR)]) == [b"2:bar"]
        await eventually(lambda: [node.at for node in link.masters] == [Server("127.0.0.1", nodes.two.port)])
        assert [link.owner(0)] == list(link.masters)
    assert nodes.asked() == [[(b"GET", b"bar")], [(b"GET", b"bar")] * 2]


async def test_what_is_on_its_way_to_another_node_is_asked_for_there_once() -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        nodes.one.answers["GET"] = once(ReplyError(f"ASK {slot_of_key(BAR)} {at(nodes.two)}"), b"1:here")
        assert await link.pipe([("GET", BAR), ("GET", "{bar}2")], retry=False) == [b"2:bar", b"1:here"]
        assert await link.call("GET", BAR) == b"1:here"
        assert link.owner(slot_of_key(BAR)) == next(iter(link.masters))
    assert nodes.asked() == [
        [(b"GET", b"bar"), (b"GET", b"{bar}2"), (b"GET", b"bar")],
        [(b"ASKING",), (b"GET", b"bar")],
    ]


@pytest.mark.parametrize("text", ["BUSY", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "UNBLOCKED"])
async def test_what_a_node_cannot_carry_out_just_now_is_said_again_after_a_pause_with_a_new_map(text: str) -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        maps = nodes.maps()
        nodes.one.answers["GET"] = once(ReplyError(f"{text} not now"), b"1:bar")
        # also what must not be repeated: it was not carried out
        assert await link.call("GET", BAR, retry=False) == b"1:bar"
        assert [node.asked[0].count((b"GET", b"bar")) for node in nodes.both] == [2, 0]
        await eventually(lambda: nodes.maps() > maps)
        # on the same connection: nothing of it is wrong
        assert [len(node.asked) for node in nodes.both] == [1, 1]


async def test_a_node_that_has_lost_the_scripts_is_given_them_before_the_next_try() -> None:
    script = next(iter(Script.known.values()))
    nodes = Nodes()
    nodes.one.answers["EVALSHA"] = once(ReplyError("NOSCRIPT no"), b"done")
    async with nodes.linked() as link:
        nodes.one.answers["SCRIPT"] = lambda _, what, *each: [0] * len(each) if what == b"EXISTS" else b"a name"
        assert await link.call(*script([BAR])) == b"done"
        # on a new connection, as on one server
        first, second = nodes.one.asked
        loads = [(b"SCRIPT", b"LOAD", each.source.encode()) for each in Script.known.values()]
        assert [one[0] for one in first if one[0] == b"EVALSHA"] == [b"EVALSHA"]
        said = [one for one in second if one[0] == b"EVALSHA" or one[:2] == (b"SCRIPT", b"LOAD")]
        assert (said[:-1], said[-1][0]) == (loads, b"EVALSHA")
        # the other node has kept them
        assert not [one for asked in nodes.two.asked for one in asked if one[:2] == (b"SCRIPT", b"LOAD")]


async def test_a_lost_connection_is_told_for_what_must_not_be_repeated_and_else_made_again() -> None:
    def hangs_up(*_: bytes) -> Any:
        raise HangUp

    nodes = Nodes()
    async with nodes.linked() as link:
        own = nodes.one.answers["GET"]
        for retry in (True, False):
            calls = [0]

            def answer(*parts: bytes, calls: list[int] = calls) -> Any:
                calls[0] += 1
                return hangs_up() if calls[0] == 1 else own(*parts)

            nodes.one.answers["GET"] = answer
            gets = [("GET", BAR), ("GET", FOO), ("GET", "{bar}2")]
            if retry:
                assert await link.pipe(gets) == [b"1:bar", b"2:foo", b"1:{bar}2"]
            else:
                with pytest.raises(ConnectionLost, match="lost"):
                    await link.pipe(gets, retry=False)
                # alone, too
                calls[0] = 0
                with pytest.raises(ConnectionLost, match="lost"):
                    await link.call("GET", BAR, retry=False)


async def test_a_read_that_waits_follows_its_stream_from_node_to_node() -> None:
    nodes = Nodes()
    page = [[b"bar", [[b"1-1", [b"a", b"b"]]]]]
    async with nodes.linked() as link, StreamLink(link, BAR, name="test/1:tail", timeout=60.0) as line:
        read = ("XREAD", "BLOCK", 2_000, "STREAMS", BAR, "0-0")
        for node, other, word in ((nodes.one, nodes.two, "ASK"), (nodes.two, nodes.one, "MOVED")):
            node.answers["XREAD"] = page
            assert await line.call(*read, retry=False, block=2.0) == page
            assert line.node is link.nodes[Server("127.0.0.1", node.port)]
            generation, maps = line.generation, nodes.maps()
            node.answers["XREAD"] = ReplyError(f"{word} {slot_of_key(BAR)} {at(other)}")
            other.answers["XREAD"] = page
            with pytest.raises(ConnectionLost):
                await line.call(*read)
            # the next one goes there, let in where the stream is on its way to
            assert await line.call(*read) == page
            assert line.node is link.nodes[Server("127.0.0.1", other.port)]
            assert line.generation == generation + 1
            await eventually(lambda before=maps: nodes.maps() > before)
        assert [node.connections for node in nodes.both] == [2, 1]
    for asked, reads in zip(nodes.asked(), (3, 3), strict=True):
        places = [n for n, one in enumerate(asked) if one[0] == b"XREAD"]
        assert (len(places), {asked[n - 1] for n in places}) == (reads, {(b"ASKING",)})
    assert nodes.one.asked[1][1] == (b"CLIENT", b"SETNAME", b"test/1:tail")


async def test_a_node_without_slots_is_kept_as_long_as_it_answers() -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        first, second = link.masters

        async def read_again() -> None:
            before = nodes.maps()
            link.doubt()
            # the second of them was asked for when the first had been applied
            await eventually(lambda: nodes.maps() > before)
            link.doubt()
            await eventually(lambda: nodes.maps() > before + 1)

        nodes.rows = [[0, 16_383, [b"127.0.0.1", nodes.two.port, b"id"]]]
        await read_again()
        assert list(link.masters) == [second]
        assert set(link.nodes.values()) == {first, second}
        # it comes back with its slots
        nodes.share()
        await read_again()
        assert await link.call("GET", BAR) == b"1:bar"
        # one that does not answer is given up with its last slot
        nodes.one.answers["CLIENT"] = ReplyError("ERR no")
        nodes.one.cut()
        await eventually(lambda: link.trouble)
        nodes.rows = [[0, 16_383, [b"127.0.0.1", nodes.two.port, b"id"]]]
        await eventually(lambda: set(link.nodes.values()) == {second})


async def test_a_node_that_is_lost_is_told_by_its_name_until_it_is_there_again() -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        assert link.trouble == ""
        client = nodes.one.answers["CLIENT"]
        nodes.one.answers["CLIENT"] = ReplyError("ERR no")
        nodes.one.cut()
        await eventually(lambda: link.trouble == f"{at(nodes.one)}: ERR no")
        maps = nodes.maps()
        # as long as that is so, the map is read again and again
        await eventually(lambda: nodes.maps() > maps + 1)
        assert link.trouble == f"{at(nodes.one)}: ERR no"
        nodes.one.answers["CLIENT"] = client
        await eventually(lambda: link.trouble == "")
        assert await link.call("GET", BAR) == b"1:bar"


async def test_a_map_with_a_slot_that_has_no_master_is_read_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROUTINE", 3_600.0)
    nodes = Nodes()
    async with nodes.linked() as link:
        nodes.rows = [[0, HALF - 1, [b"127.0.0.1", nodes.one.port]], [HALF + 1, 16_383, [b"127.0.0.1", nodes.two.port]]]
        link.doubt()
        await eventually(lambda: link.owner(HALF) is None)
        maps = nodes.maps()
        await eventually(lambda: nodes.maps() > maps + 1, 5.0)
        nodes.share()
        await eventually(lambda: link.owner(HALF) == list(link.masters)[1], 5.0)


async def test_every_connection_to_a_node_is_given_the_time_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: set[float | None] = set()
    timeout = asyncio.timeout

    def limit(seconds: float | None) -> asyncio.Timeout:
        given.add(seconds)
        return timeout(seconds)

    monkeypatch.setattr(asyncio, "timeout", limit)
    async with Nodes().linked(timeout=77.0):
        pass
    assert {seconds for seconds in given if seconds is not None and 1 < seconds != module._ROUTINE} == {77.0}


async def test_a_node_that_speaks_of_its_condition_is_only_heard() -> None:
    redis = ScriptedRedis(GET=ReplyError("READONLY a replica"))
    said: list[str] = []
    async with redis.listening() as server:
        place = Server("127.0.0.1", server.port)
        async with NodeLink(place, name="x", timeout=60.0, lost=said.append) as link:
            with pytest.raises(ReplyError, match="READONLY"):
                await link.call("GET", "x")
            assert (said, link.generation) == ([], 1)
            redis.answers["CLIENT"] = ReplyError("ERR no")
            redis.cut()
            # as often as it happens
            await eventually(lambda: said.count(f"{place}: ERR no") > 1)


async def test_what_concerns_no_key_is_asked_of_one_node_or_of_whoever_is_meant() -> None:
    nodes = Nodes()
    async with nodes.linked() as link:
        for node, answer in zip(nodes.both, (b"first", ReplyError("NOPERM no")), strict=True):
            node.answers["INFO"] = answer
        assert await link.call("INFO") == b"first"
        told = [(await link.at_place(place, [("INFO",)]))[0] for place in await link.places()]
        assert (told[0], str(told[1])) == (b"first", "NOPERM no")
        # a master that has lost its slots is asked no more
        nodes.rows = [[0, 16_383, [b"127.0.0.1", nodes.two.port]]]
        link.doubt()
        await eventually(lambda: len(link.masters) == 1)
        assert await link.places() == [0]
        assert [str(reply) for reply in await link.at_place(0, [("INFO",)])] == ["NOPERM no"]


class Reader:
    """Somebody who follows a stream."""

    position = "0-0"

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


async def test_a_journal_rings_where_its_slot_is_and_nowhere_as_long_as_that_has_no_master() -> None:
    nodes = Nodes()
    for node in nodes.both:
        node.answers |= {"SSUBSCRIBE": lambda _name, stream: [b"ssubscribe", stream, 1], "XREVRANGE": []}

    def rings(node: ScriptedRedis) -> set[bytes]:
        return {one[1] for asked in node.asked for one in asked if one[0] == b"SSUBSCRIBE"}

    async with (
        nodes.linked() as link,
        open_bell(cast(Any, SimpleNamespace(link=link, source="test/1", timeout=5.0, block=2.0))) as bell,
    ):
        readers = [Reader(key) for key in (BAR, FOO, OOF)]
        for reader in readers:
            bell.join(cast(Any, reader))
        await eventually(lambda: all(reader.looks for reader in readers))
        assert (rings(nodes.one), rings(nodes.two)) == ({b"bar"}, {b"foo", b"{foo}2"})
        assert [bell.streams_of(line) for line in bell._lines.values()] == [[BAR], [FOO, OOF]]
        assert [node.connections for node in nodes.both] == [2, 2]
        # the slots of the one go to the other, but for one that nobody has
        one, slot = next(iter(link.masters)).at, slot_of_key(BAR)
        nodes.rows = [[0, slot - 1, [b"127.0.0.1", nodes.two.port]], [slot + 1, 16_383, [b"127.0.0.1", nodes.two.port]]]
        link.doubt()
        await eventually(lambda: link.owner(slot) is None)
        # who comes now is not in the way of anybody
        bell.join(cast(Any, Reader(BAR)))
        looked = readers[0].looks
        nodes.rows = [[0, 16_383, [b"127.0.0.1", nodes.two.port]]]
        link.doubt()
        await eventually(lambda: rings(nodes.two) == {b"bar", b"foo", b"{foo}2"})
        await eventually(lambda: readers[0].looks > looked)
        assert (rings(nodes.one), len(bell._lines)) == ({b"bar"}, 2)
        # one that has nothing to ring is given up when it goes away
        nodes.one.answers["CLIENT"] = ReplyError("ERR no")
        nodes.one.cut()
        await eventually(lambda: one not in bell._lines)
        assert len(bell._lines) == 1
