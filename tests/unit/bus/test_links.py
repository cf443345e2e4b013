"""What becomes of error replies, and what may be sent again, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from shared.bus import Bus, Command, Link, Reply, ReplyError
from shared.bus.clock import BusClock
from shared.bus.endpoint import Server
from shared.bus.link import _Batch, _Unit, ended
from shared.bus.wire import Wire
from shared.errors import BusUnavailable, PermanentError


class Answering(Link):
    """A link whose commands are answered with what is in `replies`."""

    def answering(self, *replies: Reply) -> Answering:
        self.replies = list(replies)
        self.sent: list[tuple[list[Command], bool, dict[str, Any]]] = []
        return self

    def submit(self, commands: Sequence[Command], retry: bool, **options: Any) -> asyncio.Future[list[Reply]]:
        self.sent.append((list(commands), retry, options))
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        future.set_result(self.replies)
        return future


def link(*replies: Reply) -> Answering:
    return Answering("redis://127.0.0.1:1", name="test", timeout=1.0, clock=BusClock()).answering(*replies)


WRONG = ReplyError("WRONGTYPE it is")


async def test_an_error_reply_is_raised_unless_raw_ones_are_asked_for() -> None:
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        await link(WRONG).call("GET", "x")
    for replies in ([WRONG, b"OK"], [b"OK", WRONG]):
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            await link(*replies).pipe([("GET", "x"), ("GET", "y")])
    assert await link(b"1", b"2").pipe([("GET", "x"), ("GET", "y")]) == [b"1", b"2"]
    one, other = await link(b"1", WRONG).pipe_raw([("GET", "x"), ("GET", "y")])
    assert one == b"1"
    assert isinstance(other, ReplyError)
    assert other.code == "WRONGTYPE"


async def test_commands_are_sent_again_after_a_lost_connection_unless_the_caller_says_otherwise() -> None:
    asked = link(b"1")
    await asked.call("GET", "x")
    await asked.pipe([("GET", "x")])
    await asked.pipe_raw([("GET", "x")])
    await asked.commit([("SET", "x", "y")])
    assert [retry for _, retry, _ in asked.sent] == [True] * 4
    asked.sent.clear()
    await asked.call("INCR", "x", retry=False)
    await asked.pipe([("INCR", "x")], retry=False)
    await asked.commit([("INCR", "x")], retry=False)
    assert [retry for _, retry, _ in asked.sent] == [False] * 3


async def test_a_transaction_leaves_as_one() -> None:
    asked = link(b"OK")
    await asked.commit([("SET", "x", "y")], until=7.0)
    ((commands, _, options),) = asked.sent
    assert commands == [("MULTI",), ("SET", "x", "y"), ("EXEC",)]
    assert (options["atomic"], options["until"]) == (True, 7.0)


async def test_a_task_is_ended_until_it_has_and_what_it_failed_with_is_raised() -> None:
    refused = 0

    async def stubborn(error: Exception | None) -> None:
        nonlocal refused
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            refused += 1
        try:
            await asyncio.Event().wait()
        finally:
            if error is not None:
                raise error

    for error in (None, RuntimeError("a fault")):
        task = asyncio.create_task(stubborn(error))
        await asyncio.sleep(0)
        if error is None:
            await asyncio.wait_for(ended(task), 60)
            assert task.cancelled()
        else:
            with pytest.raises(RuntimeError, match="a fault"):
                await asyncio.wait_for(ended(task), 60)
    assert refused == 2


async def test_a_bus_that_ends_ends_all_its_connections() -> None:
    async with Bus("redis://127.0.0.1:1", "test/1") as bus:
        links = [bus.link, bus.pulse, bus.reader]
    for one in links:
        with pytest.raises(BusUnavailable, match="closed"):
            await one.call("PING")


@pytest.mark.parametrize("now", [False, True])
async def test_what_is_asked_in_one_turn_leaves_in_one_write_unless_nothing_is_to_come(
    now: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Link("redis://127.0.0.1:1", name="test", timeout=1.0, clock=BusClock())
    asked._loop = asyncio.get_running_loop()
    written: list[int] = []
    monkeypatch.setattr(asked, "_flush", lambda: written.append(len(asked._queue)))
    asked._wire = cast(Wire, object())
    for _ in range(3):
        asked.submit([("GET", "x")], True, **({"now": True} if now else {}))
    at_once = list(written)
    await asyncio.sleep(0)
    assert (at_once, written) == (([1, 2, 3], [1, 2, 3]) if now else ([], [3]))


class Faulty(Link):
    """A link with a fault in what nothing is expected to fail in."""

    def _requeue(self) -> None:
        if not self._closing:
            raise RuntimeError("a fault")
        super()._requeue()


async def test_whoever_waits_on_a_link_that_ends_by_a_fault_is_told_and_so_is_whoever_comes() -> None:
    """A participant that waited on it for ever would be neither alive nor dead."""
    async with Faulty("redis://127.0.0.1:1", name="test", timeout=1.0) as faulty:
        with pytest.raises(PermanentError, match="fault of this program"):
            await asyncio.wait_for(faulty.call("PING"), 30)
        with pytest.raises(PermanentError, match="fault of this program"):
            await faulty.call("PING")


class Unanswered(Link):
    """A link to a server that takes everything and answers nothing yet; `flushes`: how many units left in each."""

    def opened(self) -> Unanswered:
        self.flushes: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._wire = cast(Wire, object())
        return self

    def _send(self, _wire: Wire, units: list[_Unit]) -> None:
        self.flushes.append(len(units))
        self._inflight.append(_Batch(units, b"1", 0.0, 0.0))

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()


async def test_what_is_large_enough_leaves_beside_unanswered_flushes_and_the_rest_waits_for_an_answer() -> None:
    """Redis, and whom it wakes, work on the one while the next is prepared; few commands are not worth the calls."""
    slow = Unanswered("redis://127.0.0.1:1", name="test", timeout=1.0).opened()
    small, large = ("SET", "x", "y"), ("SET", "x", "y" * 9_000)
    slow.commit([small])
    assert slow.flushes == [1]
    for _ in range(3):
        slow.commit([small])
    assert slow.flushes == [1]
    # small ones that have become many go along
    slow.commit([large])
    assert slow.flushes == [1, 4]
    slow.commit([small])
    assert slow.flushes == [1, 4]
    for _ in range(10):
        slow.commit([large])
    assert slow.flushes == [1, 4, 2, 1]
    # what may share its write with others of the tick waits, however large
    slow.submit([large], True)
    assert slow.flushes == [1, 4, 2, 1]
    slow.close()


async def test_what_comes_up_beside_an_unanswered_flush_leaves_when_that_is_answered() -> None:
    slow = Unanswered("redis://127.0.0.1:1", name="test", timeout=1.0).opened()
    first = slow.submit([("GET", "x")], True)
    slow.commit([("SET", "x", "y")])
    # the one goes along with the other, and nothing is left for the turn that was meant for it
    assert slow.flushes == [2]
    third = slow.submit([("GET", "z")], True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert slow.flushes == [2]
    slow._receive([b"1", b"OK", b"QUEUED", [b"OK"], b"1"])
    assert await first == [b"1"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert slow.flushes == [2, 1]
    assert not third.done()
    assert slow._useful
    slow.close()


def test_a_further_connection_goes_to_the_same_server_and_tells_the_same_clock() -> None:
    clock, server = BusClock(), Server("one", 7)
    link = Link(server, name="test/1:commands", timeout=3.0, clock=clock)
    line = link.line("s", "test/1:inbox")
    assert (line._server, line._name, line._timeout, line._clock) == (server, "test/1:inbox", 3.0, clock)
    assert link.server_of("s") == server
