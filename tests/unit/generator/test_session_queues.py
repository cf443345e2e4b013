"""Waiting for the turn in a session: asked when woken and now and then, and never in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.generator import session_queues
from services.generator.session_queues import SessionQueues
from shared.records.sessions import deletion

Wake = Callable[[str, Mapping[bytes, bytes]], None]


class Queue:
    """Says who is before, of each query in turn; nobody when nothing more was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **before: list[str]) -> None:
        self.asked: list[str] = []
        self._before = before
        self._handlers: dict[str, Wake] = {}
        monkeypatch.setattr(session_queues, "lanes", SimpleNamespace(turn=self._turn))
        context = SimpleNamespace(bus=None, inbox="inbox", on_inbox=self._handlers.__setitem__)
        self.queues = SessionQueues(cast(Any, context), cast(Any, None), "A")

    async def _turn(self, _bus: Any, session_id: str, respondent_id: str, query_id: str, inbox: str) -> str | None:
        assert (session_id, respondent_id, inbox) == ("s", "A", "inbox")
        self.asked.append(query_id)
        left = self._before.get(query_id)
        return left.pop(0) if left else None

    async def wake(self, session_id: str) -> None:
        self._handlers["wake"]("1-0", {b"session": session_id.encode()})
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_waits_asks_once_for_each_time_that_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_queues, "_RECHECK", 600.0)
    queue = Queue(monkeypatch, q1=["other", "other"], q2=["q1", "q1"])
    first = asyncio.create_task(queue.queues.wait("s", "q1"))
    second = asyncio.create_task(queue.queues.wait("s", "q2"))
    await settled()
    assert queue.asked == ["q1", "q2"]
    await queue.wake("another session")
    assert queue.asked == ["q1", "q2"]
    await queue.wake("s")
    assert sorted(queue.asked[2:]) == ["q1", "q2"]
    assert not first.done()
    await queue.wake("s")
    assert sorted(queue.asked[4:]) == ["q1", "q2"]
    await asyncio.gather(first, second)
    # nobody is left to be woken
    await queue.wake("s")
    assert (len(queue.asked), queue.queues._waiters) == (6, {})


async def test_a_wake_that_was_lost_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_queues, "_RECHECK", 0.01)
    queue = Queue(monkeypatch, q1=["other", "other"])
    async with asyncio.timeout(10):
        await queue.queues.wait("s", "q1")
    assert queue.asked == ["q1"] * 3


async def test_who_goes_away_leaves_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_queues, "_RECHECK", 600.0)
    queue = Queue(monkeypatch, q1=["other"] * 9, q2=["q1"])
    gone = asyncio.create_task(queue.queues.wait("s", "q1"))
    stays = asyncio.create_task(queue.queues.wait("s", "q2"))
    await settled()
    gone.cancel()
    await settled()
    await queue.wake("s")
    assert queue.asked == ["q1", "q2", "q2"]
    await stays
    assert queue.queues._waiters == {}


@pytest.mark.parametrize("deleted", [False, True])
async def test_who_leaves_wakes_the_next_and_removes_what_a_deleted_session_would_keep(
    deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Any, ...]] = []

    def noted(name: str, found: Any = None) -> Callable[..., Any]:
        async def note(*what: Any, **how: Any) -> Any:
            done.append((name, *what, *how.items()))
            return found

        return note

    monkeypatch.setattr(
        session_queues, "lanes", SimpleNamespace(leave=noted("leave", [b"6-0" if deleted else None, None]))
    )
    monkeypatch.setattr(session_queues, "erase", noted("erase"))
    monkeypatch.setattr(session_queues, "erase_entries", noted("erase_entries"))
    context = SimpleNamespace(bus="bus", inbox="inbox", on_inbox=lambda *_: None)
    queues = SessionQueues(cast(Any, context), cast(Any, SimpleNamespace(bring=noted("bring"))), "B")
    await queues.release("s", "5-0")
    erased = [
        ("erase", "bus", ["5-0"]),
        ("bring", "s", ["5-0"], []),
        ("erase_entries", "bus", "correlation_id", ["5-0"], "5-0"),
    ]
    assert done == [("leave", "bus", "s", "B", "5-0", *deletion("s", "5-0")), *(erased if deleted else ())]
