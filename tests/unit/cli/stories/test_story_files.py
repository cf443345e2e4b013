"""Story files: the shipped ones are whole, and a wrong one is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from local2_stories.story import StoryError, parse_story, select_stories, shipped_stories

GOOD = """
id: X1
title: A story
vars: {city: Paris}
turns:
  - query: Where is ${city}?
    expected_content: ["$", "${city}"]
"""


def test_every_shipped_story_is_valid_and_has_its_file_name_as_its_id() -> None:
    stories = select_stories([], {})
    assert [story.id for story in stories] == list(shipped_stories())
    assert {"S1", "S2", "S3", "S4", "S5", "S6", "S6b", "S7", "S9", "S10", "S11"} == {story.id for story in stories}
    assert [story.id for story in stories if not story.requires] == ["S1", "S2", "S3", "S4"]


def test_variables_are_filled_in_and_a_lone_dollar_stays() -> None:
    story = parse_story(GOOD, "x.yaml", {})
    assert story.turns[0].query == "Where is Paris?"
    assert story.turns[0].expected_content == ["$", "Paris"]
    assert parse_story(GOOD, "x.yaml", {"city": "Rome"}).turns[0].query == "Where is Rome?"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("title:", "titel:", "titel: Extra inputs are not permitted"),
        ("expected_content:", "expect_content:", "turns.0.expect_content: Extra inputs are not permitted"),
        ("query: Where", "query: Where\n    response_generation_checks: [is_nice] #", "response_generation_checks"),
        ("query: Where", "query: Where\n    expected_bus_events: {before: [a]} #", "expected_bus_events.before"),
        ("query: Where", "query: Where\n    critique: {score: 4} #", "critique.score"),
        ("query: Where", "query: Where\n    pairwise: {winner: [C]} #", "pairwise.winner"),
        ("query: Where", "query: Where\n    session: same #", "session must be new"),
        ('["$", "${city}"]', "[{all_of: [a]}]", "expected_content"),
        ('["$", "${city}"]', "['']", "expected_content"),
        ("${city}?", "${town}?", "the variable town has no value"),
        ("title: A story", "title: A story\ntitle: Another", "stands twice"),
        ("id: X1", "id: [", "not valid YAML"),
        ("turns:", "turns: []\nvars2:", "turns"),
    ],
)
def test_what_is_not_known_in_a_file_is_an_error_that_names_it(old: str, new: str, reason: str) -> None:
    assert old in GOOD
    with pytest.raises(StoryError) as caught:
        parse_story(GOOD.replace(old, new, 1), "x.yaml", {})
    assert str(caught.value).startswith("x.yaml: ")
    assert reason in str(caught.value)


def test_stories_are_chosen_by_id_in_any_case_or_by_path(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert [story.id for story in select_stories(["s6B", str(path)], {})] == ["S6b", "X1"]


def test_an_unknown_story_or_variable_is_an_error() -> None:
    with pytest.raises(StoryError, match="there is no story S99; there are: S1, S2"):
        select_stories(["S99"], {})
    with pytest.raises(StoryError, match="no story chosen has the variable page"):
        select_stories(["S4"], {"page": "x"})
    with pytest.raises(StoryError, match="cannot be read"):
        select_stories(["no-such-file.yaml"], {})
