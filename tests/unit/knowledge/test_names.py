"""Names, relations and dates in their one form."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.knowledge.dates import date_of
from services.knowledge.names import MAX_NAME, USER, key_of, named, occurs, shown
from services.knowledge.relations import ALIAS, Relation, exclusive, relation_of, symmetric

SAID = int(datetime(2026, 11, 22, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    "spellings",
    [
        ("Müller", "MUELLER", "müller"),
        ("Jean-Luc", "Jean Luc", "jean luc"),
        ("the Eiffel Tower", "Eiffel Tower", "Eiffel tower."),
        ("Anna's", "Anna", "“Anna”"),
        ("São Paulo", "Sao Paulo"),
        ("Ærø", "Aeroe"),
        ("Anna", "An\u200bna", "\u202eAnna\u202c", "An\u00adna\ufeff"),
    ],
)
def test_spellings_of_one_name_meet(spellings: tuple[str, ...]) -> None:
    assert len({key_of(one) for one in spellings}) == 1


@pytest.mark.parametrize(
    ("one", "other"), [("Maria", "Mario"), ("Anna", "Anne"), ("Michael", "Michal"), ("が", "か"), ("Jan", "Jana")]
)
def test_two_names_stay_two(one: str, other: str) -> None:
    assert key_of(one) != key_of(other)


@pytest.mark.parametrize(
    ("text", "by_assistant", "key"),
    [
        ("I", False, USER), ("my", False, USER), ("The user", False, USER), ("the user", True, USER),
        ("user", False, USER), ("user", True, USER), ("your", True, USER), ("me", True, None), ("x" * MAX_NAME, False,
        "x" * MAX_NAME), ("https://", False, "https"), ("\u0301\u0301", False, None),
        ("you", True, USER), ("I", True, None), ("you", False, None), ("she", False, None), ("", False, None),
        ("--", False, None), ("x" * (MAX_NAME + 1), False, None), ("Anna", True, "anna"),
    ],
)  # fmt: skip
def test_pronouns_stand_for_whoever_says_them(text: str, by_assistant: bool, key: str | None) -> None:
    assert named(text, by_assistant=by_assistant) == key
    if not by_assistant:
        assert named(text) == key


@pytest.mark.parametrize(
    ("text", "name"),
    [("An\x07na", "An na"), ("“Anna”,", "Anna"), ("a [b] <c>|`d`", "a b c d"), ("Anna\n===\nTom", "Anna Tom"),
     ("(--)", "")],
)  # fmt: skip
def test_a_name_is_shown_without_what_could_be_taken_for_structure(text: str, name: str) -> None:
    assert shown(text) == name


@given(st.text(max_size=200))
def test_a_key_is_stable_and_no_name_has_the_users(text: str) -> None:
    key = key_of(text)
    assert key != USER
    assert ":" not in key
    assert key == " ".join(key.split())
    assert "\n" not in shown(text)
    assert "===" not in shown(text)


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("My sister Anna's house", True),
        ("Hannah is here", False),
        ("", False),
        ("Anna", True),
        ("sister/Anna–Lyon", True),
    ],
)
def test_a_name_stands_in_a_text_word_by_word(text: str, there: bool) -> None:
    assert occurs("anna", text) is there


@pytest.mark.parametrize("name", ["Marks & Spencer", "Tom + Anna", "the Arts Club", "Jean-Luc"])
def test_a_name_is_found_in_a_text_as_it_is_written(name: str) -> None:
    key = named(name)
    assert key is not None
    assert occurs(key, f"I met {name} yesterday.")


@pytest.mark.parametrize(
    ("phrase", "relation"),
    [
        ("lives in", Relation("lives in")),
        ("moved_to", Relation("lives in")),
        ("used to live in", Relation("lives in", past=True)),
        ("formerly lived in", Relation("lives in", past=True)),
        ("is no longer a member of", Relation("is a member of", past=True)),
        ("is not allergic to", Relation("is allergic to", past=True)),
        ("was married to", Relation("is married to", past=True)),
        ("is the wife of", Relation("is married to")),
        ("ex-husband of", Relation("is married to", past=True)),
        ("sister", Relation("is sister of")),
        ("older brother of", Relation("is brother of")),
        ("has a sister", Relation("is sister of", turned=True)),
        ("was born in", Relation("was born in")),
        ("favorite_food", Relation("favourite food")),
        ("has favourite food", Relation("favourite food")),
        ("also known as", Relation(ALIAS)),
        ("is allergic to", Relation("is allergic to")),
        ("likes", Relation("likes")),
    ],
)
def test_phrases_of_one_relation_meet(phrase: str, relation: Relation) -> None:
    assert relation_of(phrase) == relation


@pytest.mark.parametrize(
    "phrase",
    ["", "   ", "lives in a house that is not far from the", "x" * 61, "}) MATCH (n) DETACH DELETE n", "a\n=== b",
     "<tool>", "is"],
)  # fmt: skip
def test_what_is_not_a_few_words_is_no_relation(phrase: str) -> None:
    assert relation_of(phrase) is None


def test_which_relations_have_one_object_and_which_two_like_ends() -> None:
    assert exclusive("lives in")
    assert exclusive("favourite colour")
    assert not exclusive("likes")
    assert not exclusive("is sister of")
    assert symmetric("is married to")
    assert not symmetric("lives in")


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("2026", "2026"), ("2026-05", "2026-05"), ("2026-05-03", "2026-05-03"), ("May", "2026-05"),
        ("december", "2025-12"), ("3 May 2024", "2024-05-03"), ("May 3, 2024", "2024-05-03"),
        ("3rd of may", "2026-05-03"),
        ("last year", "2025"), ("this month", "2026-11"), ("last month", "2026-10"), ("today", "2026-11-22"),
        ("Sept 2020", "2020-09"),
        # digits of a wide script, and of another one
        ("２０２６-05", "2026-05"), ("٢٠٢٦", None),
        ("2026-13", None), ("2026-02-30", None), ("31 April", None), ("soon", None), ("", None),
        (None, None), ("May " * 30, None),
    ],
)  # fmt: skip
def test_dates_are_as_precise_as_they_were_told(text: str | None, date: str | None) -> None:
    assert date_of(text, SAID) == date
