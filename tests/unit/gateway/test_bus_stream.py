"""What an operator's tail looks up, and when, without a server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from services.gateway.operations import bus_stream
from services.gateway.operations.bus_stream import event, matches
from services.gateway.queries.sse import KEEP_ALIVE
from shared.bus import Command, Entry, ReplyError, order


class Streams:
    """A bus: the subjects that there are, what they have, and what the test lets each of them tell."""

    def __init__(self, *subjects: str) -> None:
        self.there = list(subjects)
        self.looks = 0
        # of each subject its entries, oldest first, and the id of the last one that was there before it was looked at
        self.kept: dict[str, list[str]] = {}
        self.last: dict[str, str] = {}
        # what comes, and from where each was first read
        self.coming: dict[str, list[Entry]] = {}
        self.after: dict[str, str] = {}
        self.link = self

    async def subjects(self) -> list[Any]:
        self.looks += 1
        return [SimpleNamespace(name=name) for name in self.there]

    async def newest(self, stream: str) -> str:
        return self.last.get(stream.partition(":")[2], "0-0")

    async def latest(self, stream: str, count: int) -> list[Entry]:
        if (kept := self.kept.get(stream.partition(":")[2])) is None:
            raise ReplyError("WRONGTYPE")
        return [said(entry_id) for entry_id in kept[::-1][:count]]

    async def pipe_raw(self, commands: list[Command]) -> list[Any]:
        return [self._range(*command) for command in commands]

    def _range(self, name: str, stream: str, after: str, end: str, word: str, count: int) -> Any:
        assert (name, after[0], end, word) == ("XRANGE", "(", "+", "COUNT")
        subject = stream.partition(":")[2]
        self.after.setdefault(subject, after[1:])
        if subject == "odd":
            return ReplyError("WRONGTYPE")
        new = [one for one in self.coming.get(subject, ()) if order(one[0]) > order(after[1:])]
        return [(entry_id.encode(), fields) for entry_id, fields in new[:count]]

    def say(self, subject: str, *new: Entry) -> None:
        self.coming.setdefault(subject, []).extend(new)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_stream, "_LOOK", 0.01)


def said(entry_id: str, payload: bytes = b"{}") -> Entry:
    return entry_id, [b"payload", payload]


def tapped(streams: Streams, *patterns: str, last: int = 0) -> bus_stream.Tap:
    return bus_stream.Tap(cast(Any, streams), patterns or ["*"], last=last)


def ids(chunk: bytes) -> list[tuple[str, str]]:
    """The events of a chunk: subject and id."""
    lines = chunk.decode().splitlines()
    return [(kind[7:], entry_id[4:]) for entry_id, kind in zip(lines[::4], lines[1::4], strict=True)]


@pytest.mark.parametrize(
    ("patterns", "matching"),
    [
        (["*"], ["a", "a.b", "b"]), (["a"], ["a"]), (["a*"], ["a", "a.b"]), (["a.*"], ["a.b"]), ([], []),
        (["b", "a.b"], ["a.b", "b"]), (["a.b.c", "x*"], []),
    ],
)  # fmt: skip
def test_a_pattern_is_a_subject_or_how_it_begins(patterns: list[str], matching: list[str]) -> None:
    assert [subject for subject in ("a", "a.b", "b") if matches(subject, patterns)] == matching


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ([b"user_id", b"ann", b"payload", b'{"b": 1,  "a": "\xc3\xa4"}'],
         b'"user_id":"ann","payload":{"b":1,"a":"\xc3\xa4"}'),
        ([b"payload", b"{"], b'"payload":"{"'),
        ([b"payload", b"[" * 300 + b"]" * 300], b'"payload":"' + b"[" * 300 + b"]" * 300 + b'"'),
        ([b"x", b"\xff"], rb'"x":"\\xff","payload":null'),
    ],
)  # fmt: skip
def test_an_entry_of_the_bus_is_told_in_whatever_form_it_stands(fields: list[bytes], shown: bytes) -> None:
    told = b'{%b,"subject":"one","entry_id":"1-2"}' % shown
    assert event("one", ("1-2", fields)) == b"id: 1-2\nevent: one\ndata: " + told + b"\n\n"


@pytest.mark.parametrize("seconds", [3_600.0, 0.0])
async def test_subjects_are_looked_for_now_and_then_and_not_with_each_entry(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_stream, "_RESCAN_SECONDS", seconds)
    streams = Streams("one")
    async with aclosing(tapped(streams).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        for n in range(1, 4):
            streams.say("one", said(f"{n}-0"))
            assert ids(await anext(chunks)) == [("one", f"{n}-0")]
            streams.there = ["one", "two"]
    new = seconds == 0.0
    assert (streams.looks > 2, "two" in streams.after) == (new, new)


async def test_the_last_entries_of_all_subjects_are_told_first_and_then_what_comes_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_stream, "_RESCAN_SECONDS", 0.0)
    streams = Streams("one", "two", "odd", "out")
    # what came while they were looked at is told with what comes
    streams.kept = {"one": ["9-0", "10-0", "12-0"], "two": ["5-0", "11-0"], "out": ["11-1"]}
    streams.last = {"one": "10-0", "two": "11-0", "odd": "0-0", "out": "11-1"}
    streams.say("one", said("12-0"), said("14-0"))
    streams.say("two", said("13-0"))
    live = tapped(streams, "one", "tw*", "odd", "late", last=3)
    async with aclosing(live.events(keepalive=3_600.0)) as chunks:
        assert [ids(await anext(chunks)) for _ in range(2)] == [[("one", "10-0")], [("two", "11-0")]]
        assert await anext(chunks) == KEEP_ALIVE
        # in the order of their ids, whatever their subjects
        assert ids(await anext(chunks)) == [("one", "12-0"), ("two", "13-0"), ("one", "14-0")]
        assert streams.after == {"one": "10-0", "two": "11-0", "odd": "0-0"}
        # a subject that appears later is new as a whole
        streams.there.append("late")
        streams.say("late", said("2-0"))
        assert ids(await anext(chunks)) == [("late", "2-0")]
        # an id behind which nothing would come is left out
        streams.say("late", said("100000000000000-0"))
        streams.say("one", said("15-0"))
        assert ids(await anext(chunks)) == [("one", "15-0")]


async def test_a_subject_that_appears_while_one_looks_is_not_told_twice() -> None:
    streams = Streams("one")
    streams.kept = {"one": ["1-0"], "late": ["2-0"]}
    streams.last = {"one": "1-0"}
    streams.say("late", said("2-0"))
    look = streams.subjects

    async def later() -> list[Any]:
        found = await look()
        streams.there = ["one", "late"]
        return found

    streams.subjects = later  # type: ignore[method-assign]
    async with aclosing(tapped(streams, last=10).events(keepalive=3_600.0)) as chunks:
        assert ids(await anext(chunks)) == [("one", "1-0")]
        assert await anext(chunks) == KEEP_ALIVE
        assert ids(await anext(chunks)) == [("late", "2-0")]


async def test_a_list_of_subjects_that_cannot_be_read_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_stream, "_RESCAN_SECONDS", 0.0)
    streams = Streams("one")
    look = streams.subjects

    async def broken() -> list[Any]:
        streams.subjects = look  # type: ignore[method-assign]
        raise ReplyError("WRONGTYPE")

    streams.subjects = broken  # type: ignore[method-assign]
    async with aclosing(tapped(streams).events(keepalive=0.01)) as chunks:
        while "one" not in streams.after:
            assert await anext(chunks) == KEEP_ALIVE


async def test_what_came_together_leaves_together_but_not_without_end() -> None:
    streams = Streams("one")
    async with aclosing(tapped(streams).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        streams.say("one", *(said(f"{n}-0") for n in range(1, 4)))
        assert ids(await anext(chunks)) == [("one", f"{n}-0") for n in range(1, 4)]
        streams.say("one", *(said(f"{n}-0", b'"%b"' % (b"x" * 40_000)) for n in range(4, 13)))
        told = [ids(await anext(chunks)) for _ in range(5)]
        assert [len(chunk) for chunk in told] == [2, 2, 2, 2, 1]
        assert [one for chunk in told for one in chunk] == [("one", f"{n}-0") for n in range(4, 13)]


async def test_where_there_was_something_there_may_be_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_stream, "_LOOK", 3_600.0)
    monkeypatch.setattr(bus_stream, "_PAGE", 2)
    streams = Streams("one")
    streams.say("one", *(said(f"{n}-0") for n in range(1, 6)))
    async with asyncio.timeout(60), aclosing(tapped(streams).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        assert [len(ids(await anext(chunks))) for _ in range(3)] == [2, 2, 1]


async def test_silence_is_filled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_stream, "_RESCAN_SECONDS", 3_600.0)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(60), aclosing(tapped(Streams("one")).events(keepalive=0.05)) as chunks:
        assert [await anext(chunks) for _ in range(4)] == [KEEP_ALIVE] * 4
    # the first says that it begins
    assert asyncio.get_running_loop().time() - began >= 0.15


async def test_silence_is_filled_while_redis_is_away_and_nothing_is_missed() -> None:
    streams = Streams("one")
    answer, away = streams.pipe_raw, [True] * 3

    async def read(commands: list[Command]) -> list[Any]:
        if away and away.pop():
            await asyncio.sleep(3_600.0)
        return await answer(commands)

    streams.pipe_raw = read  # type: ignore[method-assign]
    async with asyncio.timeout(60), aclosing(tapped(streams).events(keepalive=0.02)) as chunks:
        assert [await anext(chunks) for _ in range(4)] == [KEEP_ALIVE] * 4
        streams.say("one", said("1-0"))
        while (chunk := await anext(chunks)) == KEEP_ALIVE:
            pass
        assert ids(chunk) == [("one", "1-0")]


async def test_a_subject_that_appears_in_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_stream, "_RESCAN_SECONDS", 0.01)
    streams = Streams("one")
    async with aclosing(tapped(streams).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        following = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        streams.there.append("two")
        await eventually(lambda: "two" in streams.after)
        streams.say("two", said("1-0"))
        assert ids(await following) == [("two", "1-0")]
