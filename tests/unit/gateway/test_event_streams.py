"""Journal entries as server-sent events: their form, and when a stream ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.gateway.http.gateway import Gateway
from services.gateway.queries.sse import (
    KEEP_ALIVE,
    Ending,
    EventStream,
    ended,
    ended_at,
    frame,
    is_before,
    journal_events,
    parts,
)

Entry = tuple[str, list[bytes]]


def entry(number: int, kind: str, data: bytes = b"{}") -> Entry:
    return f"1-{number}", [b"type", kind.encode(), b"time", b"1", b"data", data]


class Follower:
    """Hands out these batches, then nothing. slow: how often it must be asked until the first is there."""

    def __init__(self, *batches: list[Entry], slow: int = 0) -> None:
        self.batches = list(batches)
        self.slow = slow
        self.asked: list[float] = []
        self.closed = 0

    async def next(self, within: float) -> list[Entry]:
        self.asked.append(within)
        self.slow -= 1
        if self.batches and not self.reading:
            return self.batches.pop(0)
        await asyncio.sleep(within)
        return []

    @property
    def reading(self) -> bool:
        return self.slow >= 0

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
    for said in (b"a\nb\r\nc", b"a\nb\nc", b"a\rb\rc"):
        assert frame(b"answer", "1-2", said) == b"id: 1-2\nevent: answer\ndata: a\ndata: b\ndata: c\n\n"
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
    assert kinds(await told(Follower([entry(1, "critique")]), follow=True, answered=True, left=0)) == ["critique"]
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
    assert follower.closed == 1
    short = Follower()
    assert await told(short, left=0.3, keepalive=3_600) == [b": keep-alive\n\n"]
    assert short.asked[0] <= 0.3


async def test_who_comes_back_behind_the_deadline_is_told_what_is_there() -> None:
    # an answer in time, or that it came to nothing: the journal is kept for longer than the query had
    assert kinds(await told(Follower([entry(1, "claimed")], [entry(2, "failed")]), left=-60)) == ["claimed", "failed"]
    # and what has no end is not waited for
    cut = Follower([entry(1, "claimed")])
    assert await told(cut, left=-60) == [frame(b"claimed", "1-1", b"{}")]
    assert cut.closed == 1
    # also when that takes long to read
    large = Follower([entry(1, "completed")], slow=2)
    assert await told(large, left=-60, keepalive=0.01) == [KEEP_ALIVE, KEEP_ALIVE, frame(b"completed", "1-1", b"{}")]
    assert await waited(Follower([entry(1, "completed")], slow=2), left=-60)
    assert await waited(Follower([entry(1, "claimed")], [entry(2, "completed")]), left=-60)
    assert not await waited(Follower([entry(1, "claimed")]), left=-60)


async def test_a_query_that_is_gone_ends_its_stream_in_the_first_silence() -> None:
    async def gone() -> bool:
        return True

    follower = Follower([entry(1, "claimed")])
    assert kinds(await told(follower, lost=gone)) == ["claimed"]
    assert follower.closed == 1


async def test_a_client_that_leaves_closes_its_follower() -> None:
    follower: Any = Follower([entry(1, "claimed")], [entry(2, "answer")])
    until = asyncio.get_running_loop().time() + 30
    events: Any = journal_events(follower, Ending(until, False, 1.0, False), 1.0, there)
    assert await anext(events)
    await events.aclose()
    assert follower.closed == 1


async def waited(
    follower: Any, lost: Callable[[], Awaitable[bool]] = there, left: float = 30.0, pause: float = 0.02
) -> bool:
    async with asyncio.timeout(20):
        return await ended(follower, asyncio.get_running_loop().time() + left, pause, lost)


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
    # however little time is left, and no longer
    assert await waited(Follower([entry(1, "completed")]), left=0.9) is True
    assert await waited(Follower(), left=0.05, pause=3_600) is False


def test_ids_are_compared_by_their_numbers() -> None:
    assert is_before("1-9", "1-10")
    assert not is_before("1-10", "1-10")
    assert not is_before("10-0", "9-9")


async def test_a_journal_is_known_by_its_newest_entry_and_by_its_end(gateway: Gateway) -> None:
    assert await ended_at(gateway, "journal") == ("0-0", None)
    for number, kind in enumerate(("claimed", "answer", "completed", "critique"), 1):
        await gateway.bus.link.call("XADD", "journal", f"1-{number}", "type", kind, "time", 1, "data", "{}")
        assert await ended_at(gateway, "journal") == (f"1-{number}", "1-3" if number > 2 else None)


class Sent:
    """A response to a client that reads, until it `leaves`."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.leaves = asyncio.Event()
        self.read = [{"type": "http.request", "body": b"", "more_body": False}]

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Any:
        if self.read:
            return self.read.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def take(self, stream: EventStream) -> None:
        async with asyncio.timeout(20):
            await stream({"type": "http"}, self.receive, self.send)

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [(message["body"], message["more_body"]) for message in self.messages[1:]]


class Events:
    """An iterator that hands out two events and then, unless they are all, waits."""

    def __init__(self, gateway: Gateway, *, whole: bool = False) -> None:
        self.events = [b"two", b"one"]
        self.whole = whole
        self.waits = asyncio.Event()
        self.closed = False
        self.streams = gateway.metrics.streams

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        # one stream is told of, while it lasts
        assert counted(self.streams) == 1
        if self.events:
            return self.events.pop()
        if self.whole:
            raise StopAsyncIteration
        self.waits.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def aclose(self) -> None:
        self.closed = True


def counted(gauge: Any) -> float:
    return float(next(iter(gauge.collect())).samples[0].value)


async def test_a_stream_is_sent_event_by_event_until_its_end(gateway: Gateway) -> None:
    left: list[str] = []
    events: Any = Events(gateway, whole=True)
    sent = Sent()
    stream = EventStream(gateway, events, {"X-Query-Id": "1-0"}, lambda: left.append("left"))
    # who routes the response looks for what is to be done behind it
    assert stream.background is None
    await sent.take(stream)
    assert sent.messages[0] == {"type": "http.response.start", "status": 200, "headers": stream.raw_headers}
    assert dict(stream.headers) == {
        "cache-control": "no-store", "x-accel-buffering": "no", "x-query-id": "1-0",
        "content-type": "text/event-stream; charset=utf-8",
    }  # fmt: skip
    assert {message["type"] for message in sent.messages[1:]} == {"http.response.body"}
    assert sent.bodies == [(b"one", True), (b"two", True), (b"", False)]
    assert (left, events.closed, counted(gateway.metrics.streams)) == ([], True, 0)
    assert "x-query-id" not in EventStream(gateway, events).headers


@pytest.mark.parametrize("how", ["leaves", "leaves unheard", "the gateway stops"])
async def test_a_stream_ends_when_its_client_leaves_which_is_told_or_the_gateway_stops(
    gateway: Gateway, how: str
) -> None:
    left: list[str] = []
    events: Any = Events(gateway)
    sent = Sent()
    heard = None if how == "leaves unheard" else lambda: left.append("left")

    async def end() -> None:
        await events.waits.wait()
        if how == "the gateway stops":
            gateway.stop()
        else:
            sent.leaves.set()

    await asyncio.gather(sent.take(EventStream(gateway, events, left=heard)), end())
    assert sent.bodies == [(b"one", True), (b"two", True), (b"", False)]
    assert left == (["left"] if how == "leaves" else [])
    assert (events.closed, counted(gateway.metrics.streams)) == (True, 0)


@pytest.mark.parametrize("ending", ["returns", "fails"])
async def test_client_leaving_as_its_request_ends_logs_nothing(gateway: Gateway, ending: str) -> None:
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: failures.append(context))
    gone: asyncio.Future[None] = loop.create_future()

    async def work() -> str:
        # The callback runs in the next tick of the loop, after the end of the request.
        gone.set_result(None)
        if ending == "fails":
            raise ValueError
        return "answer"

    with contextlib.nullcontext() if ending == "returns" else pytest.raises(ValueError):
        assert await gateway.race(work(), gone) == "answer"
    await asyncio.sleep(0)
    gateway.stop()
    assert failures == []
