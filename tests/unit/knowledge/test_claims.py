"""A claim in its one form, whoever words it and however; and only what a turn says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from services.knowledge.claims import MAX_QUOTE, Claim, Turn, claim, claim_of, distinct, grounded, sentences
from services.knowledge.names import MAX_NAME

SAID = int(datetime(2026, 11, 22, tzinfo=UTC).timestamp() * 1000)
TURN = Turn("7-0:A", "ann", "s1", SAID, "Anna moved to Porto in May. My boss is Tom!")


def made(*said: str, turn: Turn = TURN, **values: Any) -> Claim:
    found = claim(turn, *said, **{"by": "model", **values})
    assert found is not None
    return found


def test_all_that_was_said_is_in_it_and_it_reads_back() -> None:
    found = made(
        "Anna", "moved to", "Porto", subject_kind="person", object_kind="place", since="May", until="2027",
        speaker="assistant", by="rules", quote="Anna  moved\nto Porto.",
    )  # fmt: skip
    assert found.row() | {"id": ""} == {
        "id": "", "source": "7-0:A", "session_id": "s1", "said": SAID, "subject_key": "anna", "subject": "Anna",
        "subject_kind": "person", "relation": "lives in", "object_key": "porto", "object": "Porto",
        "object_kind": "place", "holds": "is", "since": "2026-05", "until": "2027", "speaker": "assistant",
        "by": "rules", "quote": "Anna moved to Porto.",
    }  # fmt: skip
    assert claim_of({**found.row(), "newer": 1}) == found
    bare = made("Anna", "likes", "tea")
    assert (bare.since, bare.until, bare.speaker, bare.quote, bare.subject_kind, bare.object_kind, bare.holds) == (
        "", "", "user", "", "thing", "thing", "is",
    )  # fmt: skip


# Facts that a person enters without kinds, and their implied kinds.
KINDS_OF = [
    ("Anna", "lives in", "Lyon", "person", "place"),
    ("Eiffel Tower", "is located in", "Paris", "thing", "place"),
    ("me", "works at", "Acme", "person", "organisation"),
    ("Anna", "works as", "nurse", "person", "thing"),
    ("Anna", "graduated from", "Yale", "person", "organisation"),
    ("Anna", "sister of", "Tom", "person", "person"),
    ("Tom", "has a sister", "Anna", "person", "person"),
    ("Anna", "is married to", "Bob", "person", "person"),
    ("Anna", "was born in", "Oslo", "person", "place"),
    ("Anna", "birthday", "3 May", "person", "time"),
    ("Elixir", "runs on", "BEAM", "thing", "thing"),
    ("me", "likes", "tea", "person", "thing"),
]


@pytest.mark.parametrize(("subject", "relation", "other", "first", "second"), KINDS_OF)
def test_claim_without_kinds_gets_those_of_its_relation(
    subject: str, relation: str, other: str, first: str, second: str
) -> None:
    found = made(subject, relation, other, by="person")
    kinds = {found.subject: found.subject_kind, found.object: found.object_kind}
    assert kinds == {"the user" if subject == "me" else subject: first, other: second}
    given = made(subject, relation, other, subject_kind="organisation", object_kind="organisation")
    assert {given.subject_kind, given.object_kind} <= {"organisation", "person" if subject == "me" else "organisation"}


def test_one_thing_said_twice_in_a_turn_has_one_id_and_in_another_turn_or_by_another_user_another() -> None:
    first = made("Anna", "lives in", "Porto")
    assert made("ANNA", "moved to", "porto.", speaker="assistant").id == first.id
    for other in (
        made("Anna", "lives in", "Lyon"),
        made("Tom", "lives in", "Porto"),
        made("Anna", "works in", "Porto"),
        made("Anna", "lives in", "Porto", turn=Turn("8-0:A", "ann", "s1", SAID, "")),
        made("Anna", "lives in", "Porto", turn=Turn("7-0:A", "bob", "s1", SAID, "")),
    ):
        assert other.id != first.id
    assert len(first.id) == 24


def test_ends_stand_in_the_order_of_the_relation_with_their_kinds() -> None:
    turned = made("Anna", "has a sister", "Eva", subject_kind="person", object_kind="place")
    assert (turned.subject, turned.subject_kind) == ("Eva", "place")
    assert (turned.object, turned.object_kind, turned.relation) == ("Anna", "person", "is sister of")
    for ends in (("Tom", "Eva"), ("Eva", "Tom")):
        bond = made(ends[0], "married to", ends[1])
        assert (bond.subject, bond.object) == ("Eva", "Tom")


@pytest.mark.parametrize(
    ("relation", "holds", "expected"),
    [("lives in", "is", "is"), ("lives in", "was", "was"), ("used to live in", "is", "was"), ("lives in", "?", "is")],
)
def test_what_is_past_was_so(relation: str, holds: str, expected: str) -> None:
    assert made("Anna", relation, "Porto", holds=holds).holds == expected


@pytest.mark.parametrize(
    ("said", "by_assistant"),
    [
        (("she", "lives in", "Porto"), False),
        (("Anna", "lives in", "there"), False),
        (("Anna", "}) DELETE n", "Porto"), False),
        (("Anna", "likes", "ANNA!"), False),
        (("you", "live in", "Porto"), False),
        (("I", "live in", "Porto"), True),
        (("Anna", "likes", "you"), False),
        (("Anna", "likes", "me"), True),
    ],
)
def test_without_names_and_a_relation_there_is_no_claim(said: tuple[str, str, str], by_assistant: bool) -> None:
    assert claim(TURN, *said, by="model", speaker="assistant" if by_assistant else "user") is None


def test_names_and_quotes_are_as_written_and_bounded() -> None:
    assert claim(TURN, "x" * (MAX_NAME + 1), "likes", "tea", by="model") is None
    # the article is no part of the key
    assert len(made("The " + "x" * MAX_NAME, "likes", "tea").subject) == MAX_NAME
    found = made("“Anna”", "likes", "the  tea", quote="y " * MAX_QUOTE, subject_kind="robot")
    assert (found.subject, found.object, found.subject_kind) == ("Anna", "the tea", "thing")
    assert found.quote == ("y " * MAX_QUOTE)[:MAX_QUOTE]
    mine = made("my", "boss", "Tom", subject_kind="thing", object_kind="person")
    assert {(mine.subject, mine.subject_kind), (mine.object, mine.object_kind)} == {
        ("the user", "person"),
        ("Tom", "person"),
    }


def fact(subject: str, relation: str, object_: str, **values: Any) -> dict[str, Any]:
    return {"subject": subject, "relation": relation, "object": object_, **values}


def test_what_the_user_said_is_the_users_and_the_rest_the_assistants_with_the_sentence_that_says_it() -> None:
    turn = Turn("7-0:A", "ann", "s1", SAID, "Anna moved to Porto. It rains?", "Porto lies in Portugal. You like Anna.")
    found = grounded(turn, fact("Anna", "moved to", "Porto", since="May", subject_kind="person"), "model")
    assert found == made(
        "Anna", "moved to", "Porto", turn=turn, since="May", subject_kind="person", quote="Anna moved to Porto."
    )
    found = grounded(turn, fact("Porto", "lies in", "Portugal", object_kind="place", until="2030"), "rules")
    assert found is not None
    assert (found.speaker, found.quote, found.by) == ("assistant", "Porto lies in Portugal.", "rules")
    assert (found.object_kind, found.until) == ("place", "2030")
    # the assistant's you is the user
    found = grounded(turn, fact("you", "like", "Anna", holds="was"), "model")
    assert found is not None
    assert (found.subject, found.speaker, found.holds) == ("the user", "assistant", "was")
    # one name in each of two sentences: the first that has one
    found = grounded(Turn("7-0:A", "ann", "s1", SAID, "Tom is here. He met Eva."), fact("Tom", "knows", "Eva"), "model")
    assert found is not None
    assert found.quote == "Tom is here."
    turn = Turn("7-0:A", "ann", "s1", SAID, "It rains. Tom is here. He met Eva. Tom likes tea.")
    for ends, quote in ((("Tom", "knows", "Eva"), "Tom is here."), (("Tom", "likes", "tea"), "Tom likes tea.")):
        found = grounded(turn, fact(*ends), "model")
        assert found is not None
        assert found.quote == quote
    # a name that ends no sentence, though it seems to
    found = grounded(Turn("7-0:A", "ann", "s1", SAID, "I met Dr. Who. Not now."), fact("I", "met", "Dr. Who"), "model")
    assert found is not None
    assert (found.object, found.quote) == ("Dr. Who", "I met Dr.")
    # one name in the question, the other in the answer
    turn = Turn("7-0:A", "ann", "s1", SAID, "I think of Anna.", "She lives in Porto.")
    found = grounded(turn, fact("Anna", "lives in", "Porto"), "model")
    assert found is not None
    assert (found.speaker, found.quote) == ("assistant", "I think of Anna.")


@pytest.mark.parametrize(
    "found",
    [
        fact("Anna", "lives in", "Lyon"),
        fact("Anna", "moved to", "it"),
        # of a question nothing is known
        fact("Eva", "likes", "tea"),
        fact("I", "am", "me"),
        # without an answer the assistant has said nothing
        fact("you", "know", "Anna"),
        {},
        fact("Anna", "", "Porto"),
    ],
)
def test_what_the_turn_does_not_say_is_no_claim(found: dict[str, Any]) -> None:
    turn = Turn("7-0:A", "ann", "s1", SAID, "Anna moved to Porto. Does Eva like tea?")
    assert grounded(turn, found, "model") is None


def test_of_nobody_and_nothing_that_is_told_there_is_no_claim() -> None:
    assert grounded(Turn("7-0:A", "ann", "s1", SAID, "Am I me?"), fact("I", "am", "me"), "model") is None
    assert grounded(Turn("7-0:A", "ann", "s1", SAID, "Who is Anna?"), fact("Anna", "is", "Who"), "model") is None


def test_a_text_is_told_sentence_by_sentence() -> None:
    assert sentences(" It rains! \n\n Anna, e.g. Tom.\nWhy?  3.5 is left. ") == [
        "It rains!", "Anna, e.g.", "Tom.", "Why?", "3.5 is left.",
    ]  # fmt: skip


def test_of_claims_with_one_id_what_is_so_counts_and_then_the_first() -> None:
    now, later = made("Anna", "likes", "tea"), made("Anna", "likes", "tea", since="2020")
    assert now.id == later.id
    assert distinct([now, later]) == [now]
    over = replace(now, holds="was", quote="it was")
    assert (over.id, over.quote) == (now.id, "it was")
    assert distinct([over, later]) == [later]
    other = made("Anna", "likes", "milk")
    assert distinct([other, over]) == [other, over]
