"""Journal entries as server-sent events: their form, and when a stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.gateway.sse import Ending, ended, frame, is_before, journal_events, parts

Entry = tuple[str, list[bytes]]


def entry(number: int, kind: str, data: bytes = b"{}") -> Entry:
    return f"1-{number}", [b"type", kind.encode(), b"time", b"1", b"data", data]


class Follower:
    """Hands out these batches, then nothing; a number is a pause."""

    def __init__(self, *batches: list[Entry]) -> None:
        self.batches = list(batches)
        self.asked: list[float] = []
        self.closed = 0

    async def next(self, within: float) -> list[Entry]:
        self.asked.append(within)
        if self.batches:
            return self.batches.pop(0)
        await asyncio.sleep(within)
        return []

    def close(self) -> None:
        self.closed += 1


async def there() -> bool:
    return False


async def told(
    follower: Follower,
    *,
    follow: bool = False,
    answered: bool = False,
    left: float = 30.0,
    follow_seconds: float = 30.0,
    keepalive: float = 0.02,
    lost: Callable[[], Awaitable[bool]] = there,
) -> list[bytes]:
    until = asyncio.get_running_loop().time() + left
    ending = Ending(until, follow, follow_seconds, answered)
    any_follower: Any = follower
    async with asyncio.timeout(20):
        return [chunk async for chunk in journal_events(any_follower, ending, keepalive, lost)]


def kinds(chunks: list[bytes]) -> list[str]:
    return [line[7:].decode() for chunk in chunks for line in chunk.splitlines() if line.startswith(b"event: ")]


def test_an_event_is_its_id_its_type_and_its_data_as_written() -> None:
    assert frame(b"answer", "1-2", b'{"text":"x"}') == b'id: 1-2\nevent: answer\ndata: {"text":"x"}\n\n'
    # whatever anybody writes into a journal, it is one event
    assert frame(b"answer", "1-2", b"a\nb\r\nc") == b"id: 1-2\nevent: answer\ndata: a\ndata: b\ndata: c\n\n"
    for kind in (b"a\nb", b"a\rb"):
        assert frame(kind, "1-2", b"{}") == b"id: 1-2\nevent: unknown\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ([b"type", b"answer", b"time", b"1", b"data", b"x"], (b"answer", b"x")),
        ([b"data", b"x", b"type", b"answer"], (b"answer", b"x")),
        ([b"type", b"completed", b"data", b"x", b"told", b"[]"], (b"completed", b"x")),
        ([b"once", b"o", b"type", b"critique", b"data", b"x"], (b"critique", b"x")),
        ([b"odd", b"1"], (b"unknown", b"{}")),
        ([b"type", b"answer"], (b"answer", b"{}")),
    ],
)
def test_an_entry_is_read_in_whatever_order_its_fields_stand(fields: list[bytes], wanted: tuple[bytes, bytes]) -> None:
    assert parts(("1-1", fields)) == wanted


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
async def test_a_stream_ends_with_the_terminal_entry_and_tells_nothing_behind_it(end: str) -> None:
    follower = Follower([entry(1, "claimed")], [entry(2, "answer"), entry(3, end), entry(4, "critique")])
    chunks = await told(follower)
    assert kinds(chunks) == ["claimed", "answer", end]
    # the entries of one read leave in one write
    assert len(chunks) == 2
    assert follower.closed == 1


async def test_who_follows_is_told_what_comes_behind_the_end_until_the_critique() -> None:
    follower = Follower([entry(1, "completed"), entry(2, "reward")], [entry(3, "critique"), entry(4, "pairwise")])
    assert kinds(await told(follower, follow=True)) == ["completed", "reward", "critique"]
    assert follower.closed == 1


async def test_without_a_critique_following_ends_after_its_time() -> None:
    follower = Follower([entry(1, "completed")])
    assert kinds(await told(follower, follow=True, left=3_600, follow_seconds=0.1)) == ["completed"]
    # of an answer that had ended before, from the beginning
    late = Follower()
    assert kinds(await told(late, follow=True, answered=True, left=3_600, follow_seconds=0.1)) == []
    assert (follower.closed, late.closed) == (1, 1)
    # and the query's deadline does not shorten it
    after = Follower([entry(1, "completed")], [], [entry(2, "critique")])
    assert kinds(await told(after, follow=True, left=0.05)) == ["completed", "critique"]


async def test_silence_is_filled_and_ends_with_the_deadline() -> None:
    follower = Follower([entry(1, "claimed")])
    chunks = await told(follower, left=0.1, keepalive=0.03)
    assert kinds(chunks[:1]) == ["claimed"]
    assert len(chunks) >= 3
    assert set(chunks[1:]) == {b": keep-alive\n\n"}
    # never longer than is left
    assert all(within <= 0.03 for within in follower.asked)
    assert follower.asked[-1] <= 0.1
    assert follower.closed == 1


async def test_a_query_that_is_gone_ends_its_stream_in_the_first_silence() -> None:
    async def gone() -> bool:
        return True

    follower = Follower([entry(1, "claimed")])
    assert kinds(await told(follower, lost=gone)) == ["claimed"]
    assert follower.closed == 1


async def test_a_client_that_leaves_closes_its_follower() -> None:
    follower: Any = Follower([entry(1, "claimed")], [entry(2, "answer")])
    until = asyncio.get_running_loop().time() + 30
    events: Any = journal_events(follower, Ending(until, False, 1.0), 1.0, there)
    assert await anext(events)
    await events.aclose()
    assert follower.closed == 1


async def waited(follower: Any, lost: Callable[[], Awaitable[bool]] = there, left: float = 30.0) -> bool:
    async with asyncio.timeout(20):
        return await ended(follower, asyncio.get_running_loop().time() + left, 0.02, lost)


async def test_waiting_for_the_end_ends_with_it_or_in_time_or_when_the_query_is_gone() -> None:
    async def gone() -> bool:
        return True

    for found, follower, lost, left in (
        (True, Follower([entry(1, "claimed")], [], [entry(2, "failed"), entry(3, "critique")]), there, 30.0),
        (True, Follower([entry(1, "completed")]), gone, 30.0),
        (False, Follower([entry(1, "claimed")]), there, 0.1),
        (False, Follower([entry(1, "claimed")]), gone, 30.0),
    ):
        assert await waited(follower, lost, left) is found
        assert follower.closed == 1


def test_ids_are_compared_by_their_numbers() -> None:
    assert is_before("1-9", "1-10")
    assert not is_before("1-10", "1-10")
    assert not is_before("10-0", "9-9")
