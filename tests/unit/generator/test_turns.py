"""Waiting for a query's turn in its session's queue: when the queue is asked, and when the query gives up its slot."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.response_runs import deps_of

from services.generator.opening import wait_for_turn
from shared.bus.keys import cancel_key
from shared.contracts import QueryReceived
from shared.participant.tool_client import Caller

CALLER = Caller("5000-1", "s", "ann", "A")


class Queue:
    """The session's queue, with the query at its head or not."""

    def __init__(self, *, head: bool = True, cancelled: bool = False) -> None:
        self.head = head
        self.cancelled = cancelled
        self.steps: list[str] = []
        link = SimpleNamespace(call=self._call)
        queues = SimpleNamespace(is_head=self._mine, wait=self._wait)
        self.deps = deps_of(SimpleNamespace(bus=SimpleNamespace(link=link)), session_queues=queues)

    async def _call(self, *command: str) -> int:
        assert command == ("EXISTS", cancel_key("5000-1"))
        self.steps.append("cancelled?")
        return int(self.cancelled)

    async def _mine(self, *place: str) -> bool:
        assert place == ("s", "5000-1")
        self.steps.append("first?")
        return self.head

    async def _wait(self, *place: str) -> None:
        assert place == ("s", "5000-1")
        self.steps.append("wait")

    @contextlib.asynccontextmanager
    async def _suspended(self) -> AsyncIterator[None]:
        self.steps.append("suspend")
        yield
        self.steps.append("resume")

    async def waits(self, *, turn: str = "", deliveries: int = 1, **query: Any) -> bool:
        message: Any = SimpleNamespace(
            payload=QueryReceived(**{"session_id": "s", "query": "Why?", "user_id": "ann", **query}),
            envelope=SimpleNamespace(turn=turn),
            deliveries=deliveries,
            suspended=self._suspended,
        )
        return await wait_for_turn(self.deps, message, CALLER)


@pytest.mark.parametrize(
    "given",
    [{"turn": "A"}, {"turn": "AB"}, {"messages": []}, {"messages": [], "deliveries": 2}],
    ids=["accepted-as-first", "first-for-both", "no-session", "no-session-taken-over"],
)
async def test_query_without_others_before_it_asks_nothing(given: dict[str, Any]) -> None:
    queue = Queue()
    assert await queue.waits(**given)
    assert queue.steps == []


@pytest.mark.parametrize(
    "given",
    [{}, {"turn": "B"}, {"turn": "A", "deliveries": 2}],
    ids=["accepted-behind-others", "first-for-the-other-respondent", "taken-over"],
)
async def test_query_that_may_have_others_before_it_asks_its_queue(given: dict[str, Any]) -> None:
    queue = Queue()
    assert await queue.waits(**given)
    assert queue.steps == ["cancelled?", "first?"]


async def test_query_behind_others_waits_without_its_slot() -> None:
    queue = Queue(head=False)
    assert await queue.waits()
    assert queue.steps == ["cancelled?", "first?", "suspend", "wait", "resume"]


async def test_cancelled_query_does_not_wait() -> None:
    queue = Queue(head=False, cancelled=True)
    assert not await queue.waits()
    assert queue.steps == ["cancelled?"]
