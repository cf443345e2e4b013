"""Continuing from a journal: wherever the first owner died, the next one comes to the same messages and answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from support.entries import event_of
from support.response_runs import deps_of, run_of

from services.generator.context import Conversation
from services.generator.loop import Answer, run_agent
from services.generator.recall import partial_text, recall
from services.generator.settings import GeneratorSettings
from services.generator.steps import JournalSteps
from shared.contracts import ToolResultMessage
from shared.llm.port import (
    ChatRequest,
    Delta,
    Finish,
    ModelFacts,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)
from shared.participant.tool_client import Caller
from shared.records.events import KnownEvent, encode
from shared.records.journal import EntryType, Events, JournalEntry, Sent

QUESTION = {"role": "user", "content": "What is new?"}


class MemoryWriter:
    """A journal in memory, written by one owner after the other."""

    def __init__(self, before: Sequence[JournalEntry], epoch: int) -> None:
        self.entries = list(before)
        self._epoch = epoch
        self._number = 0

    @property
    def position(self) -> str:
        return f"{self._epoch}-{self._number}"

    async def append(self, event: KnownEvent, messages: Sequence[Any] = (), *, token: str = "") -> str:
        self._number += 1
        kind, data = encode(event)
        self.entries.append(JournalEntry(self.position, kind, 0, data, token=token))
        await asyncio.sleep(0)
        return self.position

    async def append_all(self, events: Events, tokens: Sequence[str] | None = None) -> None:
        for event, token in zip(events, tokens or [""] * len(events), strict=True):
            await self.append(event, token=token)

    def send(self, events: Events) -> Sent:
        return Sent(events, [], asyncio.ensure_future(self._sent(events)))

    async def _sent(self, events: Events) -> list[bytes]:
        await self.append_all(events)
        return [b"1-1"] * len(events)

    async def confirm(self, sent: Sent) -> None:
        await sent.replies


class ScriptedModel:
    """Answers by how many messages it is sent, so that the same messages get the same answer."""

    def __init__(self, script: Sequence[Sequence[Delta]], interrupt: int | None = None) -> None:
        self._script = script
        self._interrupt = interrupt
        self.requests: list[tuple[list[Any], bool]] = []

    async def facts(self, _model: str) -> ModelFacts:
        return ModelFacts()

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append((list(request.messages), bool(request.tools)))
        step = sum(message["role"] == "assistant" for message in request.messages)
        for number, delta in enumerate(self._script[step]):
            if self._interrupt == number:
                self._interrupt = None
                raise StreamInterrupted("cut")
            yield delta
        yield Finish("stop", 100, 5, "m")


class CountingTools:
    def __init__(self) -> None:
        self.called: dict[str, str] = {}

    async def schemas(self) -> dict[str, dict[str, Any]]:
        function = {"name": "f", "description": "d", "parameters": {}}
        return {"f": {"type": "function", "function": function}}

    async def patience(self, _name: str, _args: dict[str, Any], _limit: float | None, usual: float) -> float:
        return usual

    async def back(self, _name: str, _args: dict[str, Any], _seconds: float) -> None:
        """Its worker is there."""

    async def call(self, name: str, args: dict[str, Any], *, call_id: str, token: str, **_: Any) -> ToolResultMessage:
        assert call_id not in self.called
        self.called[call_id] = token
        return ToolResultMessage(
            query_id="1-0", call_id=call_id, tool=name, result=f"result of {call_id}", duration_ms=1
        )


class NoBus:
    """`agent.transition` is the bus's business."""

    replica = "r1"

    def __init__(self) -> None:
        self.settings = GeneratorSettings()
        self.bus = self
        self.facts: dict[str, Any] = {}

    async def publish(self, *_messages: Any) -> None:
        pass


async def play(model: ScriptedModel, tools: CountingTools, writer: MemoryWriter) -> Answer:
    """The whole life of a query, as a generator lives it."""
    found = recall(writer.entries)
    await writer.append(event_of(EntryType.CLAIMED, {}))
    context = NoBus()
    deps = deps_of(context, model=model, tools=tools)
    run = run_of(deps, writer, Caller("1-0"), replay=found)
    await run.transition("RECEIVE")
    await run.transition("START_GENERATION")
    steps = JournalSteps(run, Conversation([{"role": "system", "content": "s"}], []), "m", {}, None)
    answer = await run_agent(steps, QUESTION, context.settings.max_tool_iterations)
    await run.transition("PUBLISH")
    return answer


def words(text: str, thinking: str) -> list[Delta]:
    deltas: list[Delta] = [ThinkingDelta(one + " ") for one in thinking.split()]
    return deltas + [TextDelta(one + " ") for one in text.split()]


def asking(step: int, calls: Sequence[int]) -> list[Delta]:
    """A message that thinks, says something and calls tools; equal numbers are equal calls."""
    message = words(f"step {step}", f"thought {step}")
    return message + [ToolCall(f"c{step}.{n}", "f", {"n": f"{step}:{one}"}) for n, one in enumerate(calls)]


scripts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5).map(
    lambda rounds: (
        [asking(step, calls) for step, calls in enumerate(rounds)] + [words("the final answer", "last thought")]
    )
)


def shown_text(entries: Sequence[JournalEntry]) -> str:
    """The answer as a client shows it: it drops what `restarted` voids, and text that led to a tool call."""
    pieces: list[tuple[tuple[int, ...], str]] = []
    for entry in entries:
        place = tuple(int(part) for part in entry.id.split("-"))
        if entry.type is EntryType.ANSWER:
            pieces.append((place, entry.value()["text"]))
        elif entry.type is EntryType.RESTARTED:
            valid = tuple(int(part) for part in entry.value()["discard_after"].split("-"))
            pieces = [piece for piece in pieces if piece[0] <= valid]
        elif entry.type is EntryType.MESSAGE and entry.value()["tool_calls"]:
            pieces = []
    return "".join(text for _, text in pieces)


@settings(max_examples=60, deadline=None)
@given(script=scripts, data=st.data())
def test_any_beginning_of_a_journal_leads_to_the_same_messages_and_answer(
    script: list[list[Delta]], data: st.DataObject
) -> None:
    async def check() -> None:
        whole, model, tools = MemoryWriter([], 1), ScriptedModel(script), CountingTools()
        answer = await play(model, tools, whole)
        cuts = data.draw(st.lists(st.integers(0, len(whole.entries)), min_size=1, max_size=3).map(sorted))
        written = whole.entries
        for epoch, cut in enumerate(cuts, 2):
            before = written[:cut] if epoch == 2 else written[: max(cut, 1)]
            again, more, retools = MemoryWriter(before, epoch), ScriptedModel(script), CountingTools()
            assert await play(more, retools, again) == answer
            # finished calls are not made again; the others get exactly what they got before
            finished = sum(entry.type is EntryType.MESSAGE for entry in before)
            assert more.requests == model.requests[finished:]
            known = {entry.value()["call_id"] for entry in before if entry.type is EntryType.TOOL_RESULT}
            assert set(retools.called) == set(tools.called) - known
            # those that were asked for already are asked for with the same token, and no two calls share one
            tokens = {entry.value()["call_id"]: entry.token for entry in again.entries if entry.token}
            assert retools.called.items() <= tokens.items()
            assert len(set(tokens.values())) == len(tokens) == len(tools.called)
            assert shown_text(again.entries) == answer.text
            assert partial_text(again.entries)[0] == answer.text
            kinds = [entry.type for entry in again.entries]
            assert kinds.count(EntryType.MESSAGE) == len(model.requests)
            requested = [e.value()["call_id"] for e in again.entries if e.type is EntryType.TOOL_REQUEST]
            assert len(requested) == len(set(requested)) == len(tools.called)
            states = [entry.value()["action"] for entry in again.entries if entry.type is EntryType.STATE]
            assert states == [e.value()["action"] for e in whole.entries if e.type is EntryType.STATE]
            written = again.entries

    asyncio.run(check())


@settings(max_examples=40, deadline=None)
@given(interrupt=st.integers(0, 6), cut=st.integers(1, 14))
def test_text_of_a_broken_call_is_void_also_when_the_owner_died_before_saying_so(interrupt: int, cut: int) -> None:
    script = [words("one two three four", "let me see")]

    async def check() -> None:
        first = MemoryWriter([], 1)
        answer = await play(ScriptedModel(script, interrupt), CountingTools(), first)
        assert shown_text(first.entries) == answer.text == "one two three four "
        second = MemoryWriter(first.entries[:cut], 2)
        await play(ScriptedModel(script), CountingTools(), second)
        assert shown_text(second.entries) == answer.text

    asyncio.run(check())


def entry(entry_id: str, kind: EntryType, **data: Any) -> JournalEntry:
    return JournalEntry(entry_id, kind, 0, orjson.dumps(data))


def message(**data: Any) -> dict[str, Any]:
    given_ = {
        "step": 0,
        "role": "assistant",
        "content": "",
        "thinking": "",
        "tool_calls": [],
        "finish_reason": "stop",
        "model": "m",
    }
    return {**given_, "prompt_tokens": 1, "completion_tokens": None, **data}


def test_partial_text_leaves_out_what_is_void_and_what_led_to_a_tool_call() -> None:
    entries = [
        entry("1-1", EntryType.CLAIMED),
        entry("1-2", EntryType.THINKING, text="hm "),
        entry("1-3", EntryType.ANSWER, text="let me look"),
        entry("1-4", EntryType.MESSAGE, **message(tool_calls=[{"id": "c", "name": "f", "args": {}}])),
        entry("1-5", EntryType.ANSWER, text="void"),
        entry("2-1", EntryType.CLAIMED),
        entry("2-2", EntryType.RESTARTED, step=1, discard_after="1-4"),
        entry("2-3", EntryType.THINKING, text="now "),
        entry("2-4", EntryType.ANSWER, text="valid"),
    ]
    assert partial_text(entries) == ("valid", "hm now ")


def test_unsettled_text_begins_after_the_last_entry_before_it() -> None:
    entries = [
        entry("1-1", EntryType.CLAIMED),
        entry("1-2", EntryType.STATE, **{"from": "IDLE", "action": "RECEIVE", "to": "RECEIVING"}),
        entry("1-3", EntryType.THINKING, text="a"),
        entry("1-4", EntryType.ANSWER, text="b"),
        entry("2-1", EntryType.CLAIMED),
    ]
    assert recall(entries).unsettled == {None: "1-2"}
    assert recall([*entries, entry("2-2", EntryType.RESTARTED, step=0, discard_after="1-2")]).unsettled == {}
    assert recall([*entries[:4], entry("1-5", EntryType.MESSAGE, **message())]).unsettled == {}


def test_what_was_spent_is_that_of_all_members_calls_as_far_as_servers_tell() -> None:
    entries = [
        entry("1-1", EntryType.MESSAGE, **message(scope="a.1:", prompt_tokens=30, completion_tokens=2)),
        entry("1-2", EntryType.MESSAGE, **message(scope="a.1:", step=1, prompt_tokens=None, completion_tokens=10)),
        entry("1-3", EntryType.MESSAGE, **message(prompt_tokens=400)),
    ]
    assert recall(entries).spent() == {"prompt_tokens": 430, "completion_tokens": 12}
    assert recall([]).spent() == {"prompt_tokens": 0, "completion_tokens": 0}


def test_the_text_of_members_who_speak_at_once_is_settled_by_their_own_messages() -> None:
    a, b = {"persona": "A", "round": 1}, {"persona": "B", "round": 1}
    entries = [
        entry("1-1", EntryType.CLAIMED),
        entry("1-2", EntryType.ANSWER, text="I", **a),
        entry("1-3", EntryType.ANSWER, text="You", **b),
        entry("1-4", EntryType.ANSWER, text=" am", **a),
        entry("1-5", EntryType.MESSAGE, **message(), **a),
    ]
    assert recall(entries).unsettled == {("B", 1): "1-2"}
    void = entry("2-2", EntryType.RESTARTED, step=0, discard_after="1-2", **b)
    assert recall([*entries, void]).unsettled == {}
    # what a member begins again is not the answer's
    assert partial_text([entry("1-6", EntryType.ANSWER, text="So."), void]) == ("So.", "")


def test_what_stands_after_the_end_is_not_part_of_the_run() -> None:
    entries = [entry("1-1", EntryType.CLAIMED), entry("1-2", EntryType.FAILED, code="x"), entry("9-1", EntryType.STATE)]
    found = recall(entries)
    assert found.terminal is not None
    assert found.terminal.id == "1-2"
    assert found.states == 0
