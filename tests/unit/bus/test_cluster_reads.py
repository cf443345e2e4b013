"""Group reads over several nodes, without servers: who is waited for, what is ended, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared.bus import ConnectionLost, Reply, ReplyError
from shared.bus.cluster import ClusterLink
from shared.bus.cluster_reads import ClusterReader, ClusterTailer
from shared.bus.hash_slots import slot_of_key
from shared.errors import BusUnavailable


class Line:
    """The connection of one stream."""

    def __init__(self, sent: bool) -> None:
        self.address = self
        self.connected = asyncio.Event()
        self.unblocked = 0
        self.closed = False
        if sent:
            self.connected.set()

    async def close(self) -> None:
        self.closed = True

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
        # what the next ones that want to end a read are told
        self.early: list[Exception] = []
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
        if self.early:
            raise self.early.pop()
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


async def test_what_was_found_behind_a_read_that_was_given_up_is_told() -> None:
    cluster, reader, task = await reading("two", streams=("one", "two"))
    cluster.reads["two"].set_result([["two", ["1-1"]]])
    assert await asyncio.wait_for(task, 60) == [["two", ["1-1"]]]
    assert (cluster.given_up, reader.generation) == (["one"], 2)


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
    cluster.reads["one"].set_result([["one", ["1-1"]]])
    assert await asyncio.wait_for(task, 60) == [["one", ["1-1"]]]
    assert cluster.lines["two"].unblocked == 2
    assert cluster.given_up == []


async def test_a_read_that_has_not_begun_cannot_be_ended_and_one_that_hangs_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster("one")
    reader = ClusterReader(cast(ClusterLink, cluster))
    assert reader.connected is cluster.connected
    task = asyncio.create_task(reader.call("XREADGROUP", "STREAMS", "one", ">", block=2.0))
    await asyncio.sleep(0)
    assert await reader.unblock() is False
    while not cluster.asked:
        await asyncio.sleep(0)
    monkeypatch.setattr("shared.bus.cluster_reads._UNBLOCK_PATIENCE", 0.01)
    monkeypatch.setattr(cluster, "unblock", lambda _line: asyncio.Event().wait())
    assert await asyncio.wait_for(reader.unblock(), 30) is False
    cluster.reads["one"].set_result(None)
    assert await asyncio.wait_for(task, 60) is None


async def test_what_reads_ends_with_its_connections() -> None:
    cluster = Cluster("one")
    async with ClusterReader(cast(ClusterLink, cluster)) as reader:
        task = asyncio.create_task(reader.call("XREADGROUP", "STREAMS", "one", ">", block=2.0))
        while not cluster.asked:
            await asyncio.sleep(0)
        cluster.reads["one"].set_result([["one", ["1-1"]]])
        assert await task == [["one", ["1-1"]]]
        assert not cluster.lines["one"].closed
    assert cluster.lines["one"].closed


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


class Streams:
    """A cluster for a tail: `inbox` answers the read that waits, `kept` those that look. away: streams whose nodes do
    not answer."""

    def __init__(self) -> None:
        self.commands = self
        self.inbox: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.kept: dict[str, Reply] = {}
        self.looks: list[list[str]] = []
        self.away: set[int] = set()

    def line(self, _name: str) -> str:
        return "tail"

    def owner(self, slot: int) -> int | None:
        return slot

    def to(self, slot: int) -> Line:
        return Line(slot not in self.away)

    async def carry(self, lines: object, commands: list[Any], *, retry: bool, **limits: float) -> list[Reply]:
        if lines == "tail":
            assert (retry, limits["block"]) == (True, 30.0)
            assert commands == [("XREAD", "COUNT", 9, "BLOCK", 30_000, "STREAMS", "inbox", "0-0")]
            return [await self.inbox]
        assert not retry
        assert all(command[:4] == ("XREAD", "COUNT", 9, "STREAMS") for command in commands)
        self.looks.append([command[4] for command in commands])
        return [self.kept.pop(command[4], None) for command in commands]


def tailer_of(cluster: Streams) -> ClusterTailer:
    return ClusterTailer(cast(ClusterLink, cluster))


def command_for(*streams: str) -> tuple[Any, ...]:
    return ("XREAD", "COUNT", 9, "BLOCK", 30_000, "STREAMS", "inbox", *streams, *["0-0"] * (1 + len(streams)))


async def test_a_tail_waits_for_its_inbox_and_looks_at_the_other_streams_whose_nodes_answer() -> None:
    cluster = Streams()
    cluster.away = {slot_of_key("away")}
    task = asyncio.create_task(tailer_of(cluster).call(*command_for("one", "away", "two"), block=30.0))
    while len(cluster.looks) < 2:
        await asyncio.sleep(0.01)
    assert cluster.looks == [["one", "two"]] * 2
    cluster.inbox.set_result([["inbox", ["1-1"]]])
    assert await asyncio.wait_for(task, 60) == [["inbox", ["1-1"]]]


async def test_a_stream_that_has_something_is_looked_at_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.cluster_reads._LOOK", 600.0)
    cluster = Streams()
    tailer = tailer_of(cluster)
    for page in (["1-1"], ["1-2"], ["1-3"]):
        cluster.kept["two"] = [["two", page]]
        assert await asyncio.wait_for(tailer.call(*command_for("one", "two"), block=30.0), 60) == [["two", page]]
    waiting = asyncio.create_task(tailer.call(*command_for("one", "two"), block=30.0))
    while len(cluster.looks) < 4:
        await asyncio.sleep(0)
    assert await tailer.unblock()
    assert await asyncio.wait_for(waiting, 60) is None
    # nothing was found: now there is time
    waiting = asyncio.create_task(tailer.call(*command_for("one", "two"), block=30.0))
    await asyncio.sleep(0)
    assert await tailer.unblock()
    assert await asyncio.wait_for(waiting, 60) is None
    assert not await tailer.unblock()
    assert len(cluster.looks) == 4
    cluster.inbox.cancel()


class Inbox:
    """A cluster for a tail that follows its inbox, and streams of which nothing comes."""

    def __init__(self, *, away: bool = False) -> None:
        self.commands = self
        self.tail = Line(True)
        self.reads: list[tuple[tuple[Any, ...], asyncio.Future[Reply]]] = []
        self.looks: list[float] = []
        self._away = away

    def line(self, name: str) -> Line:
        assert name == "tail"
        return self.tail

    def owner(self, _slot: int) -> str | None:
        return None if self._away else "a node"

    def to(self, _owner: str) -> Line:
        return Line(True)

    async def carry(self, lines: Any, commands: list[Any], **limits: Any) -> list[Reply]:
        if lines is self:
            assert commands
            self.looks.append(limits["until"] - asyncio.get_running_loop().time())
            return [None] * len(commands)
        self.reads.append((commands[0][-2:], asyncio.get_running_loop().create_future()))
        return [await self.reads[-1][1]]

    async def answer(self, reply: Reply) -> None:
        self.reads[-1][1].set_result(reply)
        for _ in range(20):
            await asyncio.sleep(0)

    async def asked(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.reads) < count:
                await asyncio.sleep(0)


def tail_of(inbox: Inbox) -> ClusterTailer:
    return ClusterTailer(cast(ClusterLink, inbox))


def after(position: str, *streams: str) -> tuple[Any, ...]:
    return ("XREAD", "BLOCK", 9, "STREAMS", "inbox", *streams, position, *["0-0"] * len(streams))


async def test_a_read_of_the_inbox_that_brings_nothing_is_made_again_and_what_it_brings_is_told_once() -> None:
    inbox = Inbox()
    async with tail_of(inbox) as tailer:
        call = asyncio.create_task(tailer.call(*after("0-0"), block=3_600.0))
        await inbox.asked(1)
        await inbox.answer(None)
        await inbox.asked(2)
        await inbox.answer([["inbox", ["1-1"]]])
        assert await asyncio.wait_for(call, 30) == [["inbox", ["1-1"]]]
        call = asyncio.create_task(tailer.call(*after("1-1"), block=3_600.0))
        await inbox.asked(3)
        assert not call.done()
        assert [position for position, _ in inbox.reads] == [("inbox", "0-0"), ("inbox", "0-0"), ("inbox", "1-1")]
        assert await tailer.unblock()
        assert await call is None
        assert not inbox.tail.closed
        assert not inbox.reads[-1][1].done()
    assert inbox.reads[-1][1].cancelled()
    assert inbox.tail.closed


async def test_a_read_of_the_inbox_outlives_a_call_and_is_given_up_for_another_position() -> None:
    inbox = Inbox()
    async with tail_of(inbox) as tailer:
        for number, position in enumerate(("0-0", "0-0", "5-0", "5-0")):
            call = asyncio.create_task(tailer.call(*after(position), block=3_600.0))
            await inbox.asked(1 + number // 2)
            await asyncio.sleep(0)
            assert await tailer.unblock()
            assert await asyncio.wait_for(call, 30) is None
        await asyncio.sleep(0)
        assert [(position, read.cancelled()) for position, read in inbox.reads] == [
            (("inbox", "0-0"), True),
            (("inbox", "5-0"), False),
        ]
        call = asyncio.create_task(tailer.call(*after("5-0"), block=3_600.0))
        await inbox.answer([["inbox", ["6-0"]]])
        assert await asyncio.wait_for(call, 30) == [["inbox", ["6-0"]]]


async def test_a_call_ends_in_its_time_whether_or_not_the_next_look_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.cluster_reads._LOOK", 3_600.0)
    for streams, away in (((), False), (("one", "two"), False), (("one",), True)):
        inbox = Inbox(away=away)
        async with tail_of(inbox) as tailer:
            for _ in range(2):
                assert await asyncio.wait_for(tailer.call(*after("0-0", *streams), block=0.02), 30) is None
            # it has time to be answered, and is not asked of those that are away
            assert [round(left) for left in inbox.looks] == ([3_600] if streams and not away else [])


async def test_who_follows_the_inbox_alone_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waits = asyncio.wait, list[float]()

    async def waiting(futures: Any, *, timeout: float, return_when: str) -> Any:
        waits.append(timeout)
        return await wait(futures, timeout=timeout, return_when=return_when)

    monkeypatch.setattr("shared.bus.cluster_reads.asyncio.wait", waiting)
    inbox = Inbox()
    async with tail_of(inbox) as tailer:
        assert await asyncio.wait_for(tailer.call(*after("0-0"), block=0.05), 30) is None
        # a loop counts in milliseconds: what is left of one is waited for again
        assert sum(seconds > 0.01 for seconds in waits) == 1
        assert len(waits) < 100
        # with others he looks at them when it is time
        monkeypatch.setattr("shared.bus.cluster_reads._LOOK", 0.02)
        assert await asyncio.wait_for(tailer.call(*after("0-0", "one"), block=0.1), 30) is None
    assert len(inbox.looks) >= 2


async def test_what_the_inbox_is_refused_is_told() -> None:
    inbox = Inbox()
    async with tail_of(inbox) as tailer:
        call = asyncio.create_task(tailer.call(*after("0-0"), block=3_600.0))
        await inbox.asked(1)
        await inbox.answer(ReplyError("WRONGTYPE no"))
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            await asyncio.wait_for(call, 30)
