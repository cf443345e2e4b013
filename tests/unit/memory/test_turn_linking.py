"""Which turn came before each one of a session, of turns that are imported."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.memory.engram import Engram, as_before
from services.memory.turn_linking import overdue


def turn(time: int, name: str = "", **known: str) -> Engram:
    name = name or str(time)
    values = {"id": f"import:{name}", "query": f"q{name}", "answer": f"a{name}", **known}
    return Engram(user_id="u", kind="turn", time=time, recorded=9_999, session_id="s", **values)  # type: ignore[arg-type]


def taken(there: list[Engram], coming: list[Engram]) -> list[Engram]:
    """As an import does it: before the write and after it."""
    due = overdue(there, coming)
    found = {one.id: one for one in [*there, *(replace(one, before=due.get(one.id, one.before)) for one in coming)]}
    late = overdue(found.values())
    return [replace(one, before=late.get(one.id, one.before)) for one in found.values()]


CHAIN = {f"import:{n}": as_before(turn(n - 1)) if n > 1 else "" for n in range(1, 7)}


@given(st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=6), st.permutations(range(1, 7)))
def test_order_parts_and_repeats_of_an_import_do_not_matter(parts: list[list[int]], rest: list[int]) -> None:
    there: list[Engram] = []
    for part in [*parts, rest, *parts]:
        coming = {number: turn(number) for number in part}
        there = taken([one for one in there if one.time not in coming], list(coming.values()))
        assert overdue(there) == {}
    assert {one.id: one.before for one in there} == CHAIN


def test_turns_of_one_time_that_come_together_count_in_their_order() -> None:
    there = taken([], [turn(1, "b"), turn(1, "a"), turn(2, "c")])
    assert [one.before for one in there] == ["", "qb\nab", "qa\naa"]
    # what comes later changes nothing of it
    assert overdue([*there, turn(3, "d", before="qc\nac")]) == {}


def test_what_a_line_says_itself_stands_and_live_turns_are_left_alone() -> None:
    said = turn(2, before="something else")
    live = replace(turn(2, "live"), id="2-0:A")
    undated = replace(turn(9_999, "undated"))
    assert overdue([], [turn(1), said]) == {}
    assert overdue([turn(1), live, undated]) == {}


def test_each_respondent_has_a_conversation_of_its_own() -> None:
    a, b = turn(1, "a", respondent_id="A"), turn(2, "b", respondent_id="B")
    assert overdue([], [a, b]) == {}


def test_notes_are_no_turns() -> None:
    note = replace(turn(1, "note"), kind="note", content="x")
    assert overdue([note], [turn(2)]) == {}
