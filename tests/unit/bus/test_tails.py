"""A process's one blocking read, without a server: what it asks for, and who is offered what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.waiting import eventually

from shared.bus import ConnectionLost, Entry, ReplyError, order
from shared.bus import tail as module
from shared.bus.cluster import ClusterLink
from shared.bus.endpoint import Endpoint
from shared.bus.tail import Tail


class Bus:
    """A server whose answers to the read that waits the test gives; `asked` are the streams of each with their
    positions. A look finds what is `kept` for its stream, once; `looked` are those that were looked at, and where."""

    def __init__(self) -> None:
        self.block = 2.0
        self.link: Any = self
        self.asked: list[dict[str, str]] = []
        self.options: list[tuple[Any, ...]] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.insane: set[str] = set()
        self.kept: dict[str, list[Any]] = {}
        self.looked: list[tuple[str, str]] = []
        self.closed = False

    @contextlib.asynccontextmanager
    async def line(self, stream: str) -> AsyncIterator[Bus]:
        assert stream == "inbox"
        try:
            yield self
        finally:
            self.closed = True

    async def call(self, *command: Any, retry: bool, block: float) -> Any:
        assert (retry, block) == (False, 2.0)
        at = command.index("STREAMS") + 1
        names = command[at:]
        half = len(names) // 2
        self.options.append(command[: at - 1])
        self.asked.append(dict(zip(names[:half], names[half:], strict=True)))
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def submit(self, commands: list[tuple[Any, ...]], retry: bool, *, until: float) -> list[Any]:
        (command,) = commands
        assert (command[:4], retry) == (("XREAD", "COUNT", 200, "STREAMS"), False)
        assert 0 < until - asyncio.get_running_loop().time() < module._LOOK + 0.01
        stream, position = command[4:]
        self.looked.append((stream, position))
        found = self.kept.get(stream)
        if not found:
            return [None]
        answer = found.pop(0)
        if isinstance(answer, ConnectionLost):
            raise answer
        return [answer if isinstance(answer, ReplyError) else [answer]]

    def sane(self, found: list[Entry]) -> list[Entry]:
        kept = [entry for entry in found if entry[0] not in self.insane]
        return found if len(kept) == len(found) else kept

    async def answer(self, answer: Any) -> None:
        """And lets the tail ask again."""
        self.answers.put_nowait(answer)
        await settled()


class Reader:
    """Somebody who follows a stream, from where he is."""

    def __init__(self, stream: str, position: str) -> None:
        self.stream, self.position = stream, position
        self.offered: list[tuple[tuple[int, int], list[str], int]] = []
        self.looks = 0

    def offer(self, after: tuple[int, int], placed: list[tuple[tuple[int, int], Entry]], size: int) -> None:
        assert [at for at, _ in placed] == [order(entry[0]) for _, entry in placed]
        self.offered.append((after, [entry[0] for _, entry in placed], size))

    def look(self) -> None:
        self.looks += 1


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def read(stream: str, *ids: str) -> list[Any]:
    return [stream.encode(), [(entry_id.encode(), [b"field", b"value"]) for entry_id in ids]]


@contextlib.asynccontextmanager
async def tailing(
    monkeypatch: pytest.MonkeyPatch, pause: float = 600.0, *, clustered: bool = False
) -> AsyncIterator[tuple[Bus, Tail]]:
    monkeypatch.setattr(module, "_LOOK", 0.01)
    monkeypatch.setattr(module, "_PAUSE", pause)
    monkeypatch.setattr(module, "_GLANCE", 0.0)
    bus = Bus()
    if clustered:
        bus.link = ClusterLink(Endpoint.parse("redis+cluster://one:1"), name="test")
        bus.link.submit = bus.submit
    tail = Tail(bus, "inbox")  # type: ignore[arg-type]
    running = asyncio.create_task(tail.run())
    await settled()
    try:
        yield bus, tail
        assert not running.done()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


def join(tail: Tail, stream: str, position: str = "0-0") -> Reader:
    reader = Reader(stream, position)
    tail.join(reader)  # type: ignore[arg-type]
    return reader


async def test_a_stream_is_read_from_where_its_first_reader_is_and_its_readers_share_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        assert bus.options == [("XREAD", "COUNT", 200, "BLOCK", 2_000)]
        first = join(tail, "events", "5-0")
        second = join(tail, "events", "3-0")
        third = join(tail, "events", "5-0")
        # who is behind what is read looks for himself
        assert (first.looks, second.looks, third.looks) == (0, 1, 0)
        await bus.answer(None)
        assert bus.asked == [{"inbox": "0-0"}, {"inbox": "0-0", "events": "5-0"}]
        await bus.answer([read("events", "6-0", "7-0")])
        for reader in (first, second, third):
            assert reader.offered == [((5, 0), ["6-0", "7-0"], 20)]
        assert tail._positions == {"inbox": "0-0", "events": "7-0"}
        assert bus.asked[-1] == {"inbox": "0-0", "events": "7-0"}


async def test_what_the_read_does_not_wait_for_is_looked_at_until_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        reader = join(tail, "events", "5-0")
        bus.kept["events"] = [ConnectionLost("gone"), ReplyError("WRONGTYPE"), read("events", "6-0")]
        await eventually(lambda: bus.looked[3:4])
        assert bus.looked[:4] == [("events", "5-0")] * 3 + [("events", "6-0")]
        assert reader.offered == [((5, 0), ["6-0"], 10)]
        await bus.answer(None)
        assert bus.asked[1:] == [{"inbox": "0-0", "events": "6-0"}]
        looked = list(bus.looked)
        await asyncio.sleep(0.05)
        assert bus.looked == looked
        # of both that read it only one is heard
        bus.kept["events"] = [read("events", "7-0")]
        tail._awaited = {}
        tail._apart.set()
        await eventually(lambda: len(reader.offered) == 2)
        await bus.answer([read("events", "7-0")])
        assert [ids for _, ids, _ in reader.offered] == [["6-0"], ["7-0"]]


async def test_in_a_cluster_the_inbox_alone_is_waited_for_and_where_there_was_something_there_may_be_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch, clustered=True) as (bus, tail):
        mine, reader = join(tail, "inbox"), join(tail, "events")
        await bus.answer([read("inbox", "1-0")])
        assert bus.asked == [{"inbox": "0-0"}, {"inbox": "1-0"}]
        # all pages at once
        await eventually(lambda: bus.looked)
        monkeypatch.setattr(module, "_LOOK", 600.0)
        bus.kept["events"] = [read("events", f"{n}-0") for n in (1, 2, 3)]
        await eventually(lambda: len(reader.offered) == 3)
        assert [ids for _, ids, _ in (*mine.offered, *reader.offered)] == [["1-0"], ["1-0"], ["2-0"], ["3-0"]]
        await eventually(lambda: bus.looked[-1] == ("events", "3-0"))
        looked = len(bus.looked)
        await asyncio.sleep(0.05)
        assert len(bus.looked) == looked
        assert {stream for stream, _ in bus.looked} == {"events"}


async def test_a_stream_that_nobody_follows_any_more_is_not_read_and_the_inbox_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        mine, one, other = join(tail, "inbox"), join(tail, "events"), join(tail, "events")
        await bus.answer(None)
        tail.leave(one)  # type: ignore[arg-type]
        # once more harms nobody, nor one who never came
        tail.leave(one)  # type: ignore[arg-type]
        tail.leave(Reader("never", "0-0"))  # type: ignore[arg-type]
        await bus.answer([read("events", "1-0")])
        assert (one.offered, other.offered) == ([], [((0, 0), ["1-0"], 10)])
        tail.leave(mine)  # type: ignore[arg-type]
        tail.leave(other)  # type: ignore[arg-type]
        await bus.answer([read("events", "2-0")])
        assert (len(other.offered), tail._positions, bus.asked[-1]) == (1, {"inbox": "0-0"}, {"inbox": "0-0"})
        # who comes back begins where he is, whatever the read in progress brings
        again = join(tail, "events", "9-0")
        bus.answers.put_nowait([read("inbox", "1-0")])
        await settled()
        assert (again.offered, tail._positions) == ([], {"inbox": "1-0", "events": "9-0"})


async def test_what_was_read_for_another_position_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        first = join(tail, "events", "5-0")
        await bus.answer(None)
        tail.leave(first)  # type: ignore[arg-type]
        again = join(tail, "events", "8-0")
        # the read in progress waits elsewhere
        await eventually(lambda: ("events", "8-0") in bus.looked)
        await bus.answer([read("events", "6-0", "9-0")])
        assert (again.offered, tail._positions["events"]) == ([], "8-0")
        await bus.answer([read("events", "9-0")])
        assert again.offered == [((8, 0), ["9-0"], 10)]


async def test_a_read_that_ends_with_nothing_or_in_a_fault_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, _):
        for nothing in (None, [], ConnectionLost("gone")):
            await bus.answer(nothing)
        assert len(bus.asked) == 4


async def test_where_a_key_is_no_stream_the_inbox_is_waited_for_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        reader = join(tail, "events")
        await bus.answer(None)
        assert bus.asked[-1] == {"inbox": "0-0", "events": "0-0"}
        await bus.answer(ReplyError("WRONGTYPE"))
        assert bus.asked[-1] == {"inbox": "0-0"}
        # the others are looked at, each by itself
        bus.kept["events"] = [read("events", "1-0")]
        await eventually(lambda: reader.offered)
        monkeypatch.setattr(tail, "_alone_until", 0.0)
        await bus.answer(None)
        assert bus.asked[-1] == {"inbox": "0-0", "events": "1-0"}


async def test_where_the_inbox_is_no_stream_there_is_a_pause_and_all_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch, pause=0.5) as (bus, tail):
        bus.answers.put_nowait(ReplyError("WRONGTYPE"))
        await eventually(lambda: bus.looked == [("inbox", "0-0")] * 3)
        assert len(bus.asked) == 1
        await eventually(lambda: len(bus.asked) == 2)
        join(tail, "events")
        # until its time is over it is tried alone
        await bus.answer(None)
        tail._alone_until = 0.0
        await bus.answer(None)
        bus.looked.clear()
        for _ in range(2):
            bus.answers.put_nowait(ReplyError("WRONGTYPE"))
        await eventually(lambda: {stream for stream, _ in bus.looked} == {"inbox", "events"})
        asked = len(bus.asked)
        assert bus.asked[-1] == {"inbox": "0-0"}
        await eventually(lambda: len(bus.asked) > asked)
        # once the pause is over
        assert bus.asked[-1] == {"inbox": "0-0", "events": "0-0"}


async def test_nobody_is_kept_from_what_he_may_read_unless_something_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        monkeypatch.setattr(module, "_GLANCE", 3_600.0)
        reader = join(tail, "events")
        await bus.answer(None)
        await bus.answer([read("events", "1-0")])
        assert [ids for _, ids, _ in reader.offered] == [["1-0"]]
        # who comes back at once for what nobody can read waits for somebody to put it right
        bus.insane, asked = {"99-0"}, len(bus.asked)
        await bus.answer([read("events", "2-0", "99-0")])
        assert (len(reader.offered), len(bus.asked)) == (2, asked)


async def test_a_tail_that_ends_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, _):
        assert not bus.closed
    assert bus.closed


async def test_an_entry_behind_which_nothing_would_come_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        reader = join(tail, "events")
        await bus.answer(None)
        bus.insane = {"99-0"}
        await bus.answer([read("events", "99-0")])
        assert (reader.offered, tail._positions["events"]) == ([], "0-0")
        await bus.answer([read("events", "1-0", "99-0")])
        assert (reader.offered, tail._positions["events"]) == ([((0, 0), ["1-0"], 10)], "1-0")


async def test_a_stream_of_which_nothing_can_be_read_keeps_no_other_from_being_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        first, second = join(tail, "events"), join(tail, "others")
        await bus.answer(None)
        bus.insane = {"99-0"}
        await bus.answer([read("events", "99-0"), read("others", "1-0")])
        assert (first.offered, second.offered) == ([], [((0, 0), ["1-0"], 10)])
