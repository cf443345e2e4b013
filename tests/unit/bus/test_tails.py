"""A process's one blocking read, without a server: what it asks for, and who is offered what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.bus import ConnectionLost, Entry, ReplyError, order
from shared.bus import tail as module
from shared.bus.tail import Tail


class Bus:
    """A server whose answers to XREAD the test gives; `asked` are the streams of each with their positions."""

    def __init__(self) -> None:
        self.block = 2.0
        self.link = self.tailer = self
        self.asked: list[dict[str, str]] = []
        self.options: list[tuple[Any, ...]] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.broken: set[str] = set()
        self.insane: set[str] = set()
        self.ended = 0

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

    async def pipe_raw(self, commands: list[tuple[str, str]]) -> list[Any]:
        return [ReplyError("WRONGTYPE") if name in self.broken else 1 for _, name in commands]

    def sane(self, found: list[Entry]) -> list[Entry]:
        kept = [entry for entry in found if entry[0] not in self.insane]
        return found if len(kept) == len(found) else kept

    async def end_tailing(self) -> bool:
        self.ended += 1
        self.answers.put_nowait(None)
        return True

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
async def tailing(monkeypatch: pytest.MonkeyPatch, pause: float = 600.0) -> AsyncIterator[tuple[Bus, Tail]]:
    monkeypatch.setattr(module, "_FIRST_RETRY", 0.0)
    monkeypatch.setattr(module, "_PAUSE", pause)
    monkeypatch.setattr(module, "_GLANCE", 0.0)
    bus = Bus()
    tail = Tail(bus, "inbox")  # type: ignore[arg-type]
    running = asyncio.create_task(tail.run())
    await settled()
    try:
        yield bus, tail
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


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
        # the read in progress does not know of it, and is ended
        await settled()
        assert (bus.asked, bus.ended) == ([{"inbox": "0-0"}, {"inbox": "0-0", "events": "5-0"}], 1)
        second = join(tail, "events", "3-0")
        third = join(tail, "events", "5-0")
        await settled()
        # who is behind what was read looks for himself, and nobody's read is ended for it
        assert (first.looks, second.looks, third.looks, bus.ended) == (0, 1, 0, 1)
        await bus.answer([read("events", "6-0", "7-0")])
        for reader in (first, second, third):
            assert reader.offered == [((5, 0), ["6-0", "7-0"], 20)]
        assert (tail.position("events"), tail.position("inbox"), tail.position("other")) == ("7-0", "0-0", None)
        assert bus.asked[-1] == {"inbox": "0-0", "events": "7-0"}


async def test_a_stream_that_nobody_follows_any_more_is_not_read_and_the_inbox_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        mine, one, other = join(tail, "inbox"), join(tail, "events"), join(tail, "events")
        await settled()
        tail.leave(one)  # type: ignore[arg-type]
        # once more harms nobody, nor one who never came
        tail.leave(one)  # type: ignore[arg-type]
        tail.leave(Reader("never", "0-0"))  # type: ignore[arg-type]
        await bus.answer([read("events", "1-0")])
        assert (one.offered, other.offered) == ([], [((0, 0), ["1-0"], 10)])
        tail.leave(mine)  # type: ignore[arg-type]
        tail.leave(other)  # type: ignore[arg-type]
        await bus.answer([read("events", "2-0")])
        assert (len(other.offered), tail.position("events"), bus.asked[-1]) == (1, None, {"inbox": "0-0"})
        # who comes back begins where he is, whatever the read in progress brings
        again = join(tail, "events", "9-0")
        bus.answers.put_nowait([read("inbox", "1-0")])
        await settled()
        assert (again.offered, tail.position("events"), tail.position("inbox")) == ([], "9-0", "1-0")


async def test_what_was_read_for_another_position_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        first = join(tail, "events", "5-0")
        await settled()
        tail.leave(first)  # type: ignore[arg-type]
        monkeypatch.setattr(tail, "_interrupt", lambda: None)
        again = join(tail, "events", "8-0")
        await bus.answer([read("events", "6-0", "9-0")])
        assert (again.offered, tail.position("events")) == ([], "8-0")
        await bus.answer([read("events", "9-0")])
        assert again.offered == [((8, 0), ["9-0"], 10)]


async def test_a_read_that_ends_with_nothing_or_in_a_fault_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, _):
        for nothing in (None, [], ConnectionLost("gone")):
            await bus.answer(nothing)
        assert len(bus.asked) == 4


async def test_a_key_that_is_no_stream_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch, pause=0.2) as (bus, tail):
        join(tail, "events")
        await settled()
        bus.broken = {"events"}
        await bus.answer(ReplyError("WRONGTYPE"))
        assert bus.asked[-1] == {"inbox": "0-0"}
        async with asyncio.timeout(30):
            while bus.asked[-1] == {"inbox": "0-0"}:
                await asyncio.sleep(0.01)
                await bus.answer(None)
        assert bus.asked[-1] == {"inbox": "0-0", "events": "0-0"}
        # when all are, or nobody knows which, there is a pause
        for broken in ({"events", "inbox"}, set()):
            bus.broken, asked = broken, len(bus.asked)
            bus.answers.put_nowait(ReplyError("WRONGTYPE"))
            await settled()
            assert len(bus.asked) == asked
            async with asyncio.timeout(30):
                while len(bus.asked) == asked:
                    await asyncio.sleep(0.01)
            # once nothing is left out any more
            assert bus.asked[-1] == {"inbox": "0-0", "events": "0-0"}


async def test_nobody_is_kept_from_what_he_may_read_unless_something_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        monkeypatch.setattr(module, "_GLANCE", 3_600.0)
        reader = join(tail, "events")
        await settled()
        await bus.answer([read("events", "1-0")])
        assert [ids for _, ids, _ in reader.offered] == [["1-0"]]
        # who comes back at once for what nobody can read waits for somebody to put it right
        bus.insane, asked = {"99-0"}, len(bus.asked)
        await bus.answer([read("events", "2-0", "99-0")])
        assert (len(reader.offered), len(bus.asked)) == (1, asked)


async def test_a_tail_that_ends_leaves_nothing_behind_that_would_end_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()
    async with tailing(monkeypatch) as (bus, tail):

        async def end_tailing() -> bool:
            try:
                return await asyncio.Event().wait()
            finally:
                ended.set()

        monkeypatch.setattr(bus, "end_tailing", end_tailing)
        join(tail, "events")
        await settled()
        assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), 30)
    # nor is there anything to end where nobody has joined
    async with tailing(monkeypatch):
        pass


async def test_an_entry_behind_which_nothing_would_come_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        reader = join(tail, "events")
        await settled()
        bus.insane = {"99-0"}
        await bus.answer([read("events", "99-0")])
        assert (reader.offered, tail.position("events")) == ([], "0-0")
        await bus.answer([read("events", "1-0", "99-0")])
        assert (reader.offered, tail.position("events")) == ([((0, 0), ["1-0"], 10)], "1-0")


async def test_a_stream_of_which_nothing_can_be_read_keeps_no_other_from_being_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        first, second = join(tail, "events"), join(tail, "others")
        await settled()
        bus.insane = {"99-0"}
        await bus.answer([read("events", "99-0"), read("others", "1-0")])
        assert (first.offered, second.offered) == ([], [((0, 0), ["1-0"], 10)])


async def test_a_read_is_ended_until_one_knows_of_the_new_stream_or_it_would_end_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tailing(monkeypatch) as (bus, tail):
        pauses: list[bool] = []

        async def not_waiting_yet() -> bool:
            pauses.append(True)
            return False

        monkeypatch.setattr(module, "_FIRST_RETRY", 0.005)
        monkeypatch.setattr(bus, "block", 0.02)
        monkeypatch.setattr(bus, "end_tailing", not_waiting_yet)
        join(tail, "events")
        join(tail, "more")
        assert tail._interrupting is not None
        await tail._interrupting
        # twice, with 10 and 20 ms in between: as long as the read waits
        assert len(pauses) == 2
