"""Valid runs of a response for Hypothesis: owners write a journal one after the other, and die at any entry."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from hypothesis import strategies as st
from support.entries import whole

from shared.records.events import ModelMessage, PersonaDone, Speaker, Transition
from shared.records.journal import EntryType, JournalEntry
from shared.records.response_state import EMPTY, ResponseState, apply

Writing = Iterator[None]


@dataclass(frozen=True)
class Step:
    """One message of the model, in pieces, and the number of its tool calls."""

    thinking: Sequence[str]
    answer: Sequence[str]
    calls: int = 0


@dataclass(frozen=True)
class Plan:
    """The steps of a response, in order, for any replica.

    members: the steps of the members of a committee, which run at once.
    """

    members: Sequence[Sequence[Step]]
    steps: Sequence[Step]
    end: EntryType


@dataclass(frozen=True)
class Life:
    """The life of one owner. entries: how many it writes before it dies; None: all. seed: of its broken model calls
    and of the order in which members speak."""

    entries: int | None
    seed: int


class _Died(Exception):
    pass


@dataclass
class _Owner:
    plan: Plan
    life: Life
    epoch: int
    journal: list[JournalEntry]
    state: ResponseState
    number: int = 0
    unsettled: dict[Speaker, str] = field(default_factory=dict)

    def run(self) -> None:
        self.chance = random.Random(self.life.seed)
        self.unsettled = self.state.unsettled
        try:
            self._write(EntryType.CLAIMED, {})
            self._transition(0, "RECEIVE")
            self._together([self._member(f"M{n}", steps) for n, steps in enumerate(self.plan.members)])
            for _ in self._speak({}, self.plan.steps):
                pass
            self._transition(1, "PUBLISH")
            self._write(self.plan.end, {"answer": self.state.answer, "thinking": self.state.thinking})
        except _Died:
            pass

    def _write(self, kind: EntryType, data: dict[str, Any]) -> None:
        if self.number == self.life.entries:
            raise _Died
        self.number += 1
        known = {} if kind is EntryType.FAILED else data
        entry = JournalEntry(f"{self.epoch}-{self.number}", kind, 0, orjson.dumps(whole(kind, known)))
        self.journal.append(entry)
        self.state = apply(self.state, entry.typed())

    def _transition(self, number: int, action: str) -> None:
        if sum(1 for _ in self.state.events(Transition)) <= number:
            self._write(EntryType.STATE, {"action": action})

    def _together(self, members: list[Writing]) -> None:
        while members:
            member = self.chance.choice(members)
            if next(member, self) is self:
                members.remove(member)

    def _member(self, persona: str, steps: Sequence[Step]) -> Writing:
        labels = {"persona": persona, "round": 1}
        yield from self._speak(labels, steps)
        if persona not in {done.persona for done in self.state.events(PersonaDone)}:
            self._write(EntryType.PERSONA_DONE, labels)

    def _speak(self, labels: dict[str, Any], steps: Sequence[Step]) -> Writing:
        scope = labels.get("persona", "")
        for number, step in enumerate(steps):
            if (scope, number) not in {(one.scope, one.step) for one in self.state.events(ModelMessage)}:
                yield from self._message(labels, number, step)
            for place in range(step.calls):
                yield from self._call(labels, f"{scope}:{number}:{place}")

    def _message(self, labels: dict[str, Any], number: int, step: Step) -> Writing:
        speaker = (labels["persona"], 1) if labels else None
        if (before := self.unsettled.pop(speaker, None)) is not None:
            self._write(EntryType.RESTARTED, {"discard_after": before, **labels})
            yield
        pieces = [(EntryType.THINKING, text) for text in step.thinking]
        pieces += [(EntryType.ANSWER, text) for text in step.answer]
        while pieces and self.chance.random() < 0.2:
            # the model call breaks off
            before = self.state.last
            for kind, text in pieces[: self.chance.randint(1, len(pieces))]:
                self._write(kind, {"text": text, **labels})
                yield
            self._write(EntryType.RESTARTED, {"discard_after": before, **labels})
            yield
        for kind, text in pieces:
            self._write(kind, {"text": text, **labels})
            yield
        calls = [{"id": str(place), "name": "probe", "args": {}} for place in range(step.calls)]
        self._write(EntryType.MESSAGE, {"step": number, "tool_calls": calls, "scope": labels.get("persona", ""),
                                        "prompt_tokens": 3, "completion_tokens": 1, **labels})  # fmt: skip
        yield

    def _call(self, labels: dict[str, Any], call_id: str) -> Writing:
        known = {call.latest.call_id: call for call in self.state.calls}
        if call_id not in known:
            self._write(EntryType.TOOL_REQUEST, {"call_id": call_id, **labels})
            yield
        if call_id not in known or known[call_id].answered is None:
            self._write(EntryType.TOOL_RESULT, {"call_id": call_id, "result": f"of {call_id}", **labels})
            yield


def journal_of(plan: Plan, lives: Sequence[Life]) -> list[JournalEntry]:
    """The journal that owners write one after the other, each from what the journal has."""
    journal: list[JournalEntry] = []
    for epoch, life in enumerate(lives, 1):
        state = EMPTY
        for entry in journal:
            state = apply(state, entry.typed())
        _Owner(plan, life, epoch, journal, state).run()
    return journal


_pieces = st.lists(st.sampled_from(["a", "b ", "ab", "\n", "é"]), max_size=3)
_last = st.builds(Step, _pieces, _pieces)
_steps = st.builds(
    lambda first, last: [*first, last],
    st.lists(st.builds(Step, _pieces, _pieces, st.integers(1, 2)), max_size=2),
    _last,
)
plans = st.builds(Plan, st.lists(_steps, max_size=2), _steps, st.sampled_from([EntryType.COMPLETED, EntryType.FAILED]))
# Owners that die, and one that does not.
lives = st.builds(
    lambda died, last: [*died, Life(None, last)],
    st.lists(st.builds(Life, st.integers(0, 25), st.integers(0, 99)), max_size=3),
    st.integers(0, 99),
)
# The life of an owner whose model calls never break off.
UNDISTURBED = [Life(None, 3)]
