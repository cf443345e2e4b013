"""What a vote says: of its parts, and of the last word."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.votes import Part, Vote, changes
from shared.contracts import UserFeedback


def vote(thumb: str | None, stars: int | None) -> Vote:
    return Vote({"thumb": Part((1, 0), thumb), "stars": Part((2, 0), stars)})


@pytest.mark.parametrize(
    ("thumb", "stars", "reward", "sentiment"),
    [
        ("positive", None, 1.0, "positive"),
        ("negative", None, -1.0, "negative"),
        (None, 5, 1.0, "positive"),
        (None, 4, 0.5, "positive"),
        (None, 3, 0.0, "positive"),
        (None, 2, -0.5, "negative"),
        (None, 1, -1.0, "negative"),
        # stars say more than a thumb; three of them nothing for or against
        ("positive", 1, -1.0, "negative"),
        ("negative", 5, 1.0, "positive"),
        ("negative", 3, 0.0, "negative"),
        ("positive", 3, 0.0, "positive"),
        (None, None, 0.0, None),
    ],
)
def test_what_a_thumb_and_stars_say_together(
    thumb: str | None, stars: int | None, reward: float, sentiment: str | None
) -> None:
    said = vote(thumb, stars)
    assert (said.thumb, said.stars, said.reward, said.sentiment) == (thumb, stars, reward, sentiment)
    assert said.withdrawn is (thumb is None and stars is None)


def test_a_part_that_was_never_given_says_nothing() -> None:
    assert (Vote({}).thumb, Vote({}).stars, Vote({}).withdrawn, Vote({}).comment) == (None, None, True, None)
    assert Vote({"thumb": Part((1, 0), "negative")}).sentiment == "negative"


@pytest.mark.parametrize(
    ("thumb", "stars", "comment"),
    [
        (Part((1, 0), "positive", "early"), Part((2, 0), 5, "late"), "late"),
        (Part((2, 1), "positive", "late"), Part((2, 0), 5, "early"), "late"),
        (Part((1, 0), "positive", "early"), Part((2, 0), 5), "early"),
        # with its part the comment is withdrawn
        (Part((1, 0), "positive", "early"), Part((2, 0), None, "late"), "early"),
        (Part((1, 0)), Part((2, 0), 5), None),
        (Part((1, 0), "positive", "early"), Part((2, 0), 5, ""), ""),
    ],
)
def test_the_last_comment_of_a_part_that_counts_is_told(thumb: Part, stars: Part, comment: str | None) -> None:
    assert Vote({"thumb": thumb, "stars": stars}).comment == comment


def test_a_vote_reads_back_as_it_was_written() -> None:
    said = Vote({"thumb": Part((7, 1), "negative", "no"), "stars": Part((8, 0))})
    assert Vote.load({"parts": said.dump()}) == said
    # a row of a backup need not say them
    assert Vote.load({"parts": ""}) == Vote({})


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"sentiment": "negative", "comment": "no"}, {"thumb": Part((5, 2), "negative", "no")}),
        ({"sentiment": "positive", "stars": 4}, {"stars": Part((5, 2), 4)}),
        (
            {"sentiment": "positive", "stars": 2, "parts": ["thumb", "stars"], "comment": "so"},
            {"thumb": Part((5, 2), "positive", "so"), "stars": Part((5, 2), 2, "so")},
        ),
        ({"withdrawn": True}, {"thumb": Part((5, 2)), "stars": Part((5, 2))}),
        ({"withdrawn": True, "parts": ["stars"], "stars": 3, "comment": "x"}, {"stars": Part((5, 2))}),
    ],
)
def test_a_message_changes_the_parts_that_it_is_about(said: dict[str, Any], parts: dict[str, Part]) -> None:
    feedback = UserFeedback.model_validate({"query_id": "1-0", "session_id": "s", "user_id": "ann", **said})
    assert changes(feedback, (5, 2)) == parts
