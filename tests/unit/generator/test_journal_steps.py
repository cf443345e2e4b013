"""The steps of an answer: what is asked of the model and of the tools, what is written, and what is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from support.entries import data_of, event_of
from support.response_runs import deps_of, run_of

from services.generator.context import Conversation, EarlierFile, Rates
from services.generator.loop import Reply
from services.generator.machine import IDLE
from services.generator.settings import GeneratorSettings
from services.generator.steps import JournalSteps
from shared.contracts import Outgoing, ToolCallRecord, ToolResultMessage
from shared.envelope import now_ms
from shared.llm.port import (
    ChatRequest,
    ContextOverflow,
    EmptyAnswer,
    Finish,
    ModelError,
    ModelFacts,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    Notice,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)
from shared.llm.preemption import Preempted
from shared.participant.tool_client import Caller
from shared.records.events import Entry, EntryType, KnownEvent
from shared.records.journal import Events, Sent
from shared.records.response_state import EMPTY, apply, replay
from shared.telemetry import metrics

QUESTION = {"role": "user", "content": "What is new?"}
DONE = Finish("stop", 100, 5, "served:1b")
FORM = {"type": "object"}


class Journal:
    def __init__(self) -> None:
        self.entries: list[tuple[EntryType, dict[str, Any]]] = []
        self.tokens: list[str] = []
        self.told: list[Outgoing] = []
        self.refuses: EntryType | None = None
        self.state = EMPTY

    @property
    def position(self) -> str:
        return f"1-{len(self.entries)}"

    async def append(self, event: KnownEvent, *, messages: Sequence[Outgoing] = ()) -> None:
        if event.type is self.refuses:
            raise ConnectionError("somebody else writes it")
        self._write([event])
        self.told += messages

    def _write(self, events: Events) -> None:
        for event in events:
            self.entries.append(data_of(event))
            self.state = apply(self.state, Entry(self.position, 0, event))

    async def append_all(self, events: Events, tokens: Sequence[str] | None = None) -> None:
        self._write(events)
        self.tokens += tokens or []

    def send(self, events: Events) -> Sent:
        self._write(events)
        replies: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        replies.set_result([b"1-1"] * len(events))
        return Sent(events, [], replies)

    async def confirm(self, sent: Sent) -> None:
        await sent.replies

    def of(self, kind: EntryType) -> list[dict[str, Any]]:
        return [data for each, data in self.entries if each is kind]


class Model:
    """Says what it was given for each call; an exception in it is raised at its place, and facts are known from there
    on."""

    def __init__(self, *calls: Sequence[Any]) -> None:
        self._calls = list(calls)
        self.requests: list[ChatRequest] = []
        self.times: list[float] = []
        self.known = ModelFacts()
        self.closed = 0

    @property
    def pauses(self) -> list[float]:
        """The seconds between two requests, in virtual time (see conftest.py)."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    async def facts(self, _model: str) -> ModelFacts:
        return self.known

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Any, None]:
        self.requests.append(request)
        self.times.append(asyncio.get_running_loop().time())
        try:
            for said in self._calls.pop(0):
                if isinstance(said, ModelFacts):
                    self.known = said
                    continue
                if isinstance(said, Exception):
                    raise said
                yield said
        finally:
            self.closed += 1


class Tools:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.awaited: list[tuple[str, dict[str, Any], float]] = []

    async def back(self, name: str, args: dict[str, Any], seconds: float) -> None:
        self.awaited.append((name, args, seconds))

    async def schemas(self) -> dict[str, dict[str, Any]]:
        return {name: function(name) for name in ("web_search", "calculator", "mine")}

    async def patience(self, name: str, _args: dict[str, Any], limit: float | None, usual: float) -> float:
        return (limit or usual) + len(name)

    async def call(self, name: str, args: dict[str, Any], **how: Any) -> ToolResultMessage:
        self.asked.append({"name": name, "args": args, **how})
        if args.get("breaks"):
            raise StreamInterrupted("away")
        return ToolResultMessage(
            query_id="1-0", call_id=how["call_id"], tool="canonical", result="r", error=args.get("error"),
            data={"n": 1}, duration_ms=7, request_id="9-0",
        )  # fmt: skip


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}}


class Run:
    """An answer's steps over a model that says so and so."""

    def __init__(
        self,
        *calls: Sequence[Any],
        settings: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        query_id: str = "1-0",
        before: Sequence[Entry] = (),
        **steps: Any,
    ) -> None:
        self.journal, self.model, self.tools = Journal(), Model(*calls), Tools()
        self.journal.state = replay(before)
        context = SimpleNamespace(
            settings=GeneratorSettings(**(settings or {})), replica="r1", facts={} if facts is None else facts
        )
        deps = deps_of(context, model=self.model, tools=self.tools)
        message = SimpleNamespace(
            entry_id=query_id, payload=SimpleNamespace(attachments=None), deliveries=steps.pop("deliveries", 1)
        )
        left = steps.pop("transitions_left", 0)
        self.run = run_of(deps, self.journal, Caller(query_id), message=message, transitions_left=left)
        history = steps.pop("history", [])
        self.conversation = Conversation([{"role": "system", "content": "Be kind."}], history)
        options = {"allowed": None, "options": {"seed": 1}, "model_name": "m", **steps}
        self.steps = JournalSteps(run=self.run, conversation=self.conversation, **options)

    async def asks(self, with_tools: bool = True, form: dict[str, Any] | None = None, step: int = 0) -> Reply:
        return await self.steps.model(step, [QUESTION], with_tools=with_tools, form=form)


async def test_a_reply_is_asked_for_as_it_is_set_and_written_whole() -> None:
    call = ToolCall("c1", "calculator", {"x": 1})
    run = Run(
        [ThinkingDelta("hm"), TextDelta("I "), TextDelta("look."), call, DONE],
        settings={"num_ctx": 4_096, "max_tokens": 500, "first_token_seconds": 11, "timeout_seconds": 22},
        labels={"persona": "Skeptic"}, scope="0.1:", think=False,
    )  # fmt: skip
    reply = await run.asks()
    (request,) = run.model.requests
    assert (request.model, request.think, request.num_ctx, request.options) == ("m", False, 4_096, {"seed": 1})
    assert (request.first_token_timeout, request.idle_timeout, request.max_tokens) == (11, 22, 500)
    assert request.messages == [{"role": "system", "content": "Be kind."}, QUESTION]
    assert (reply.content, reply.thinking, reply.tool_calls) == ("I look.", "hm", [call])
    assert (reply.prompt_tokens, reply.completion_tokens, reply.model, reply.finish_reason) == (
        100, 5, "served:1b", "stop",
    )  # fmt: skip
    (written,) = run.journal.of(EntryType.MESSAGE)
    assert (written["step"], written["role"], written["scope"], written["persona"]) == (
        0,
        "assistant",
        "0.1:",
        "Skeptic",
    )
    assert written["context"]["window"] == 4_096
    assert (written["context"]["turns"], written["context"]["cut"]) == (0, 0)
    assert [data["text"] for data in run.journal.of(EntryType.THINKING)] == ["hm"]
    assert "".join(data["text"] for data in run.journal.of(EntryType.ANSWER)) == "I look."
    assert {data["persona"] for kind, data in run.journal.entries} == {"Skeptic"}
    assert run.model.closed == 1
    # the one answer has no scope
    plain = Run([TextDelta("Hi."), Finish("length", None, None, "")])
    reply = await plain.asks()
    assert (reply.model, reply.finish_reason) == ("m", "length")
    assert "scope" not in plain.journal.of(EntryType.MESSAGE)[0]
    assert plain.model.requests[0].think


@pytest.mark.parametrize(
    ("counted", "written", "ratio", "taken"),
    [
        # about 1,200 characters: as the server counted them
        (300, 5, 4.0, 305),
        (300, None, 4.0, 300),
        # it did not, or left out what was in its cache
        (None, 5, None, None),
        (100, 5, None, None),
    ],
)
async def test_how_much_of_the_window_was_taken_is_counted_or_estimated(
    counted: int | None, written: int | None, ratio: float | None, taken: int | None
) -> None:
    run = Run([TextDelta("x"), Finish("stop", counted, written, "m")])
    current = [{"role": "user", "content": "q" * 1_190}]
    reply = await run.steps.model(0, current, with_tools=False)
    (entry,) = run.journal.of(EntryType.MESSAGE)
    told = entry["context"]
    assert told["ratio"] == pytest.approx(ratio or 3.0, abs=0.02)
    estimated = run.conversation.fit(current, [], 32_000).tokens
    assert told["tokens"] == (estimated + (written or 0) if taken is None else taken)
    assert reply.context == (told["tokens"], told["window"])
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (counted, written)
    assert (reply.prompt_tokens, reply.completion_tokens) == (counted or 0, written or 0)


async def test_the_demonstration_model_is_planned_with_as_if_it_had_room() -> None:
    for demo, window, most in ((True, 8_192, 8_192), (False, 500, 500)):
        run = Run([TextDelta("x"), DONE], settings={"demo": demo, "num_ctx": 8_192, "max_tokens": 8_192})
        run.model.known = ModelFacts(window=500)
        await run.asks(with_tools=False)
        assert run.journal.of(EntryType.MESSAGE)[0]["context"]["window"] == window
        asked = run.model.requests[0].max_tokens
        assert asked is not None
        assert most - 60 < asked <= most


async def test_steps_are_shown_from_where_the_journal_ends_and_not_of_who_speaks_beside_others() -> None:
    run = Run(transitions_left=1)
    await run.steps.transition("RECEIVE")
    assert run.journal.entries == []
    await run.steps.transition("START_GENERATION")
    assert run.journal.entries == [
        (EntryType.STATE, {"from": "RECEIVING", "action": "START_GENERATION", "to": "GENERATING"})
    ]
    (told,) = run.journal.told
    assert orjson.loads(told.envelope.payload) == {
        "agent": "GeneratorAgent", "replica": "r1", "query_id": "1-0", "from": "RECEIVING",
        "action": "START_GENERATION", "to": "GENERATING",
    }  # fmt: skip
    assert (told.envelope.correlation_id, told.envelope.respondent_id) == ("1-0", "A")
    beside = Run(parallel=True)
    await beside.steps.transition("RECEIVE")
    assert (beside.journal.entries, beside.run.machine.state) == ([], IDLE)


async def test_a_stream_that_is_left_early_is_closed() -> None:
    run = Run([Notice("tools_unsupported"), TextDelta("x"), DONE])
    run.journal.refuses = EntryType.NOTICE
    with pytest.raises(ConnectionError):
        await run.asks()
    assert run.model.closed == 1


async def test_a_smaller_window_that_a_refusal_tells_is_planned_with_and_nothing_is_halved() -> None:
    history = [turn(number) for number in range(8)]
    # the server says how large its window is
    learns = [ModelFacts(window=500), ContextOverflow("too long")]
    run = Run(learns, [TextDelta("x"), DONE], history=history, settings={"num_ctx": 32_768})
    await run.asks(with_tools=False)
    first, second = (len(request.messages) for request in run.model.requests)
    assert second < first
    assert run.conversation.most is None


async def test_tools_are_offered_by_name_and_the_clients_own_take_the_place_of_ours() -> None:
    for allowed, names in (
        (None, ["calculator", "web_search", "mine"]),
        (frozenset({"web_search"}), ["web_search", "mine"]),
        (frozenset[str](), ["mine"]),
    ):
        run = Run([TextDelta("x"), DONE], [TextDelta("x"), DONE], allowed=allowed, functions=[function("mine")])
        await run.asks()
        await run.asks(with_tools=False, step=1)
        offered = [[one["function"]["name"] for one in request.tools] for request in run.model.requests]
        assert offered == [names, []]


async def test_a_recorded_reply_is_not_asked_for_again_and_its_measure_counts() -> None:
    context = {"window": 9, "tokens": 1, "ratio": 2.5, "turns": 0, "cut": 0}
    known = [
        Entry(f"0-{step}", 0, event_of("message", {"step": step, "content": "old", "scope": "0.1:", **more}))
        for step, more in enumerate(({"context": context}, {}))
    ]
    run = Run([TextDelta("new"), DONE], scope="0.1:", before=known)
    reply = await run.asks()
    assert (reply.content, reply.context, reply.ratio) == ("old", (1, 9), 2.5)
    assert (run.model.requests, run.journal.entries, run.conversation.rates.ratio) == ([], [], 2.5)
    await run.asks(step=1)
    assert run.conversation.rates.ratio == 2.5
    assert (await run.asks(step=2)).content == "new"


async def test_text_of_a_call_that_nobody_will_finish_is_taken_back_once() -> None:
    partial = [Entry("0-1", 0, event_of("notice", {})), Entry("0-2", 0, event_of("answer", {"text": "half"}))]
    run = Run([TextDelta("a"), DONE], [TextDelta("b"), DONE], before=partial)
    await run.asks(step=3)
    await run.asks(step=4)
    assert run.journal.of(EntryType.RESTARTED) == [{"step": 3, "discard_after": "0-1"}]


@pytest.mark.parametrize("fault", [StreamInterrupted("cut"), ModelOverloaded("busy"), ModelUnavailable("away")])
async def test_what_broke_off_is_asked_again_and_what_was_seen_of_it_taken_back(
    fault: Exception,
) -> None:
    run = Run(
        [fault], [TextDelta("half"), fault], [ThinkingDelta("hm"), fault], [TextDelta("whole"), DONE],
        labels={"persona": "P"},
    )  # fmt: skip
    if isinstance(fault, StreamInterrupted):
        with pytest.raises(StreamInterrupted):
            await run.asks()
        assert (len(run.model.requests), run.model.pauses) == (3, [0, 0])
        assert len(run.journal.of(EntryType.RESTARTED)) == 2
        return
    assert (await run.asks()).content == "whole"
    assert run.run.waits_for == ""
    # doubled each time
    assert run.model.pauses == pytest.approx([0.25, 0.5, 1.0], rel=0.21)
    (notice,) = run.journal.of(EntryType.NOTICE)
    assert notice == {"code": "model_waiting", "message": f"waiting for the model: {fault}"}
    # nothing was seen of the first try
    assert [kind for kind, _ in run.journal.entries] == [
        EntryType.NOTICE, EntryType.ANSWER, EntryType.RESTARTED, EntryType.THINKING, EntryType.RESTARTED,
        EntryType.ANSWER, EntryType.MESSAGE,
    ]  # fmt: skip
    # each behind what was written before the try
    assert run.journal.of(EntryType.RESTARTED) == [
        {"step": 0, "discard_after": place, "persona": "P"} for place in ("1-1", "1-3")
    ]
    assert run.model.closed == 4


async def test_pauses_grow_to_five_seconds() -> None:
    run = Run(*[[ModelOverloaded("busy")]] * 7, [TextDelta("x"), DONE])
    await run.asks()
    # each up to a fifth shorter or longer, so that replicas do not ask together
    assert run.model.pauses == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0], rel=0.21)


async def test_a_call_that_gave_way_to_others_is_made_again() -> None:
    run = Run([Preempted("others wait")], [TextDelta("x"), DONE], settings={"yield_seconds": 30})
    await run.asks()
    first, second = (request.patience for request in run.model.requests)
    assert 0 <= second <= first <= 30
    assert first > 0
    for deferral, most in ((5.0, 5.0), (99.0, 30.0), (0.0, 0.0)):
        run = Run([TextDelta("x"), DONE], settings={"yield_seconds": 30}, max_deferral_s=deferral)
        await run.asks()
        patience = run.model.requests[0].patience
        assert patience is not None
        assert max(0.0, most - 1) <= patience <= most


async def test_a_form_is_asked_for_without_tools_alone_and_not_where_the_server_refuses_it() -> None:
    run = Run([TextDelta("x"), DONE], [TextDelta("x"), DONE], [ModelRejected("schema")], [TextDelta("y"), DONE])
    await run.asks(form=FORM)
    await run.asks(with_tools=False, form=FORM, step=1)
    assert (await run.asks(with_tools=False, form=FORM, step=2)).content == "y"
    assert [request.response_schema for request in run.model.requests] == [None, FORM, FORM, None]
    refused = Run([ModelRejected("no such model")])
    with pytest.raises(ModelRejected, match="no such model"):
        await refused.asks()


def turn(number: int) -> list[Any]:
    return [{"role": "user", "content": f"q{number} " * 50}, {"role": "assistant", "content": "a " * 50}]


async def test_refused_images_of_earlier_turns_are_left_out() -> None:
    file = EarlierFile("f1", "a.png", "[left out]", "[unseen]", image={"type": "image/png", "data": b"", "id": "f1"})
    first, *others = turn(0)
    history = [[{**first, "files": [file]}, *others]]
    run = Run([ModelRejected("no images here")], [TextDelta("x"), DONE], history=history)
    await run.asks(with_tools=False)
    sent = [[len(message.get("images", ())) for message in request.messages] for request in run.model.requests]
    assert sent == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert run.model.requests[1].messages[1]["content"].startswith("[unseen]\n\nq0")
    (told,) = run.journal.of(EntryType.CONTEXT_TRUNCATED)
    assert (told["dropped_turns"], told["attachments"]) == (0, [{"id": "f1", "name": "a.png"}])
    # A refusal for another reason fails the question.
    refused = Run([ModelRejected("no images here")], [ModelRejected("no such model")], history=history)
    with pytest.raises(ModelRejected, match="no such model"):
        await refused.asks()


async def test_a_history_that_does_not_fit_is_halved_until_it_does_and_clients_are_told() -> None:
    history = [turn(number) for number in range(8)]
    too_long = ContextOverflow("the prompt is too long")
    seen = [TextDelta("half"), too_long]
    run = Run(seen, [too_long], [TextDelta("x"), DONE], history=history, settings={"num_ctx": 32_768})
    await run.asks(with_tools=False)
    sent = [(len(request.messages) - 2) // 2 for request in run.model.requests]
    assert sent == [8, 4, 2]
    # what was seen of a try before it was refused is taken back
    assert run.journal.of(EntryType.RESTARTED) == [{"step": 0, "discard_after": "1-0"}]
    told = run.journal.of(EntryType.CONTEXT_TRUNCATED)
    assert [(data["dropped_turns"], data["kept_turns"], data["cut"]) for data in told] == [(4, 4, 4), (6, 2, 6)]
    assert run.conversation.announced == (6, frozenset())
    # as it was measured then
    run.conversation.rates = Rates()
    estimated = run.conversation.fit([QUESTION], [], 32_768).tokens
    assert told[1] == {"dropped_turns": 6, "kept_turns": 2, "prompt_tokens": estimated, "turns": 2, "cut": 6}
    # with nothing left to cut, what to do is said
    alone = Run([too_long], settings={"num_ctx": 8_192})
    with pytest.raises(ContextOverflow, match="the prompt is too long; ask for less at once or raise num_ctx"):
        await alone.asks()
    # a question that no window has room for is not even sent
    large = Run(settings={"num_ctx": 2_048})
    with pytest.raises(ContextOverflow, match=r"about \d+ tokens.* is 2048; ask for less at once or raise num_ctx"):
        await large.steps.model(0, [{"role": "user", "content": "q " * 9_000}], with_tools=False)
    assert large.model.requests == []
    small = Run([too_long])
    small.model.known = ModelFacts(window=1_000)
    with pytest.raises(ContextOverflow, match="start the model server with a larger context"):
        await small.asks(with_tools=False)


async def test_a_refusal_that_tells_the_length_teaches_how_long_a_text_is() -> None:
    history = [turn(number) for number in range(8)]
    run = Run([ContextOverflow("too long", prompt=1_500)], [TextDelta("x"), DONE], history=history)
    await run.asks(with_tools=False)
    first, second = run.model.requests
    # nothing is halved: it was planned with a better measure
    assert run.conversation.most is None
    assert run.conversation.rates.ratio < 2
    assert len(second.messages) <= len(first.messages)


@pytest.mark.parametrize(("window", "most"), [(None, 2_000), (100_000, 2_000), (1_000, 990), (270, 256)])
async def test_no_longer_answer_is_asked_for_than_the_window_has_room_for(window: int | None, most: int) -> None:
    run = Run([TextDelta("x"), DONE], settings={"max_tokens": 2_000})
    run.model.known = ModelFacts(window=window)
    await run.asks(with_tools=False)
    asked = run.model.requests[0].max_tokens
    assert asked is not None
    # less what the prompt takes, but never so little that nothing can be said
    assert most - (60 if window == 1_000 else 0) <= asked <= most


async def test_an_answer_that_went_in_circles_is_told_without_them() -> None:
    text = "It is so. " + "and on " * 400
    run = Run([ThinkingDelta("hm"), TextDelta(text), Finish("loop", 100, 5, "m")], labels={"persona": "P"})
    reply = await run.asks()
    assert (reply.finish_reason, len(reply.content) < 60) == ("loop", True)
    assert reply.content.startswith("It is so.")
    kinds = [kind for kind, _ in run.journal.entries]
    again = kinds.index(EntryType.RESTARTED)
    assert kinds[again : again + 4] == [EntryType.RESTARTED, EntryType.THINKING, EntryType.ANSWER, EntryType.NOTICE]
    restarted, thinking, answer, notice = (data for _, data in run.journal.entries[again : again + 4])
    assert restarted == {"step": 0, "discard_after": "1-0", "persona": "P"}
    assert (thinking["text"], answer["text"], answer["persona"]) == ("hm", reply.content, "P")
    assert notice["code"] == "model_loops"
    # of nothing but circles nothing is left
    bare = Run([TextDelta("x" * 9_000), Finish("loop", 100, 5, "m")])
    assert len((await bare.asks()).content) < 200
    assert len(bare.journal.of(EntryType.THINKING)) == 0


async def test_silence_is_a_reply_too() -> None:
    run = Run([EmptyAnswer("nothing")])
    reply = await run.asks()
    assert (reply.content, reply.tool_calls, reply.finish_reason) == ("", [], "stop")
    (written,) = run.journal.of(EntryType.MESSAGE)
    assert (written["prompt_tokens"], written["completion_tokens"], written["model"]) == (None, None, "m")


@pytest.mark.parametrize("failure", [EmptyAnswer("nothing"), ModelError("out of length"), StreamInterrupted("gone")])
async def test_what_was_said_before_the_model_failed_is_in_the_journal(failure: ModelError) -> None:
    run = Run([ThinkingDelta("one "), ThinkingDelta("two "), ThinkingDelta("three"), failure], [failure], [failure])
    with contextlib.suppress(ModelError):
        await run.asks()
    assert "".join(data["text"] for data in run.journal.of(EntryType.THINKING)) == "one two three"


async def test_calls_beyond_the_most_are_refused_and_not_lost() -> None:
    calls = [ToolCall(f"c{n}", "calculator", {"n": n}) for n in range(4)]
    run = Run([*calls, DONE], settings={"max_calls": 2})
    reply = await run.asks()
    assert [call.error for call in reply.tool_calls] == [
        None,
        None,
        *["only the first 2 tool calls of a message are run"] * 2,
    ]


async def test_what_a_model_cannot_do_is_said_in_the_first_answer_of_a_conversation() -> None:
    for history, told in (([], 1), ([turn(1)], 0)):
        run = Run(*[[Notice("tools_unsupported"), TextDelta("x"), DONE]] * 2, history=history)
        await run.asks()
        await run.asks(step=1)
        assert len(run.journal.of(EntryType.NOTICE)) == told
        # The committee looks memories up for such a model, also when the notice is hidden.
        assert run.run.has_notice("tools_unsupported")
        assert not run.run.has_notice("thinking_unsupported")


async def test_the_first_words_are_measured_once_and_not_of_an_answer_taken_over() -> None:
    for attempt, count in ((1, 1), (2, 0)):
        facts: dict[str, Any] = {}
        run = Run([TextDelta("a"), TextDelta("b"), DONE], [TextDelta("c"), DONE], facts=facts, deliveries=attempt)
        await run.asks()
        await run.asks(step=1)
        assert facts.get("first_words", {"count": 0})["count"] == count


@pytest.mark.parametrize(("age_ms", "seconds"), [(2_500, 2.5), (-60_000, 0.0)])
async def test_seconds_until_the_first_words_are_added_up_and_measured(age_ms: int, seconds: float) -> None:
    meter = metrics.start("generator")
    try:
        facts: dict[str, Any] = {}
        for said in (ThinkingDelta("hm"), TextDelta("a")):
            await Run([said, DONE], facts=facts, query_id=f"{now_ms() - age_ms}-0").asks()
        text = meter.text().decode()
    finally:
        metrics.stop()
    assert facts["first_words"]["count"] == 2
    assert facts["first_words"]["seconds"] == pytest.approx(2 * seconds, abs=0.5)
    total = re.search(r"local2_\w*first_token\w*_sum (\S+)", text)
    assert total is not None
    assert float(total[1]) == pytest.approx(2 * seconds, abs=0.5)


async def test_calls_are_written_before_they_are_made_with_a_token_of_their_own() -> None:
    done = ToolCallRecord(tool="f", args={}, result="before", call_id="1-0:A:0.1:3:2")
    before = [
        Entry("0-1", 0, event_of("tool.request", {"call_id": "1-0:A:0.1:3:1"}), "known"),
        Entry("0-2", 0, event_of("tool.result", done.model_dump())),
    ]
    run = Run(
        scope="0.1:", labels={"persona": "P"}, settings={"tool_timeout": 20}, arguments={"calculator": {"y": 2}},
        before=before,
    )  # fmt: skip
    calls = [ToolCall("c", "calculator", {"x": 1}), ToolCall("c", "calculator", {"y": 1}), ToolCall("c", "mine", {})]
    found = await run.steps.tools(3, list(enumerate(calls)))
    assert found[2] == done
    requests = run.journal.of(EntryType.TOOL_REQUEST)
    assert [(data["call_id"], data["tool"], data["args"], data["step"], data["persona"]) for data in requests] == [
        ("1-0:A:0.1:3:0", "calculator", {"x": 1, "y": 2}, 3, "P"), ("1-0:A:0.1:3:2", "mine", {}, 3, "P"),
    ]  # fmt: skip
    first, second = run.tools.asked
    assert first["token"] == run.journal.tokens[0] != run.journal.tokens[1]
    assert (second["token"], second["args"]) == ("known", {"y": 1})
    # who takes an answer over asks for it again, when the tool's worker is back
    assert run.tools.awaited == [("calculator", {"y": 1}, 20)]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert (first["timeout"], first["grace"], first["caller"]) == (30, 1.5, run.run.caller)
    (one, two) = run.journal.of(EntryType.TOOL_RESULT)
    assert (one["call_id"], one["result"], one["data"], one["duration_ms"]) == ("1-0:A:0.1:3:0", "r", {"n": 1}, 7)
    assert (one["tool"], one["args"], one["persona"], two["persona"]) == ("canonical", {"x": 1, "y": 2}, "P", "P")


async def test_a_tool_that_is_not_offered_is_not_asked_and_what_broke_off_is_not_recorded() -> None:
    run = Run(allowed=frozenset({"calculator"}))
    found = await run.steps.tools(
        0, [(0, ToolCall("c", "web_search", {})), (1, ToolCall("c", "calculator", {"error": "e"}))]
    )
    assert [(one.result, one.error) for one in found] == [
        ("[unknown tool: 'web_search']", "unknown tool: 'web_search'"), ("r", "e"),
    ]  # fmt: skip
    assert [one["name"] for one in run.tools.asked] == ["calculator"]
    assert len(run.journal.of(EntryType.TOOL_RESULT)) == 2
    broken = Run()
    with pytest.raises(StreamInterrupted):
        await broken.steps.tools(0, [(0, ToolCall("c", "calculator", {"breaks": True}))])
    assert broken.journal.of(EntryType.TOOL_RESULT) == []
