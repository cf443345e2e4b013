"""What an operator's tail looks up, and when, without a server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import eventually

from services.gateway import tap
from services.gateway.sse import KEEP_ALIVE
from services.gateway.tap import event, matches
from shared.bus import Entry, ReplyError


class Streams:
    """A bus and its tail: the subjects that there are, what they have, and what the test lets each of them tell."""

    def __init__(self, *subjects: str) -> None:
        self.there = list(subjects)
        self.looks = 0
        # of each subject its entries, oldest first, and the id of the last one that was there before it was looked at
        self.kept: dict[str, list[str]] = {}
        self.last: dict[str, str] = {}
        self.followed: dict[str, asyncio.Queue[list[Entry]]] = {}
        self.after: dict[str, str] = {}
        self.closed: list[str] = []

    async def subjects(self) -> list[Any]:
        self.looks += 1
        return [SimpleNamespace(name=name) for name in self.there]

    async def newest(self, stream: str) -> str:
        return self.last.get(stream.partition(":")[2], "0-0")

    async def latest(self, stream: str, count: int) -> list[Entry]:
        if (kept := self.kept.get(stream.partition(":")[2])) is None:
            raise ReplyError("WRONGTYPE")
        return [said(entry_id) for entry_id in kept[::-1][:count]]

    def follow(self, stream: str, after: str) -> Any:
        name = stream.partition(":")[2]
        queue = self.followed[name] = asyncio.Queue()
        self.after[name] = after
        return SimpleNamespace(next=queue.get, close=lambda: self.closed.append(stream))


def said(entry_id: str, payload: bytes = b"{}") -> Entry:
    return entry_id, [b"payload", payload]


def tapped(streams: Streams, *patterns: str, last: int = 0) -> tap.Tap:
    return tap.Tap(cast(Any, streams), cast(Any, streams), patterns or ["*"], last=last)


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
    monkeypatch.setattr(tap, "_RESCAN_SECONDS", seconds)
    streams = Streams("one")
    live = tap.Tap(cast(Any, streams), cast(Any, streams), ["*"], last=0)
    async with aclosing(live.events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        streams.there.append("two")
        for n in range(3):
            streams.followed["one"].put_nowait([(f"{n}-0", [b"payload", b"{}"])])
            assert b'"entry_id":"%d-0"' % n in await anext(chunks)
    new = seconds == 0.0
    assert (streams.looks > 1, "two" in streams.followed) == (new, new)
    assert len(streams.closed) == 1 + new


async def test_the_last_entries_of_all_subjects_are_told_first_and_then_what_comes_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tap, "_RESCAN_SECONDS", 0.0)
    streams = Streams("one", "two", "odd", "out")
    # what came while they were looked at is told by following
    streams.kept = {"one": ["9-0", "10-0", "12-0"], "two": ["5-0", "11-0"], "out": ["11-1"]}
    streams.last = {"one": "10-0", "two": "11-0", "odd": "0-0", "out": "11-1"}
    live = tapped(streams, "one", "tw*", "odd", "late", last=3)
    async with aclosing(live.events(keepalive=3_600.0)) as chunks:
        assert [ids(await anext(chunks)) for _ in range(2)] == [[("one", "10-0")], [("two", "11-0")]]
        streams.there.append("late")
        assert await anext(chunks) == KEEP_ALIVE
        assert streams.after == {"one": "10-0", "two": "11-0", "odd": "0-0"}
        streams.followed["one"].put_nowait([said("12-0")])
        assert ids(await anext(chunks)) == [("one", "12-0")]
        # a subject that appears later is new as a whole
        while "late" not in streams.followed:
            streams.followed["one"].put_nowait([said("13-0")])
            await anext(chunks)
        assert streams.after["late"] == "0-0"
    assert sorted(streams.closed) == [f"local2:{name}" for name in ("late", "odd", "one", "two")]


async def test_a_subject_that_appears_while_one_looks_is_not_told_twice() -> None:
    streams = Streams("one")
    streams.kept = {"one": ["1-0"], "late": ["2-0"]}
    streams.last = {"one": "1-0"}
    look = streams.subjects

    async def later() -> list[Any]:
        found = await look()
        streams.there = ["one", "late"]
        return found

    streams.subjects = later  # type: ignore[method-assign]
    async with aclosing(tapped(streams, last=10).events(keepalive=3_600.0)) as chunks:
        assert ids(await anext(chunks)) == [("one", "1-0")]
        assert await anext(chunks) == KEEP_ALIVE


async def test_a_list_of_subjects_that_cannot_be_read_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_RESCAN_SECONDS", 0.0)
    streams = Streams("one")
    look = streams.subjects

    async def broken() -> list[Any]:
        streams.subjects = look  # type: ignore[method-assign]
        raise ReplyError("WRONGTYPE")

    streams.subjects = broken  # type: ignore[method-assign]
    async with aclosing(tapped(streams).events(keepalive=0.01)) as chunks:
        while "one" not in streams.followed:
            assert await anext(chunks) == KEEP_ALIVE


async def test_what_came_together_leaves_together_but_not_without_end() -> None:
    streams = Streams("one")
    async with aclosing(tapped(streams).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        streams.followed["one"].put_nowait([said(f"{n}-0") for n in range(3)])
        assert ids(await anext(chunks)) == [("one", f"{n}-0") for n in range(3)]
        large = [said(f"{n}-0", b'"%b"' % (b"x" * 40_000)) for n in range(9)]
        streams.followed["one"].put_nowait(large)
        told = [ids(await anext(chunks))]
        assert len(told[0]) < 9
        while len(told) < 9 and told[-1][-1] != ("one", "8-0"):
            told.append(ids(await anext(chunks)))
        assert [one for chunk in told for one in chunk] == [("one", f"{n}-0") for n in range(9)]


async def test_silence_is_filled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_RESCAN_SECONDS", 3_600.0)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(60), aclosing(tapped(Streams("one")).events(keepalive=0.05)) as chunks:
        assert [await anext(chunks) for _ in range(4)] == [KEEP_ALIVE] * 4
    # the first says that it begins
    assert asyncio.get_running_loop().time() - began >= 0.15


async def test_a_subject_that_appears_in_silence_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "_RESCAN_SECONDS", 0.01)
    streams = Streams("one")
    async with aclosing(tapped(streams).events(keepalive=3_600.0)) as chunks:
        assert await anext(chunks) == KEEP_ALIVE
        streams.there.append("two")
        following = asyncio.ensure_future(anext(chunks))
        await eventually(lambda: "two" in streams.followed)
        streams.followed["two"].put_nowait([said("1-0")])
        assert ids(await following) == [("two", "1-0")]
