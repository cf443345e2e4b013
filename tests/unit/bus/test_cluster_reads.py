"""Group reads over several nodes, without servers: who is waited for, what is ended, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared.bus import ConnectionLost, Reply, ReplyError
from shared.bus import cluster_reads as module
from shared.bus.cluster import ClusterLink
from shared.bus.cluster_reads import ClusterReader
from shared.errors import BusUnavailable


class Line:
    """The connection of one stream, and of its node; its reads are answered by the test."""

    def __init__(self, cluster: Cluster, stream: str) -> None:
        self.node = self
        self.stream = stream
        self.connected = asyncio.Event()
        self.generation = 0
        self.client_id = 0
        self.unblocked = 0
        self.closed = False
        self.asked: list[tuple[Any, ...]] = []
        self._cluster = cluster

    def open(self) -> None:
        self._cluster.lines[self.stream] = self
        self.client_id = len(self._cluster.lines)
        if self.stream in self._cluster.sent:
            self.connected.set()
            self.generation += 1

    def read(self, command: tuple[Any, ...], block: float, now: bool) -> asyncio.Future[list[Reply]]:
        assert (block, now) == (2.0, True)
        self.asked.append(command)
        self.reply: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        return self.reply

    async def call(self, *command: Any) -> int:
        assert command == ("CLIENT", "UNBLOCK", self.client_id)
        self.unblocked += 1
        if self._cluster.early:
            raise self._cluster.early.pop()
        if not self.reply.done():
            self.answer(None)
        return 1

    def answer(self, reply: Reply) -> None:
        self.reply.set_result([b"OK", reply])

    async def __aexit__(self) -> None:
        self.closed = True


class Cluster:
    """A cluster whose reads the test answers. sent: the streams whose nodes are there."""

    def __init__(self, *sent: str) -> None:
        self.connected = asyncio.Event()
        self.lines: dict[str, Line] = {}
        self.sent = sent
        # what the next ones that want to end a read are told
        self.early: list[Exception] = []

    def line(self, stream: str, name: str) -> Line:
        assert name == "test/1:groups"
        return Line(self, stream)

    @property
    def given_up(self) -> list[str]:
        return [name for name, line in self.lines.items() if line.reply.cancelled()]


def reader_of(cluster: Cluster) -> ClusterReader:
    return ClusterReader(cast(ClusterLink, cluster), name="test/1:groups")


async def reading(*sent: str, streams: tuple[str, ...] = ("one", "two", "three")) -> tuple[Cluster, ClusterReader, Any]:
    cluster = Cluster(*sent)
    reader = reader_of(cluster)
    command = ("XREADGROUP", "GROUP", "g", "r", "STREAMS", *streams, *[">"] * len(streams))
    task = asyncio.create_task(reader.call(*command, block=2.0, now=True))
    await asyncio.sleep(0)
    wanted = {stream: [("XREADGROUP", "GROUP", "g", "r", "STREAMS", stream, ">")] for stream in streams}
    assert {stream: line.asked for stream, line in cluster.lines.items()} == wanted
    return cluster, reader, task


async def test_with_the_first_entries_the_waiting_for_others_ends_and_no_read_on_its_way_is_given_up() -> None:
    cluster, _, task = await reading("one", "two")
    cluster.lines["one"].answer([["one", ["1-1"]]])
    assert await asyncio.wait_for(task, 60) == [["one", ["1-1"]]]
    assert cluster.given_up == ["three"]
    assert {name: line.unblocked for name, line in cluster.lines.items()} == {"one": 0, "two": 1, "three": 0}


async def test_what_is_answered_as_it_is_ended_is_told_too() -> None:
    cluster, _, task = await reading("one", "two", streams=("one", "two"))
    cluster.lines["one"].answer([["one", ["1-1"]]])
    cluster.lines["two"].answer([["two", ["1-2"]]])
    cluster.lines["two"].connected.clear()
    assert await asyncio.wait_for(task, 60) == [["one", ["1-1"]], ["two", ["1-2"]]]


async def test_each_stream_keeps_its_connection_and_a_new_one_of_any_tells_that_something_may_be_lost() -> None:
    cluster, reader, task = await reading("one", "two", streams=("one", "two"))
    lines = dict(cluster.lines)
    assert reader.generation == 2
    cluster.lines["one"].answer(None)
    assert await asyncio.wait_for(task, 60) is None
    task = asyncio.create_task(reader.call("XREADGROUP", "STREAMS", "two", "three", ">", ">", block=2.0, now=True))
    await asyncio.sleep(0)
    assert (cluster.lines["two"], len(cluster.lines), reader.generation) == (lines["two"], 3, 2)
    cluster.lines["two"].generation += 1
    assert reader.generation == 3
    cluster.lines["two"].answer(None)
    assert await asyncio.wait_for(task, 60) is None


async def test_who_gives_up_leaves_no_read_behind() -> None:
    cluster, reader, task = await reading("one", "two", "three")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cluster.given_up == ["one", "two", "three"]
    assert not await reader.unblock()


async def test_what_waits_is_ended_from_outside() -> None:
    cluster, reader, task = await reading("one", streams=("one",))
    assert await reader.unblock()
    assert await asyncio.wait_for(task, 60) is None
    assert not await reader.unblock()
    assert cluster.lines["one"].unblocked == 1


@pytest.mark.parametrize("error", [ConnectionLost("x"), ReplyError("x"), BusUnavailable("x"), TimeoutError()])
async def test_a_read_that_could_not_be_ended_is_tried_to_be_ended_again(error: Exception) -> None:
    cluster, reader, task = await reading("one", "two", streams=("one", "two"))
    cluster.early.append(error)
    assert await reader.unblock() is True
    assert (cluster.lines["one"].unblocked, cluster.lines["two"].unblocked) == (1, 1)
    assert await asyncio.wait_for(task, 60) is None
    cluster, reader, task = await reading("one", streams=("one",))
    cluster.early.append(error)
    assert await reader.unblock() is False
    cluster, reader, task = await reading("one", "two", streams=("one", "two"))
    cluster.early.append(error)
    cluster.lines["one"].answer([["one", ["1-1"]]])
    assert await asyncio.wait_for(task, 60) == [["one", ["1-1"]]]
    assert cluster.lines["two"].unblocked == 2
    assert cluster.given_up == []


async def test_a_read_that_is_not_on_its_way_cannot_be_ended_and_one_that_hangs_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, reader, task = await reading(streams=("one",))
    assert reader.connected is cluster.connected
    assert await reader.unblock() is False
    cluster.lines["one"].connected.set()
    monkeypatch.setattr(module, "_UNBLOCK_PATIENCE", 0.01)
    monkeypatch.setattr(cluster.lines["one"], "call", lambda *_: asyncio.Event().wait())
    assert await asyncio.wait_for(reader.unblock(), 30) is False
    cluster.lines["one"].answer(None)
    assert await asyncio.wait_for(task, 60) is None


async def test_what_reads_ends_with_its_connections() -> None:
    cluster = Cluster("one")
    async with reader_of(cluster) as reader:
        task = asyncio.create_task(reader.call("XREADGROUP", "STREAMS", "one", ">", block=2.0, now=True))
        await asyncio.sleep(0)
        cluster.lines["one"].answer([["one", ["1-1"]]])
        assert await task == [["one", ["1-1"]]]
        assert not cluster.lines["one"].closed
    assert cluster.lines["one"].closed


@pytest.mark.parametrize("error", [ConnectionLost("x"), ReplyError("NOGROUP x")], ids=["lost", "refused"])
async def test_an_error_is_told_when_nothing_was_found(error: Exception) -> None:
    for found in ([["two", ["1-1"]]], None):
        cluster, _, task = await reading("one", "two", streams=("one", "two"))
        if isinstance(error, ReplyError):
            cluster.lines["one"].answer(error)
        else:
            cluster.lines["one"].reply.set_exception(error)
        cluster.lines["two"].answer(found)
        if found:
            assert await asyncio.wait_for(task, 60) == found
        else:
            with pytest.raises(type(error), match="x"):
                await asyncio.wait_for(task, 60)
