"""Wherever owners of a response die: its journal leads to the same state, and clients show the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from support.runs import UNDISTURBED, Life, Plan, Step, journal_of, lives, plans

from shared.records.compaction import compacted
from shared.records.events import Claimed, EntryType, ModelMessage, Noticed, Restarted, shown
from shared.records.journal import JournalEntry
from shared.records.response_state import Call, ResponseState, Text, replay


def state_of(journal: Sequence[JournalEntry]) -> ResponseState:
    return replay(entry.typed() for entry in journal)


def essence(state: ResponseState) -> dict[Any, list[Any]]:
    """By speaker all parts in their order, without ids, claims and restarts."""
    found: dict[Any, list[Any]] = {}
    for part in state.parts:
        match part:
            case Text():
                found.setdefault(part.speaker, []).append((part.kind, part.text, part.said))
            case Call():
                found.setdefault(part.speaker, []).append((part.asked, part.answered))
            case _ if not isinstance(part.event, Claimed | Restarted):
                found.setdefault(part.event.speaker, []).append(part.event)
    return found


def order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(number) for number in entry_id.split("-"))


def shown_by_client(journal: Sequence[JournalEntry]) -> str:
    """The answer of a client that follows the events as the API describes them."""
    pieces: list[tuple[str, str]] = []
    for entry in journal:
        data = entry.value()
        if "persona" in data:
            continue
        match entry.type:
            case "answer":
                pieces.append((entry.id, data["text"]))
            case "restarted":
                pieces = [piece for piece in pieces if order(piece[0]) <= order(data["discard_after"])]
            case "message" if data["tool_calls"]:
                pieces = []
    return "".join(text for _, text in pieces)


@settings(max_examples=150)
@given(plan=plans, owners=lives)
def test_takeovers_at_any_entry_lead_to_the_same_state(plan: Plan, owners: list[Life]) -> None:
    undisturbed, found = state_of(journal_of(plan, UNDISTURBED)), state_of(journal_of(plan, owners))
    assert essence(found) == essence(undisturbed)
    assert (found.answer, found.thinking, found.spent) == (undisturbed.answer, undisturbed.thinking, undisturbed.spent)
    assert found.unsettled == {}
    assert found.end is not None


@settings(max_examples=100)
@given(plan=plans, owners=lives)
def test_client_shows_the_answer_of_the_state_after_every_entry(plan: Plan, owners: list[Life]) -> None:
    journal = journal_of(plan, owners)
    for count in range(len(journal) + 1):
        assert shown_by_client(journal[:count]) == state_of(journal[:count]).answer


@settings(max_examples=100)
@given(plan=plans, owners=lives)
def test_record_of_a_response_keeps_no_void_text(plan: Plan, owners: list[Life]) -> None:
    def record(journal: list[JournalEntry]) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for _, kind, data in compacted(state_of(journal)):
            if kind not in ("claimed", "restarted"):
                found.setdefault((data.get("persona"), data.get("round")), []).append((kind, data))
        return found

    assert record(journal_of(plan, owners)) == record(journal_of(plan, UNDISTURBED))


def test_runs_of_the_strategy_have_every_part() -> None:
    """A plan without its parts would prove nothing."""
    state = state_of(journal_of(_rich(), [Life(9, 1), Life(14, 2), Life(None, 5)]))
    kinds = {type(part) for part in state.parts}
    assert {Text, Call} < kinds
    assert len(list(state.events(Claimed))) == 3
    assert list(state.events(Restarted))
    assert [shown(one)["step"] for one in state.events(ModelMessage) if one.speaker is None] == [0, 1]
    assert list(state.events(Noticed)) == []


def _rich() -> Plan:
    calling, last = Step(["hm "], ["one ", "two"], 2), Step(["so "], ["it ", "is"])
    return Plan([[calling, last], [last]], [calling, last], EntryType.COMPLETED)
