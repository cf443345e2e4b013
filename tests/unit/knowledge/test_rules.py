"""Reading plain statements by rule, and what is believed of a model's reading."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.knowledge.claims import Turn, grounded
from services.knowledge.extract import material, parsed
from services.knowledge.rules import read

SAID = int(datetime(2026, 11, 22, tzinfo=UTC).timestamp() * 1000)


def turn(query: str, answer: str = "") -> Turn:
    return Turn("1-1:A", "ann", "s1", SAID, query, answer)


@pytest.mark.parametrize(
    ("said", "claims"),
    [
        ("I live in Berlin.", ["@user lives in berlin is"]),
        ("I'm living in New York since 2019.", ["@user lives in new york is since 2019"]),
        ("My sister Anna lives in Lyon.", ["anna is sister of @user is", "anna lives in lyon is"]),
        ("Anna moved to Porto in May.", ["anna lives in porto is since 2026-05"]),
        ("I used to work at Bosch, and I work at SAP now.", ["@user works at bosch was", "@user works at sap is"]),
        ("Tom no longer lives in Cairo", ["tom lives in cairo was"]),
        ("I lived in Rome until 2015.", ["@user lives in rome was until 2015"]),
        ("My name is Eva Müller.", ["@user is also called eva mueller is"]),
        ("I am married to Jan.", ["@user is married to jan is"]),
        ("Tom divorced from Eva in May", ["eva is married to tom was until 2026-05"]),
        ("Peter is my boss.", ["peter is boss of @user is"]),
        ("My brother's name is Tom.", ["tom is brother of @user is"]),
        ("I have a dog called Rex.", ["@user has dog rex is"]),
        ("My favourite colour is blue.", ["@user favourite colour blue is"]),
        ("Please remember that I was born in Graz.", ["@user was born in graz is"]),
        ("Where does Anna live? Does Tom live in Rome?", []),
        ("If I lived in Rome, I would be happy.", []),
        ("She moved to Rome.", []),
        ("I have moved to New York City in March 2021.", ["@user lives in new york city is since 2021-03"]),
        ("Tom moved to Oslo in March 20", ["tom lives in oslo is since 2026-03-20"]),
        ("Pretend I live in Tokyo.", []),
        ("Pretend my sister Anna lives in Rome. I wish my brother Tom lived in Bern.", []),
        ("Example sentence: My brother Tom lives in Oslo.", []),
        ("She wrote “My brother Tom lives in Oslo” to me.", []),
        ("Remember: my brother Tom lives in Oslo.", ["tom is brother of @user is", "tom lives in oslo is"]),
        ("Today I live in hope.", []),
        ("Tom is my brother and Eva is my sister.", ["tom is brother of @user is", "eva is sister of @user is"]),
        ("I live in Oslo and work at Acme.", ["@user lives in oslo is", "@user works at acme is"]),
        ("I lived in Rome but now live in Oslo.", ["@user lives in rome was", "@user lives in oslo is"]),
        (
            "My sister Anna moved to Lyon in May and works at SAP.",
            ["anna is sister of @user is", "anna lives in lyon is since 2026-05", "anna works at sap is"],
        ),
        ("My name is Tom and I have a dog called Rex.", ["@user is also called tom is", "@user has dog rex is"]),
        ("I have a friend who lives in Rome and works at SAP.", []),
        ("I have a sister, lives in Rome and works at SAP.", []),
        ("Tom is not my brother and Eva is my sister.", ["eva is sister of @user is"]),
        ("Tom or Ben lives in Oslo, and neither Tom nor Eva lives in Rome.", []),
        ("", []),
    ],
)
def test_plain_statements_are_read(said: str, claims: list[str]) -> None:
    assert stated(said) == sorted(claims)


@pytest.mark.parametrize(
    ("said", "claims"),
    [
        ("I used to work for Siemens.", ["@user works at siemens was"]),
        ("I work at SAP in May.", ["@user works at sap is since 2026-05"]),
        ("I work at SAP in Graz.", ["@user works at sap is"]),
        ("Tom moved from Lyon to Ghent in 2021.",
         ["tom lives in ghent is since 2021", "tom lives in lyon was until 2021"]),
        ("My sister Anna moved from Cork back to Bath and works at BBC.",
         ["anna is sister of @user is", "anna lives in bath is", "anna lives in cork was", "anna works at bbc is"]),
        ("Eva lives in British Columbia.", ["eva lives in british columbia is"]),
        ("Eva lives in Aix-en-Provence since 2019.", ["eva lives in aix en provence is since 2019"]),
    ],
)  # fmt: skip
def test_rules_read_homes_and_employers_with_dates(said: str, claims: list[str]) -> None:
    assert stated(said) == claims


@pytest.mark.parametrize(
    "said",
    [
        "I live in fear.",
        "I live in Anna's flat.",
        "I live in my car.",
        "I work in French.",
        "I work for French companies.",
        "I work for Eva's company.",
        "I don't work at SAP in Graz.",
        "I would work at SAP in Graz.",
        "I work with Tom in Graz.",
        "I moved in with Tom.",
        "She moved from Lyon to Graz in 2021.",
        "They work at SAP in Graz.",
        "Does Anna work at SAP? If I worked at SAP, I would be happy. She works at SAP.",
        "Tom or Ben lives in Oslo, and neither Tom nor Eva lives in Rome.",
    ],
)
def test_rules_leave_other_statements_alone(said: str) -> None:
    assert stated(said) == []


def stated(said: str) -> list[str]:
    """What is read of it by rule: subject, relation, object, whether it is or was, and dates."""
    found = []
    for one in read(turn(said)):
        dates = (f" since {one.since}" if one.since else "") + (f" until {one.until}" if one.until else "")
        found.append(f"{one.subject_key} {one.relation} {one.object_key} {one.holds}{dates}")
        assert one.by == "rules"
        assert one.speaker == "user"
        assert one.quote
    return sorted(found)


_WORDS = st.sampled_from(
    [
        "I",
        "my",
        "me",
        "Tom",
        "Oslo",
        "brother",
        "is",
        "live",
        "lives",
        "in",
        "am",
        "was",
        "the",
        "a",
        "not",
        "since",
        "2020",
        ".",
        ",",
    ]
)


@given(st.text(max_size=400))
def test_no_text_breaks_the_rules(said: str) -> None:
    read(turn(said))


@example(["my", "brother", "Tom", "lives", "in", "Oslo", "."])
@given(st.lists(_WORDS, max_size=12))
def test_nothing_is_said_of_itself(words: list[str]) -> None:
    for one in read(turn(" ".join(words))):
        assert one.subject_key != one.object_key


def fact(subject: str, relation: str, object_: str, **values: object) -> dict[str, object]:
    return {"subject": subject, "subject_kind": "person", "relation": relation, "object": object_,
            "object_kind": "place", "holds": "is", "since": "", "until": "", **values}  # fmt: skip


def test_the_users_words_are_the_users_and_the_rest_the_assistants() -> None:
    said = turn("My sister Anna lives in Lyon.", "Lyon lies on the Rhône. You told me of Anna.")
    mine = grounded(said, fact("Anna", "lives in", "Lyon"), "model")
    assert mine is not None
    assert (mine.speaker, mine.quote) == ("user", "My sister Anna lives in Lyon.")
    yours = grounded(said, fact("Lyon", "lies on", "Rhône"), "model")
    assert yours is not None
    assert yours.speaker == "assistant"


@pytest.mark.parametrize(
    ("query", "read"),
    [
        ("Anna lives in Lyon.", fact("Anna", "lives in", "Paris")),
        ("Anna lives in Lyon.", fact("Anne", "lives in", "Lyon")),
        ("Does Anna live in Lyon?", fact("Anna", "lives in", "Lyon")),
        ("Anna lives in Lyon.", fact("Anna", "", "Lyon")),
        ("Anna lives in Lyon.", fact("Anna", "}) DETACH DELETE n //", "Lyon")),
        ("Anna lives in Lyon.", fact("Lyon", "is", "Lyon")),
        ("Anna lives in Lyon.", fact("the user", "is", "me")),
        ("Anna lives in Lyon.", {"subject": 5, "relation": None, "object": ["Lyon"]}),
    ],
)
def test_what_does_not_stand_in_the_turn_is_not_believed(query: str, read: dict[str, object]) -> None:
    assert grounded(turn(query), read, "model") is None


def test_model_answer_keeps_facts_of_the_turn_only() -> None:
    said = turn("Anna lives in Lyon.", "That is a fine city.")
    facts = [
        fact("Anna", "lives in", "Lyon"),
        fact("the user", "works at", "SAP"),
        fact("Anna", "lives in", "Lyon"),
        "",
    ]
    found = parsed(f"Here: {orjson.dumps({'facts': facts}).decode()}", said)
    assert found is not None
    assert [(one.subject_key, one.subject_kind, one.object_key) for one in found] == [("anna", "person", "lyon")]
    assert material(said) == "Turn (2026-11-22)\nUser: Anna lives in Lyon.\nAssistant: That is a fine city."


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"facts": 3}', '{"facts": ', "[1]"])
def test_an_answer_that_is_none_is_not_read(text: str) -> None:
    assert parsed(text, turn("Anna lives in Lyon.")) is None
