"""Continuing from a journal: wherever the first owner died, the next one comes to the same messages and answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.entries import event_of
from support.response_runs import deps_of, run_of

from services.generator.context import Conversation
from services.generator.loop import Answer, run_agent
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
from shared.records.response_state import ResponseState, replay

QUESTION = {"role": "user", "content": "What is new?"}


def state_of(entries: Sequence[JournalEntry]) -> ResponseState:
    return replay(entry.typed() for entry in entries)


class MemoryWriter:
    """A journal in memory, written by one owner after the other."""

    def __init__(self, before: Sequence[JournalEntry], epoch: int) -> None:
        self.entries = list(before)
        self._epoch = epoch
        self._number = 0

    @property
    def state(self) -> ResponseState:
        return state_of(self.entries)

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
    transitions = sum(entry.type is EntryType.STATE for entry in writer.entries)
    await writer.append(event_of(EntryType.CLAIMED, {}))
    context = NoBus()
    deps = deps_of(context, model=model, tools=tools)
    run = run_of(deps, writer, Caller("1-0"), transitions_left=transitions)
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
            assert again.state.answer == answer.text
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
