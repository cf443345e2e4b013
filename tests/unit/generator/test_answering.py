"""A query at one replica: which are left out, what each kind of end comes to, and how the session's lane is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.response_runs import deps_of

from services.generator import answering as module
from services.generator.answering import Answering
from services.generator.attachments import AttachmentMissing, AttachmentsUnavailable
from services.generator.compaction import Past
from services.generator.ending import Cancelled, Ending, Failure
from services.generator.identities import UnknownPersona
from services.generator.settings import GeneratorSettings
from shared.contracts import ClientTools, QueryReceived
from shared.errors import TransientError
from shared.llm.port import ContextOverflow, ModelError, ModelMissing, ModelRejected, ModelUnavailable
from shared.participant.tool_client import Caller

DONE = cast(Ending, SimpleNamespace(name="done"))
PAST = Past()


class Bench:
    """The steps of a query, of which each does what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: float = 600.0, **settings: Any) -> None:
        self.settings = GeneratorSettings(**{"deadline_seconds": 90, **settings})
        self.run: Any = SimpleNamespace(waits_for="")
        self.generates: Callable[[], Awaitable[Ending]] = self._done
        self.ended: list[Ending] = []
        self.mine = True
        self.stopped = False
        self.began: list[bool] = []
        self.waits: asyncio.Event | None = None
        self.waiting_queries = 0
        self.opened: list[Caller] = []
        self.loaded = 0
        self.watched: list[Ending] = []
        self.lanes: list[tuple[str, str, str]] = []
        self.chores: list[tuple[Any, ...]] = []
        self.left_asked: list[tuple[int, str]] = []
        bus = SimpleNamespace(left=self._left)
        self.left = left
        context = SimpleNamespace(settings=self.settings, bus=bus)
        lanes = SimpleNamespace(leave=self._note("leave"), clear=self._note("clear"))
        self.deps = deps_of(context, lanes=lanes)
        for name in ("claim_response", "load_past", "wait_for_turn", "generate", "end", "background_call"):
            monkeypatch.setattr(module, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(module, "watched_answer", self._watched_answer)
        self.answering = Answering(self.deps, self._queries)

    async def _done(self) -> Ending:
        return DONE

    async def _queries(self) -> int:
        return self.waiting_queries

    def _left(self, deadline: int, entry_id: str) -> float:
        self.left_asked.append((deadline, entry_id))
        return self.left

    def _note(self, what: str) -> Callable[[str, str], Awaitable[None]]:
        async def note(session_id: str, query_id: str) -> None:
            self.lanes.append((what, session_id, query_id))

        return note

    async def _claim_response(self, deps: Any, message: Any, caller: Caller, *, starts: bool = False) -> Any:
        assert (deps, message.payload.session_id) == (self.deps, "s")
        self.began.append(starts)
        self.opened.append(caller)
        return self.run

    async def _load_past(self, run: Any) -> Past | None:
        assert run is self.run
        self.loaded += 1
        return None if self.stopped else PAST

    async def _generate(self, run: Any, past: Past) -> Ending:
        assert (run, past) == (self.run, PAST)
        return await self.generates()

    async def _end(self, run: Any, ending: Ending) -> None:
        assert run is self.run
        self.ended.append(ending)

    async def _wait_for_turn(self, deps: Any, _message: Any, caller: Caller) -> bool:
        assert (deps, caller.query_id) == (self.deps, "5000-1")
        if self.waits is not None:
            await self.waits.wait()
        return self.mine

    @contextlib.asynccontextmanager
    async def _background_call(self, bus: Any, query_id: str, until: int) -> AsyncIterator[None]:
        assert bus is self.deps.context.bus
        self.chores.append((query_id, until))
        yield

    @contextlib.contextmanager
    def _watched_answer(self, settings: Any, _message: Any) -> Iterator[Any]:
        assert settings is self.settings
        yield SimpleNamespace(ended=self.watched.append)


def message(*, deliveries: int = 1, deadline: int | None = None, turn: str = "", **query: Any) -> Any:
    said = {"session_id": "s", "query": "Why?", "user_id": "ann", "time_zone": "Asia/Tokyo", **query}
    payload = QueryReceived(**said)
    envelope = SimpleNamespace(deadline=deadline, traceparent="trace", turn=turn)
    return SimpleNamespace(entry_id="5000-1", payload=payload, deliveries=deliveries, envelope=envelope)


async def test_a_query_is_answered_and_leaves_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    await bench.answering.answer(message())
    caller = Caller("5000-1", "s", "ann", "A", 95_000, "trace", "Asia/Tokyo")
    assert (bench.opened, bench.loaded, bench.began) == ([caller], 1, [True])
    assert bench.left_asked == [(95_000, "5000-1")]
    assert bench.ended == bench.watched == [DONE]
    assert (bench.lanes, bench.chores) == ([("leave", "s", "5000-1")], [])
    # nothing of it is held any more
    assert bench.answering._running == {}
    # its own deadline counts before the settings'
    await bench.answering.answer(message(deadline=7_000))
    assert bench.opened[-1].deadline == 7_000


async def test_what_a_program_asks_of_itself_is_no_persons_query(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    await bench.answering.answer(message(plain=True, messages=[]))
    assert (bench.chores, bench.ended, bench.lanes) == ([("5000-1", 95_000)], [DONE], [])


async def test_a_query_whose_answer_is_there_only_leaves_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.run = None
    await bench.answering.answer(message())
    assert (bench.watched, len(bench.opened), bench.lanes) == ([], 1, [("leave", "s", "5000-1")])
    # one that was cancelled before its turn, and has ended since
    bench.mine = False
    await bench.answering.answer(message())
    assert (bench.watched, len(bench.opened), len(bench.lanes)) == ([], 2, 2)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownPersona("who?"), "unknown_persona"),
        (AttachmentMissing("f"), "attachment_missing"),
        (AttachmentsUnavailable("away"), "memory_unavailable"),
        (ModelMissing("no model"), "model_missing"),
        (ModelRejected("no"), "model_rejected"),
        (ContextOverflow("too long"), "context_overflow"),
        (ModelUnavailable("away"), "model_unavailable"),
        (ModelError("odd"), "model_error"),
    ],
)
async def test_what_goes_wrong_with_a_model_is_told_by_its_kind(
    monkeypatch: pytest.MonkeyPatch, error: ModelError, code: str
) -> None:
    bench = Bench(monkeypatch)

    async def fails() -> Ending:
        raise error

    bench.generates = fails
    await bench.answering.answer(message())
    assert bench.ended == bench.watched == [Failure(code, str(error))]
    assert (len(bench.opened), bench.lanes) == (1, [("leave", "s", "5000-1")])


async def test_what_is_no_matter_of_the_model_is_raised_and_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (TransientError("away"), TimeoutError("of something else")):
        bench = Bench(monkeypatch)

        async def fails(error: Exception = error) -> Ending:
            raise error

        bench.generates = fails
        with pytest.raises(type(error)):
            await bench.answering.answer(message())
        assert bench.ended == bench.lanes == []
        assert bench.answering._running == {}


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_cancel_stops_an_answer_and_one_that_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    bench = Bench(monkeypatch)
    begun = asyncio.Event()

    async def endless() -> Ending:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    bench.generates = endless
    if waiting:
        bench.waits = asyncio.Event()
    answering = asyncio.create_task(bench.answering.answer(message()))
    if waiting:
        while not bench.answering._running:
            await asyncio.sleep(0)
    else:
        await begun.wait()
    # of another query nobody knows here
    bench.answering.cancel("6000-1")
    await asyncio.sleep(0)
    assert not answering.done()
    bench.answering.cancel("5000-1")
    bench.answering.cancel("5000-1")
    await answering
    assert bench.ended == bench.watched == [Cancelled()]
    # its journal is opened once
    assert (len(bench.opened), bench.lanes) == (1, [("leave", "s", "5000-1")])


async def test_a_query_that_was_cancelled_before_its_turn_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.mine = False
    await bench.answering.answer(message())
    assert (bench.ended, bench.loaded, bench.began) == ([Cancelled()], 0, [False])
    # nor is one that was cancelled while its journal was claimed
    bench = Bench(monkeypatch)
    bench.stopped = True
    await bench.answering.answer(message(turn="A"))
    assert (bench.ended, bench.watched, bench.began) == ([Cancelled()], [Cancelled()], [True])


@pytest.mark.parametrize(("waits", "told"), [("", ""), ("it is busy", ": it waited for the model (it is busy)")])
async def test_an_answer_that_is_too_late_says_so_and_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, waits: str, told: str
) -> None:
    bench = Bench(monkeypatch, left=0.0)

    async def endless() -> Ending:
        await asyncio.Event().wait()
        raise AssertionError

    bench.generates = endless
    bench.run.waits_for = waits
    await bench.answering.answer(message())
    assert bench.ended == [Failure("deadline_exceeded", f"the answer was not ready before the query's deadline{told}")]


# ── the shadow ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "query", "waiting", "answered"),
    [
        ({}, {}, 0, True),
        ({}, {}, 20, True),
        ({}, {}, 21, False),
        ({"leave_out_above": None}, {}, 10**6, True),
        ({"leave_out_above": 0}, {}, 1, False),
        ({"answer_one_in": 7}, {}, 0, False),
        ({"answer_one_in": 6}, {}, 0, True),
        ({}, {"plain": True}, 0, False),
        ({}, {"client_tools": ClientTools(functions=[])}, 0, False),
        # whoever has begun goes on
        ({"answer_one_in": 7}, {"deliveries": 2}, 99, True),
    ],
)
async def test_the_shadow_answers_a_sample_and_none_while_too_many_wait(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], query: dict[str, Any], waiting: int, answered: bool
) -> None:
    monkeypatch.setattr(module, "one_in", lambda n, query_id: (n, query_id) != (7, "5000-1"))
    bench = Bench(monkeypatch, respondent_id="B", **settings)
    bench.waiting_queries = waiting
    await bench.answering.answer(message(**query))
    assert bench.ended == ([DONE] if answered else [])
    assert len(bench.opened) == answered
    # either way its lane is left
    assert bench.lanes == [("leave", "s", "5000-1")]


async def test_who_answers_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "one_in", lambda *_: False)
    bench = Bench(monkeypatch, leave_out_above=0)
    bench.waiting_queries = 99
    await bench.answering.answer(message(client_tools=ClientTools(functions=[])))
    assert bench.ended == [DONE]


async def test_what_has_no_place_in_a_lane_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept, left in ((False, []), (True, [("clear", "s", "5000-1")])):
        bench = Bench(monkeypatch)
        await bench.answering.answer(message(messages=[], kept=kept))
        assert (bench.ended, bench.lanes) == ([DONE], left)
    shadow = Bench(monkeypatch, respondent_id="B")
    await shadow.answering.answer(message(messages=[], plain=True))
    assert (shadow.ended, shadow.lanes) == ([], [])


async def test_a_query_that_is_given_up_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, left=3.0)
    await bench.answering.abandon(message(deliveries=5), "it failed")
    assert bench.ended == [Failure("abandoned", "it failed")]
    assert bench.opened == [Caller("5000-1", "s", "ann", "A", 95_000, "trace", "Asia/Tokyo")]
    assert bench.lanes == [("leave", "s", "5000-1")]
    bench.run = None
    await bench.answering.abandon(message(deliveries=5), "it failed")
    assert len(bench.lanes) == 2


@pytest.mark.parametrize(
    ("said", "zone"),
    [("Australia/Sydney", "Australia/Sydney"), ("", "America/Los_Angeles"), ("Mars/Olympus", "America/Los_Angeles")],
    ids=["the-querys", "a-program-names-none", "unknown-to-this-replica"],
)
async def test_query_without_a_known_zone_has_the_deployments(
    said: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch, time_zone="America/Los_Angeles")
    await bench.answering.answer(message(time_zone=said))
    (caller,) = bench.opened
    assert caller.time_zone == zone
