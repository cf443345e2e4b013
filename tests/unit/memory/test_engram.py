"""Engrams as values: annotations in any order, records that read back, what is tainted."""

from __future__ import annotations

from datetime import datetime
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.memory.engram import Engram, Note, imported_id, merged, of_response, stamp, topic_id
from services.memory.index import entry
from services.memory.ingest import embedded_text
from services.memory.portable import engram_of, exported, read_line
from services.memory.rendering import brief, whole
from shared.contracts import ResponseGeneration, ToolCallRecord

stamps = st.builds(stamp, st.integers(0, 3), st.sampled_from(["a", "b", "c"]))
notes = st.builds(Note, stamps, st.dictionaries(st.sampled_from(["score", "x"]), st.integers(1, 5), max_size=2))
kinds = st.sampled_from(["critique", "pairwise", "reward", "class"])
note_sets = st.dictionaries(kinds, notes, max_size=4)
texts = st.text(max_size=60)
ENGRAM = Engram(id="1-0:A", user_id="u", kind="turn", time=1, recorded=1)


@given(st.lists(st.tuples(kinds, notes), max_size=6), st.randoms())
def test_annotations_in_any_order_and_any_number_give_the_same(found: list[tuple[str, Note]], random: Any) -> None:
    def applied(order: list[tuple[str, Note]]) -> Engram:
        engram = ENGRAM
        for kind, note in order:
            engram = engram.annotated({kind: note})
        return engram

    shuffled = found + random.choices(found, k=3) if found else []
    random.shuffle(shuffled)
    assert applied(found) == applied(shuffled)


@given(note_sets, note_sets, note_sets)
def test_merging_does_not_depend_on_how_it_is_grouped(a: Any, b: Any, c: Any) -> None:
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, b) == merged(b, a)
    assert merged(a, a) == a


def test_of_two_grades_the_later_counts() -> None:
    early, late = Note(stamp(5, "x"), {"score": 5}), Note(stamp(6, "a"), {"score": 2})
    for order in permutations([early, late]):
        engram = ENGRAM
        for note in order:
            engram = engram.annotated({"critique": note})
        assert engram.score == 2


@given(texts, texts, texts, note_sets, st.booleans())
def test_a_record_reads_back_as_it_was_written(query: str, answer: str, before: str, found: Any, tainted: bool) -> None:
    engram = Engram(
        id="7-1:B", user_id="u", kind="turn", time=7, recorded=8, session_id="s", respondent_id="B", query=query,
        answer=answer, before=before, options={"t": 0.5}, tool_calls=({"tool": "x"},), tainted=tainted, notes=found,
    )  # fmt: skip
    assert Engram.from_flat(engram.id, engram.flat()) == engram
    assert all(isinstance(value, str | int | float | bool) for value in engram.flat().values())


@given(texts.filter(str.strip), texts, st.booleans())
def test_an_export_taken_in_again_says_the_same(query: str, answer: str, tainted: bool) -> None:
    note = Note(stamp(3, "m"), {"score": 4, "critique": "good", "rubric": "r"})
    engram = Engram(
        id="7-1:B", user_id="u", kind="turn", time=1_700_000_000_000, recorded=5, respondent_id="B", query=query,
        answer=answer, tainted=tainted, model="m", metadata={"source": "x"}, notes={"critique": note},
    )  # fmt: skip
    again = engram_of(read_line(exported(engram)), "u", 5, engram.id)
    assert again == engram


def compared(respondent: str, verdict: str) -> Engram:
    note = Note(stamp(3, "m"), {"winner": verdict, "reason": "clearer"})
    return Engram(
        id=f"7-1:{respondent}", user_id="u", kind="turn", time=1_700_000_000_000, recorded=5, query="q", answer="a",
        respondent_id=respondent, notes={"pairwise": note},
    )  # fmt: skip


OUTCOMES = [
    ("A", "A", True), ("A", "B", False), ("B", "A", False), ("B", "B", True), ("A", "tie", None), ("B", "tie", None),
]  # fmt: skip


@pytest.mark.parametrize(("respondent", "verdict", "won"), OUTCOMES)
def test_whether_it_won_and_the_verdict_stand_in_every_form(respondent: str, verdict: str, won: bool | None) -> None:
    engram = compared(respondent, verdict)
    line, flat = exported(engram), engram.flat()
    for form in (brief(engram), whole(engram), line["metadata"]):
        assert (form["pairwise_winner"], form["pairwise_verdict"]) == (won, verdict)
    assert (flat.get("pairwise_winner"), flat["pairwise_verdict"]) == (won, verdict)
    assert engram_of(read_line(line), "u", 5, engram.id) == engram


@pytest.mark.parametrize(("respondent", "verdict", "won"), OUTCOMES)
def test_an_engram_of_an_older_release_says_whether_it_won(respondent: str, verdict: str, won: bool | None) -> None:
    engram = compared(respondent, verdict)
    record = {name: value for name, value in engram.flat().items() if not name.startswith("pairwise")}
    line = exported(engram)
    for name in ("pairwise_winner", "pairwise_verdict"):
        del line["metadata"][name]
    older = (
        Engram.from_flat(engram.id, {**record, "winner": verdict}),
        engram_of(read_line(line), "u", 5, engram.id),
    )
    assert [(e.pairwise_winner, e.pairwise_verdict) for e in older] == [(won, verdict)] * 2


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"pairwise_winner": True, "respondent_id": "B"}, (True, "B")),
        ({"pairwise_winner": False, "respondent_id": "B"}, (False, "A")),
        ({"pairwise_winner": None, "pairwise_verdict": "tie", "respondent_id": "A"}, (None, "tie")),
        # the verdict is what counts; of whom it would be true is not known without a respondent
        ({"pairwise_winner": True, "pairwise_verdict": "B", "respondent_id": "A"}, (False, "B")),
        ({"pairwise_winner": True}, (None, None)),
        ({"pairwise_winner": "A", "pairwise_verdict": ["A"], "respondent_id": "A"}, (None, None)),
    ],
)
def test_another_programs_outcome_of_a_comparison_is_understood(
    said: dict[str, Any], found: tuple[bool | None, str | None]
) -> None:
    engram = engram_of(read_line({"query": "q", "answer": "a", "metadata": {**said, "source": "x"}}), "u", 5)
    assert (engram.pairwise_winner, engram.pairwise_verdict) == found
    assert engram.metadata == {"source": "x"}


def made(*calls: ToolCallRecord) -> Engram:
    response = ResponseGeneration(
        query_id="1-0", response_id="1-0:A", session_id="s", user_id="u", respondent_id="A", generator_id="g",
        query="q", answer="a", tool_calls=list(calls), model="m", finish_reason="stop",
    )  # fmt: skip
    return of_response(response, 1)


def call(tool: str, error: str | None = None, data: Any = None) -> ToolCallRecord:
    return ToolCallRecord(tool=tool, args={}, result="r", error=error, call_id="c", data=data)


def test_what_a_stranger_may_have_written_taints_the_answer() -> None:
    assert made(call("web_fetch")).tainted
    assert made(call("some_new_tool")).tainted
    assert not made(call("web_fetch", error="fetch failed: 404")).tainted
    assert not made(call("search_memory", data={"hits": [{"tainted": False}], "log": None})).tainted
    assert made(call("search_memory", data={"hits": [{"tainted": False}], "log": [{"tainted": True}]})).tainted
    assert made(call("search_memory", data={"hits": [{"tainted": True}]})).tainted
    assert not made().tainted


def test_an_answer_from_memory_alone_is_an_echo() -> None:
    assert made(call("search_memory")).echo
    assert not made(call("search_memory"), call("web_search")).echo
    assert not made().echo


def test_ids_made_here_name_one_user_and_one_text() -> None:
    assert topic_id("ann", "user.x") == topic_id("ann", "user.x") != topic_id("bob", "user.x")
    assert imported_id("ann", "s", 1, "q", "a") != imported_id("ann", "s", 1, "qa", "")
    assert imported_id("ann", "s", 1, "q", "a") != imported_id("bob", "s", 1, "q", "a")


# The zone of a user, the moment of a turn (UTC), and the local date that is embedded and indexed with it.
SAID_AT = [
    ("", "2026-11-28T23:30", "28 November 2026"),
    ("Nowhere/Land", "2026-11-28T23:30", "28 November 2026"),
    ("Australia/Sydney", "2026-11-28T23:30", "29 November 2026"),
    ("America/Los_Angeles", "2026-11-28T05:30", "27 November 2026"),
    # the last minute of a day and the first of the next, on days on which the clocks change
    ("Europe/Berlin", "2026-03-28T22:59", "28 March 2026"),
    ("Europe/Berlin", "2026-03-28T23:00", "29 March 2026"),
    ("Europe/Berlin", "2026-03-29T22:00", "30 March 2026"),
    ("Europe/Berlin", "2026-10-25T22:59", "25 October 2026"),
    ("Europe/Berlin", "2026-10-25T23:00", "26 October 2026"),
    ("America/Los_Angeles", "2026-11-02T07:59", "1 November 2026"),
    ("America/Los_Angeles", "2026-11-02T08:00", "2 November 2026"),
    ("Australia/Sydney", "2026-10-04T12:59", "4 October 2026"),
    ("Australia/Sydney", "2026-10-04T13:00", "5 October 2026"),
]


@pytest.mark.parametrize(("zone", "moment", "day"), SAID_AT)
def test_turn_is_dated_in_the_zone_of_its_user(zone: str, moment: str, day: str) -> None:
    at = int(datetime.fromisoformat(f"{moment}+00:00").timestamp() * 1000)
    said = Engram("1-0:A", "ann", "turn", at, at, query="How?", answer="So.", time_zone=zone)
    assert embedded_text(said) == f"How?\n({day})\nSo."
    assert day in entry(said).text
    assert Engram.from_flat(said.id, said.flat()) == said
    assert engram_of(read_line(exported(said)), "ann", 1, "1-0:A").time_zone == zone
