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
        ("I work in Graz.", ["@user works in graz is"]),
        ("My brother Tom works in Graz.", ["tom is brother of @user is", "tom works in graz is"]),
        ("Anna worked in New York until 2015.", ["anna works in new york was until 2015"]),
        (
            "I live in Graz and work in Linz since May.",
            ["@user lives in graz is", "@user works in linz is since 2026-05"],
        ),
        (
            "I'm working in Vienna, and Tom no longer works in Rome.",
            ["@user works in vienna is", "tom works in rome was"],
        ),
        ("I work at SAP in Graz.", ["@user works at sap is", "@user works in graz is"]),
        ("I work in March, in a bank, and in IT. Tom works in Sales. It works in Rome.", []),
        ("Does Anna work in Porto? If I worked in Rome, I would be happy. She works in Oslo.", []),
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
        ("Tom is my brother, Eva my sister.", ["tom is brother of @user is", "eva is sister of @user is"]),
        ("Tom and Ben are my brothers.", ["tom is brother of @user is", "ben is brother of @user is"]),
        (
            "My sister Anna and my brother Ben live in Lyon.",
            [
                "anna is sister of @user is",
                "anna lives in lyon is",
                "ben is brother of @user is",
                "ben lives in lyon is",
            ],
        ),
        (
            "Tom, Eva and I live in Oslo, and Jan works at SAP.",
            ["tom lives in oslo is", "eva lives in oslo is", "@user lives in oslo is", "jan works at sap is"],
        ),
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
        ("I work at Infineon in Villach since 2019.", "at infineon is since 2019, in villach is since 2019"),
        ("I'm working in Basel for Roche.", "at roche is, in basel is"),
        ("I work in accounting at Magna in Steyr.", "at magna is, in steyr is"),
        (
            "I work in Logistics at DHL in Leipzig since May 2020.",
            "at dhl is since 2020-05, in leipzig is since 2020-05",
        ),
        ("I work as a nurse in Innsbruck.", "in innsbruck is"),
        ("I worked as a civil engineer at Strabag until 2015.", "at strabag was until 2015"),
        ("I used to work for Siemens.", "at siemens was"),
        ("I used to work for Nokia in Espoo until 2013.", "at nokia was until 2013, in espoo was until 2013"),
        ("I work at McDonald's in Linz.", "at mcdonald is, in linz is"),
        ("I work at Boston Consulting in Boston.", "at boston consulting is, in boston is"),
        ("I work at SAP in May.", "at sap is since 2026-05"),
        ("I work at SAP in German.", "at sap is"),
        ("I work in Rust at Ferrous Systems.", "at ferrous systems is"),
        ("I work in a team in Porto.", "in porto is"),
        ("I work in UX in Berlin", "in berlin is"),
        ("I currently work in La Paz, not in Lima.", "in la paz is"),
        ("I no longer work for Apple in Cork.", "at apple was, in cork was"),
        ("I work in St. Gallen.", "in st gallen is"),
    ],
)
def test_for_whom_and_where_somebody_works_is_read_of_one_sentence(said: str, claims: str) -> None:
    assert stated(said) == [f"@user works {claim}" for claim in claims.split(", ")]


@pytest.mark.parametrize(
    ("said", "claims"),
    [
        ("Tom moved from Lyon to Ghent in 2021.",
         ["tom lives in ghent is since 2021", "tom lives in lyon was until 2021"]),
        ("I moved to Turin from Bari.", ["@user lives in bari was", "@user lives in turin is"]),
        (
            "My sister Anna moved from Cork back to Bath and works at BBC in London.",
            ["anna is sister of @user is", "anna lives in bath is", "anna lives in cork was", "anna works at bbc is",
             "anna works in london is"],
        ),
        ("My cousin Max works in Brno.", ["@user is cousin of max is", "max works in brno is"]),
        ("Eva lives in British Columbia.", ["eva lives in british columbia is"]),
        ("Eva lives in McAllen.", ["eva lives in mcallen is"]),
        ("Eva lives in Aix-en-Provence since 2019.", ["eva lives in aix en provence is since 2019"]),
        ("I live in Washington D.C.", ["@user lives in washington is"]),
        ("I live in NYC, and Jan lives in Washington DC.",
         ["@user lives in nyc is", "jan lives in washington dc is"]),
        ("I was born in St. Louis.", ["@user was born in st louis is"]),
    ],
)  # fmt: skip
def test_where_people_live_and_come_from_is_read(said: str, claims: list[str]) -> None:
    assert stated(said) == claims


@pytest.mark.parametrize(
    "said",
    [
        *(f"I work in {what}." for what in (
            "French", "German", "sales", "IT", "a team", "shifts", "Spanish and English", "Java", "TypeScript", "Excel",
            "QA", "Human Resources", "Customer Service", "the Sales team", "Real Estate", "Computer Science", "May",
            "Winter", "Room 12", "Building C", "Tom's office", "Uncle Ben's bakery", "Berlin-based startups", "pairs",
            "peace", "English at home", "R&D",
        )),
        *(f"I live in {what}." for what in (
            "fear", "Fear", "peace", "hope", "Denial", "Anna's flat", "Apartment 7", "sin", "Emacs", "my car",
        )),
        "I moved to Linux last year.",
        "I moved to Marketing in 2020.",
        "I moved from Sales to Support.",
        "I moved from Python to Rust in May.",
        "Tom moved from Siemens to Bosch.",
        "She moved from Lyon to Graz in 2021.",
        "They work at SAP in Graz.",
        "I work for Christmas.",
        "I work at Night.",
        "I work for French companies.",
        "I work for Eva's company.",
        "I work as a guide in Italian.",
        "I don't work at SAP in Graz.",
        "I would work at SAP in Graz.",
        "I work with Tom in Graz.",
        "I was born in Winter.",
        "I moved in with Tom.",
    ],
)  # fmt: skip
def test_what_is_no_place_and_no_employer_is_left_alone(said: str) -> None:
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
    return {"turn": 1, "subject": subject, "subject_kind": "person", "relation": relation, "object": object_,
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


def test_an_answer_of_a_model_is_told_apart_by_turn() -> None:
    turns = [turn("Anna lives in Lyon."), turn("I work at SAP.")]
    facts = [fact("Anna", "lives in", "Lyon"), fact("the user", "works at", "SAP", turn=2),
             fact("Anna", "lives in", "Lyon", turn=2), fact("Anna", "lives in", "Lyon", turn=9), ""]  # fmt: skip
    found = parsed(f"Here: {orjson.dumps({'facts': facts}).decode()}", turns)
    assert found is not None
    assert [[one.object_key for one in claims] for claims in found] == [["lyon"], ["sap"]]
    assert found[0][0].subject_kind == "person"
    assert "Turn 2 (2026-11-22)\nUser: I work at SAP." in material(turns)


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"facts": 3}', '{"facts": ', "[1]"])
def test_an_answer_that_is_none_is_not_read(text: str) -> None:
    assert parsed(text, [turn("Anna lives in Lyon.")]) is None
