"""Group reads over several nodes, without servers: who is waited for, what is ended, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared.bus import ConnectionLost, Reply, ReplyError
from shared.bus.cluster import ClusterLink
from shared.bus.cluster_reads import ClusterReader


class Line:
    """The connection of one stream."""

    def __init__(self, sent: bool) -> None:
        self.address = self
        self.connected = asyncio.Event()
        self.unblocked = 0
        if sent:
            self.connected.set()

    def all(self) -> list[Line]:
        return [self]


class Cluster:
    """A cluster whose reads the test answers. sent: the streams whose reads are on their way."""

    def __init__(self, *sent: str) -> None:
        self.connected = asyncio.Event()
        self.commands = self
        self.lines: dict[str, Line] = {}
        self.reads: dict[str, asyncio.Future[Reply]] = {}
        self.given_up: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        self._sent = sent
        self._made: list[Line] = []

    def line(self, _name: str) -> Line:
        self._made.append(Line(False))
        return self._made[-1]

    async def carry(self, lines: Line, commands: list[Any], *, retry: bool, block: float) -> list[Reply]:
        assert (retry, block) == (False, 2.0)
        (command,) = commands
        stream = command[-2]
        self.asked.append(command)
        self.lines[stream] = lines
        if stream in self._sent:
            lines.connected.set()
        self.reads[stream] = asyncio.get_running_loop().create_future()
        try:
            return [await self.reads[stream]]
        except asyncio.CancelledError:
            self.given_up.append(stream)
            raise

    def to(self, line: Line) -> Cluster:
        self._to = line
        return self

    async def unblock(self, line: Line) -> bool:
        assert line is self._to
        line.unblocked += 1
        (stream,) = [name for name, each in self.lines.items() if each is line]
        if not self.reads[stream].done():
            self.reads[stream].set_result(None)
        return True


async def reading(*sent: str, streams: tuple[str, ...] = ("one", "two", "three")) -> tuple[Cluster, ClusterReader, Any]:
    cluster = Cluster(*sent)
    reader = ClusterReader(cast(ClusterLink, cluster))
    command = ("XREADGROUP", "GROUP", "g", "r", "STREAMS", *streams, *[">"] * len(streams))
    task = asyncio.create_task(reader.call(*command, block=2.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert [one[-4:] for one in cluster.asked] == [("r", "STREAMS", stream, ">") for stream in streams]
    return cluster, reader, task


async def test_with_the_first_entries_the_waiting_for_others_ends_and_no_read_on_its_way_is_given_up() -> None:
    cluster, reader, task = await reading("one", "two")
    cluster.reads["one"].set_result([["one", ["1-1"]]])
    assert await asyncio.wait_for(task, 60) == [["one", ["1-1"]]]
    assert cluster.given_up == ["three"]
    assert {name: line.unblocked for name, line in cluster.lines.items()} == {"one": 0, "two": 1, "three": 0}
    # what was given up may have been answered in that moment
    assert reader.generation == 2


async def test_who_gives_up_leaves_no_read_behind() -> None:
    cluster, _, task = await reading("one", "two", "three")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert sorted(cluster.given_up) == ["one", "three", "two"]


async def test_what_waits_is_ended_from_outside() -> None:
    cluster, reader, task = await reading("one", streams=("one",))
    assert await reader.unblock()
    assert await asyncio.wait_for(task, 60) is None
    assert not await reader.unblock()
    assert cluster.lines["one"].unblocked == 1


@pytest.mark.parametrize(
    ("error", "lost"), [(ConnectionLost("x"), 1), (ReplyError("NOGROUP x"), 0)], ids=["lost", "no"]
)
async def test_an_error_is_told_when_nothing_was_found_and_what_was_lost_is_counted(
    error: Exception, lost: int
) -> None:
    for found in ([["two", ["1-1"]]], None):
        cluster, reader, task = await reading("one", "two", streams=("one", "two"))
        cluster.reads["one"].set_exception(error)
        cluster.reads["two"].set_result(found)
        if found:
            assert await asyncio.wait_for(task, 60) == found
        else:
            with pytest.raises(type(error), match="x"):
                await asyncio.wait_for(task, 60)
        assert reader.generation == 1 + lost
