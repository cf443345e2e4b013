"""Versions of an answer: which turn stands behind which, what leaves with one, and where a conversation ends."""

from __future__ import annotations

import pytest

from services.gateway.versions import in_its_place, parents, tip_of
from shared.records.sessions import Turn, before, shown
from shared.records.summaries import Summary


def turn(n: int, after: int | None = None) -> Turn:
    return Turn(f"{n}-0", f"q{n}", f"a{n}", n, after=None if after is None else f"{after}-5")


def numbers(turns: list[Turn]) -> list[int]:
    return [turn.time for turn in turns]


# 1 ─ 2 ─ 3          and behind 1 also 4 ─ 5, a version of 2, and 6 once more behind 2, beside 3
TREE = [turn(1), turn(2), turn(3), turn(4, after=1), turn(5), turn(6, after=2)]


def test_each_turn_knows_the_one_before_it() -> None:
    assert parents(TREE) == {"1-0": "", "2-0": "1-0", "3-0": "2-0", "4-0": "1-0", "5-0": "4-0", "6-0": "2-0"}
    # what a turn stood behind has left: the one before that takes its place
    assert parents([turn(1), turn(4, after=2)])["4-0"] == "1-0"
    assert parents([turn(3, after=2)])["3-0"] == ""


@pytest.mark.parametrize(
    ("after", "expected"),
    [(None, [1, 2, 6]), ("5-0", [1, 4, 5]), ("3-0", [1, 2, 3]), ("2-0", [1, 2]), ("0-9", []), ("4-3", [1, 4])],
)
def test_a_conversation_is_each_turn_with_the_one_before_it(after: str | None, expected: list[int]) -> None:
    assert numbers(shown(TREE, after)) == expected


def test_a_question_takes_its_versions_and_what_came_after_them_along() -> None:
    assert in_its_place(TREE, "4-0") == ["2-0", "3-0", "4-0", "5-0", "6-0"]
    assert in_its_place(TREE, "6-0") == ["3-0", "6-0"]
    assert in_its_place(TREE, "1-0") == [one.query_id for one in TREE]
    assert in_its_place(TREE, "9-0") == []


def test_the_conversation_that_was_continued_last_is_shown_of_a_version() -> None:
    assert [tip_of(TREE, f"{n}-0") for n in (1, 2, 3, 4)] == ["6-0", "6-0", "3-0", "5-0"]
    assert tip_of(TREE, "9-0") is None


def test_before_a_query_is_no_other() -> None:
    assert (before("5-3"), before("5-0"), before("0-0")) == ("5-2", "4-9999999999", "0-9999999999")


@pytest.mark.parametrize(("until", "told"), [(1, True), (2, False), (3, False), (4, True), (5, True)])
def test_a_summary_of_a_version_tells_nothing_of_another(until: int, told: bool) -> None:
    summary = Summary(f"{until}-0", 1, "What was said.")
    assert summary.tells_of(shown(TREE, "5-0")) is told
    # a question that stands behind the fourth turn, and has no turn yet
    assert summary.tells_of(shown(TREE, "4-0"), "4-0") is (until in (1, 4))
