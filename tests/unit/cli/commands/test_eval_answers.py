"""Files of questions, and what is counted of the verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.commands.eval_answers import ALL, Outcome, Question, Verdict, load, tallies
from shared.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no questions; one line of it is"),
        ("\n \n", "has no questions"),
        ('{"question": "q"}\n{"question": " "}', "line 2: question"),
        ('{"question": "q", "answer": "a"}', "line 1: answer"),
        ("{", "line 1: Invalid JSON"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        load(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"questions\.jsonl cannot be read"):
        load(path)


def verdict(outcome: Outcome, kind: str = "") -> Verdict:
    return Verdict(Question(question="q", kind=kind), outcome, "")


def test_outcomes_are_counted_by_kind_and_ties_and_failures_decide_nothing() -> None:
    found = [verdict("won", "facts"), verdict("lost", "facts"), verdict("tied", "code"), verdict("failed", "code")]
    found += [verdict("won")] * 8
    rows = {kind: tally.row() for kind, tally in tallies(found).items()}
    assert list(rows) == ["facts", "code", ALL]
    assert {name: rows["code"][name] for name in ("questions", "tied", "failed", "share", "low")} == {
        "questions": 2, "tied": 1, "failed": 1, "share": None, "low": None,
    }  # fmt: skip
    assert rows["facts"]["share"] == 0.5
    everything = rows[ALL]
    assert (everything["questions"], everything["won"], everything["lost"]) == (12, 9, 1)
    # Wilson's interval of 9 of 10
    assert (everything["share"], round(everything["low"], 3), round(everything["high"], 3)) == (0.9, 0.596, 0.982)
