"""Facts are a pure function of a set of claims."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.knowledge.claims import Claim, Turn, claim, distinct
from services.knowledge.merging import Fact, fact_line, facts_of
from services.knowledge.name_index import Names
from services.knowledge.relations import ALIAS

START = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)
DAY = 86_400_000


def say(day: int, subject: str, relation: str, object_: str, source: str = "", **values: Any) -> Claim:
    turn = Turn(source or f"r{day}", "ann", f"s{day}", START + day * DAY, "")
    found = claim(turn, subject, relation, object_, **{"by": "model", **values})
    assert found is not None
    return found


def lines(*claims: Claim, names: Names | None = None) -> list[str]:
    facts = facts_of(claims, names.entity) if names else facts_of(claims)
    return sorted(fact_line(fact) for fact in facts)


def only(*claims: Claim) -> Fact:
    (fact,) = facts_of(claims)
    return fact


def test_a_contradiction_closes_the_older_fact_with_a_date() -> None:
    lyon, porto = say(1, "Anna", "lives in", "Lyon"), say(9, "Anna", "moved to", "Porto", since="2026-01-05")
    assert lines(lyon, porto) == [
        "Anna lives in Lyon: WAS true until 2026-01-05 (said 2026-01-02)",
        "Anna lives in Porto: IS true since 2026-01-05 (said 2026-01-10)",
    ]
    # without a date of its own, the day on which it was said
    assert "WAS true until 2026-01-10" in lines(lyon, say(9, "Anna", "lives in", "Porto"))[0]


def test_what_is_told_later_of_an_earlier_time_is_history() -> None:
    now, before = say(1, "I", "live in", "Porto", since="2020"), say(5, "I", "moved to", "Rome", since="2011")
    assert lines(now, before) == [
        "The user lives in Porto: IS true since 2020 (said 2026-01-02)",
        "The user lives in Rome: WAS true since 2011 until 2020 (said 2026-01-06)",
    ]


def test_what_is_said_again_raises_confidence_and_adds_a_source() -> None:
    once_said, again = say(1, "Anna", "likes", "tea"), say(2, "anna", "likes", "Tea")
    fact = only(once_said, again)
    assert fact.confidence > only(once_said).confidence
    assert [one.source for one in fact.claims] == ["r1", "r2"]
    assert len(fact.why()) == 2
    # of what was read by rule a little less is thought
    assert only(say(1, "Anna", "likes", "tea", by="rules")).confidence < only(once_said).confidence


def test_the_users_word_counts_more_than_the_assistants() -> None:
    mine = say(1, "Anna", "lives in", "Porto")
    yours = say(5, "Anna", "lives in", "Lyon", speaker="assistant")
    assert lines(mine, yours) == [
        "Anna lives in Lyon: doubted (said 2026-01-06)",
        "Anna lives in Porto: IS true (said 2026-01-02)",
    ]
    assert "doubted" in next(fact for fact in facts_of([mine, yours]) if fact.state == "doubted").why()[-1]
    # nor does it reopen what the user has closed
    moved = say(3, "Anna", "lives in", "Rome")
    again = say(9, "Anna", "lives in", "Porto", speaker="assistant")
    assert {fact.object.id: fact.state for fact in facts_of([mine, moved, again])} == {"porto": "was", "rome": "is"}
    # alone it counts, and where the user only said what is over
    assert only(yours).state == "is"
    over = say(2, "Anna", "lived in", "Rome")
    assert {fact.object.id: fact.state for fact in facts_of([over, yours])} == {"rome": "was", "lyon": "is"}


def test_what_is_no_longer_so_is_over_and_may_be_so_again() -> None:
    began, ended = say(1, "Tom", "works at", "SAP"), say(4, "Tom", "no longer works at", "SAP")
    assert lines(began, ended) == ["Tom works at SAP: WAS true until 2026-01-05 (said 2026-01-05)"]
    assert "It ended on 2026-01-05" in only(began, ended).why()[-1]
    assert lines(began, ended, say(9, "Tom", "works at", "SAP")) == ["Tom works at SAP: IS true (said 2026-01-10)"]
    assert lines(say(1, "Tom", "lived in", "Rome", until="2015")) == [
        "Tom lives in Rome: WAS true until 2015 (said 2026-01-02)"
    ]


def test_where_somebody_works_ends_not_for_whom_nor_the_other_way_round() -> None:
    sap, graz, left = (
        say(1, "Tom", "works at", "SAP"),
        say(4, "Tom", "is working in", "Graz"),
        say(9, "Tom", "quit", "SAP"),
    )
    assert lines(sap, graz) == [
        "Tom works at SAP: IS true (said 2026-01-02)",
        "Tom works in Graz: IS true (said 2026-01-05)",
    ]
    assert lines(sap, graz, left) == [
        "Tom works at SAP: WAS true until 2026-01-10 (said 2026-01-10)", "Tom works in Graz: IS true (said 2026-01-05)",
    ]  # fmt: skip
    assert lines(graz, say(9, "Tom", "no longer works in", "Graz"))[0].startswith("Tom works in Graz: WAS true")


def test_a_bond_of_two_is_one_fact_and_ends_for_both() -> None:
    married, told_again = say(1, "Tom", "married to", "Eva"), say(2, "Eva", "is the wife of", "Tom")
    assert len(facts_of([married, told_again])) == 1
    states = {(f.subject.id, f.object.id): f.state for f in facts_of([married, say(9, "Eva", "married to", "Jan")])}
    assert states == {("eva", "tom"): "was", ("eva", "jan"): "is"}


def test_aliases_make_one_entity_of_two_names_in_any_order() -> None:
    aliases = [say(3, "Annie", "also called", "Anna"), say(4, "Annie", "aka", "Nan")]
    names = Names(1, ["anna", "annie", "nan", "lyon", "porto"], aliases)
    claims = [say(1, "Annie", "lives in", "Lyon"), say(2, "Anna", "lives in", "Porto"), *aliases]
    facts = facts_of(claims, names.entity)
    homes = {fact.object.id: fact.state for fact in facts if fact.relation == "lives in"}
    assert homes == {"lyon": "was", "porto": "is"}
    assert {fact.subject.id for fact in facts} == {"anna"}
    other = Names(1, ["nan", "annie", "anna"], reversed(aliases))
    assert [other.entity(key) for key in ("anna", "annie", "nan")] == ["anna"] * 3
    me = Names(1, ["@user", "eva"], [say(1, "I", "am called", "Eva")])
    assert me.entity("eva") == "@user"
    assert me.with_aliases(["@user"]) == ["@user", "eva"]
    # what was taken back joins nothing
    assert Names(1, ["a", "b"], [say(1, "a", "no longer known as", "b")]).entity("b") == "b"


@pytest.mark.parametrize("words", ["no longer known as", "isn't called", "is not the same as"])
def test_whoever_is_told_not_to_be_the_same_is_two_again(words: str) -> None:
    same, other = say(3, "Annie", "also called", "Anna"), say(4, "Anna", words, "Annie")
    for claims in ([same, other], [other, same]):
        assert Names(1, ["anna", "annie"], claims).entity("annie") == "annie"
    # the assistant does not take back what the user said, and what was told last counts
    doubting = say(4, "Anna", words, "Annie", speaker="assistant")
    assert Names(1, ["anna", "annie"], [same, doubting]).entity("annie") == "anna"
    again = say(5, "Annie", "aka", "Anna")
    assert Names(1, ["anna", "annie"], [again, other, same]).entity("annie") == "anna"


def test_names_of_one_entity_are_a_fact_that_can_be_seen_and_taken_back() -> None:
    alias, home = say(3, "Annie", "also called", "Anna", quote="Annie is Anna."), say(4, "Annie", "lives in", "Lyon")
    names = Names(1, ["anna", "annie", "lyon"], [alias])
    called, _ = sorted(facts_of([alias, home], names.entity), key=lambda fact: fact.said)
    assert fact_line(called) == "Anna is also called Annie: IS true (said 2026-01-04)"
    assert (called.subject.id, called.object.id) == ("anna", "anna")
    assert called.why() == ["The user said on 2026-01-04: “Annie is Anna.” (read by the model)."]
    assert called.claims == (alias,)
    assert lines(say(1, "I", "am called", "Eva")) == ["The user is also called Eva: IS true (said 2026-01-02)"]


def on(today: str, *claims: Claim) -> list[str]:
    return sorted(fact_line(fact).removeprefix("Tom lives in ") for fact in facts_of(claims, today=today))


def test_what_is_told_of_a_day_to_come_counts_from_that_day() -> None:
    lyon, porto = home(1, "Lyon"), home(2, "Porto", "moves to", since="2027-03")
    assert on("2026-06-01", porto, lyon) == [
        "Lyon: IS true (said 2026-01-02)",
        "Porto: IS to be true since 2027-03 (said 2026-01-03)",
    ]
    moved = [
        "Lyon: WAS true until 2027-03 (said 2026-01-02)",
        "Porto: IS true since 2027-03 (said 2026-01-03)",
    ]
    assert on("2027-03-01", porto, lyon) == moved
    # what is said of the present meanwhile does not undo it; what is said of it afterwards does
    again = home(9, "Lyon")
    assert on("2026-06-01", again, porto, lyon)[0] == "Lyon: IS true (said 2026-01-10)"
    assert on("2028-06-01", again, porto, lyon)[1] == moved[1]
    assert on("2028-06-01", porto, home(800, "Bonn"))[0].startswith("Bonn: IS true (")
    # nor does anything come of what was given up
    given_up = home(9, "Porto", "no longer lives in")
    assert [line.split(" (")[0] for line in on("2028-06-01", given_up, porto, lyon)] == ["Lyon: IS true",
                                                                                        "Porto: WAS true"]  # fmt: skip


def test_what_is_told_to_end_on_a_day_is_so_until_then() -> None:
    assert on("2026-06-01", home(1, "Rome", until="2027")) == ["Rome: IS true until 2027 (said 2026-01-02)"]
    assert on("2028-01-01", home(1, "Rome", until="2027")) == ["Rome: WAS true until 2027 (said 2026-01-02)"]
    assert on("2026-06-01", home(1, "Rome", until="2020")) == ["Rome: WAS true until 2020 (said 2026-01-02)"]
    rome, over = home(1, "Rome"), home(2, "Rome", "no longer lives in", until="2027")
    assert on("2026-06-01", rome, over) == ["Rome: IS true until 2027 (said 2026-01-03)"]
    (fact,) = facts_of([rome, over], today="2026-06-01")
    assert fact.why()[-1].startswith("It ends on 2027: ")
    # what the assistant says otherwise stays doubted
    doubted = home(3, "Bonn", until="2020", speaker="assistant")
    assert on("2026-06-01", rome, doubted)[0].startswith("Bonn: doubted")
    lived = home(2, "Bonn", "lived in", until="2020", speaker="assistant")
    assert on("2026-06-01", rome, lived, doubted)[0].startswith("Bonn: doubted")


def test_a_day_is_no_earlier_than_what_was_said_last() -> None:
    # the clock is behind: what was said of a day at the end of January is not to come
    claims = [home(1, "Rome"), home(29, "Porto", "moved to", since="2026-01-20")]
    assert on("2025-06-01", *claims)[0] == "Porto: IS true since 2026-01-20 (said 2026-01-30)"
    assert facts_of([], today="2026-01-01") == []
    # without a day nothing is to come, also what was told so
    assert on("", home(1, "Porto", "moves to", since="2027-03")) == ["Porto: IS true since 2027-03 (said 2026-01-02)"]


def test_a_plan_counts_when_its_day_comes_whatever_was_said_meanwhile() -> None:
    lyon, porto, bonn = home(1, "Lyon"), home(2, "Porto", "moves to", since="2027-03"), home(3, "Bonn", since="2027-06")
    given_up = home(9, "Porto", "no longer lives in")
    # another plan than the one that was given up
    assert on("2028-06-01", lyon, porto, bonn, given_up) == [
        "Bonn: IS true since 2027-06 (said 2026-01-04)",
        "Lyon: WAS true until 2027-06 (said 2026-01-02)",
        "Porto: WAS true (said 2026-01-10)",
    ]
    # what is said to be so by now takes back no plan
    there = home(9, "Porto")
    assert on("2028-06-01", porto, there) == ["Porto: IS true since 2027-03 (said 2026-01-10)"]
    # of what is over nothing is to come
    over = home(1, "Rome", "lived in", since="2027")
    (fact,) = facts_of([over], today="2026-06-01")
    assert (fact.state, fact.since, fact.ahead) == ("was", "2027", False)
    assert on("2026-06-01", over, home(9, "Rome")) == ["Rome: IS true (said 2026-01-10)"]


def test_dates_are_compared_as_far_as_they_are_told() -> None:
    # in 2026 means no earlier time than in February of that year
    assert lines(home(1, "Lyon", since="2026-02"), home(200, "Porto", "moved to", since="this year"))[1] == (
        "Tom lives in Porto: IS true since 2026 (said 2026-07-20)"
    )
    for dates in (("2020", "2020-03"), ("2020-03", "2020")):
        assert "since 2020-03" in lines(*(home(n, "Rome", since=date) for n, date in enumerate(dates)))[0]
    # an earlier stay does not end that of today
    assert lines(home(1, "Rome", since="2020"), home(2, "Rome", "lived in", until="2011")) == [
        "Tom lives in Rome: IS true since 2020 (said 2026-01-03)"
    ]


def test_a_name_and_a_kind_are_those_used_most() -> None:
    fact = only(
        say(1, "MUELLER", "likes", "tea"),
        say(2, "Müller", "likes", "tea", subject_kind="person"),
        say(3, "Müller", "likes", "tea"),
    )
    assert (fact.subject.name, fact.subject.kind, fact.object.kind) == ("Müller", "person", "thing")
    assert (
        only(say(1, "anna", "likes", "tea"), *(say(n, "Anna", "likes", "tea") for n in (2, 3))).subject.name == "Anna"
    )
    # whoever talks with us is called so, and is a person, whatever else was said of another name
    me = Names(1, ["@user", "eva"], [say(1, "I", "am called", "Eva")])
    claims = [say(n, "Eva", "likes", "tea", subject_kind="place") for n in (2, 3)]
    (fact,) = facts_of([*claims, say(4, "I", "likes", "tea")], me.entity)
    assert (fact.subject.id, fact.subject.name, fact.subject.kind) == ("@user", "the user", "person")


def test_how_far_a_fact_is_trusted_grows_with_its_sources_not_with_what_one_of_them_repeats() -> None:
    def trusted(*claims: Claim) -> float:
        return only(*claims).confidence

    def tea(day: int, source: str = "", **values: Any) -> Claim:
        return say(day, "Anna", "likes", "tea", source, **values)

    assert [trusted(tea(1, by="person")), trusted(tea(1)), trusted(tea(1, speaker="assistant"))] == [1.0, 0.8, 0.5]
    assert [trusted(tea(1, by="rules")), trusted(tea(1, by="rules", speaker="assistant"))] == [0.72, 0.45]
    assert trusted(tea(1), tea(2)) == 0.96
    # of one source the best reading counts, in either order
    names = Names(1, ["anna", "annie"], [say(3, "Annie", "also called", "Anna")])
    for first, second in ({"by": "rules"}, {}), ({}, {"by": "rules"}):
        both = [tea(1, "r", **first), say(2, "Annie", "likes", "tea", "r", **second)]
        assert [fact.confidence for fact in facts_of(both, names.entity)] == [0.8]
    assert trusted(tea(1), tea(2, speaker="assistant")) == 0.9
    assert trusted(*map(tea, range(4))) == 0.998


def test_why_a_fact_is_believed_is_said_in_sentences() -> None:
    claims = [
        say(1, "Anna", "lives in", "Lyon", quote="Anna is in Lyon now"),
        say(2, "Anna", "lives in", "Lyon", by="rules"),
        say(3, "Anna", "lives in", "Lyon", by="person", speaker="assistant"),
        say(9, "Anna", "lives in", "Porto", speaker="user"),
    ]
    lyon, porto = facts_of(claims)
    read = "The user said on 2026-01-10 that Anna lives in Porto (read by the model)."
    assert lyon.why() == [
        "The user said on 2026-01-02: “Anna is in Lyon now” (read by the model).",
        "The user said on 2026-01-03 that Anna lives in Lyon (read by rule).",
        "The assistant said on 2026-01-04 that Anna lives in Lyon (entered by hand).",
        f"It ended on 2026-01-10: {read}",
    ]
    assert porto.why() == [read]
    assert (lyon.id, lyon.said, porto.said) == (claims[0].id, claims[2].said, claims[3].said)
    # what was never so now has not been ended by anything
    lived = home(1, "Rome", "lived in")
    assert only(lived).why() == ["The user said on 2026-01-02 that Tom lives in Rome (read by the model)."]
    # said once more to be over, it is still over for the first reason; and so again it is for none
    rome, bonn = home(1, "Rome"), home(2, "Bonn")
    assert [
        fact.closed_by for fact in facts_of([rome, bonn, home(3, "Rome", "lived in")]) if fact.object.id == "rome"
    ] == [bonn]
    assert [fact.closed_by for fact in facts_of([rome, bonn, home(3, "Rome")]) if fact.object.id == "rome"] == [None]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (("I", "favourite colour", "blue"), "The user has the favourite colour blue: IS true"),
        (("Eva", "is the sister of", "me"), "Eva is the sister of the user: IS true"),
        (("Tom", "likes", "tea"), "Tom likes tea: IS true"),
        (("Tom", "knows the history of", "Rome"), "Tom knows the history of Rome: IS true"),
        (("Tom", "is afraid to meet", "Eva"), "Tom is afraid to meet Eva: IS true"),
    ],
)
def test_a_fact_reads_like_a_sentence(said: tuple[str, str, str], line: str) -> None:
    assert lines(say(1, *said)) == [f"{line} (said 2026-01-02)"]


def home(day: int, place: str, relation: str = "lives in", **values: Any) -> Claim:
    return say(day, "Tom", relation, place, **values)


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        # the earliest date since when something is so is kept, and one that is told later does not shorten it
        ([home(1, "Rome", since="2020"), home(2, "Rome", since="2018"), home(3, "Rome", since="2022")],
         ["Rome: IS true since 2018 (said 2026-01-04)"]),
        # told of the same date or a later one it follows; without one, from the day on which it was said
        ([home(1, "Rome", since="2020"), home(2, "Bonn", since="2020")],
         ["Bonn: IS true since 2020 (said 2026-01-03)", "Rome: WAS true since 2020 until 2020 (said 2026-01-02)"]),
        ([home(1, "Rome", since="2020"), home(2, "Bonn")],
         ["Bonn: IS true (said 2026-01-03)", "Rome: WAS true since 2020 until 2026-01-03 (said 2026-01-02)"]),
        # what was so and ended is so again: nothing is left of its first time
        ([home(1, "Rome", since="2011"), home(2, "Bonn"), home(3, "Rome")],
         ["Bonn: WAS true until 2026-01-04 (said 2026-01-03)", "Rome: IS true (said 2026-01-04)"]),
        # what was so is history from the start, with the dates that it was told with
        ([home(1, "Rome", "lived in", since="2001", until="2005")],
         ["Rome: WAS true since 2001 until 2005 (said 2026-01-02)"]),
        ([home(1, "Rome", "lived in", until="2005"), home(2, "Rome", "lived in")],
         ["Rome: WAS true until 2005 (said 2026-01-03)"]),
        ([home(1, "Rome", "lived in")], ["Rome: WAS true (said 2026-01-02)"]),
        # and does not end what is so elsewhere
        ([home(1, "Bonn"), home(2, "Rome", "lived in")],
         ["Bonn: IS true (said 2026-01-02)", "Rome: WAS true (said 2026-01-03)"]),
        # it is over since the date that it was told with
        ([home(1, "Rome", since="2011"), home(2, "Rome", "no longer lives in", until="2024")],
         ["Rome: WAS true since 2011 until 2024 (said 2026-01-03)"]),
        # an end that is known beforehand
        ([home(1, "Rome", until="2027")], ["Rome: IS true until 2027 (said 2026-01-02)"]),
        # the assistant closes nothing that the user said, and what it was told first is corrected
        ([home(1, "Rome", speaker="assistant"), home(2, "Bonn", speaker="assistant")],
         ["Bonn: IS true (said 2026-01-03)", "Rome: WAS true until 2026-01-03 (said 2026-01-02)"]),
        ([home(1, "Bonn"), home(2, "Rome", "lived in", speaker="assistant")],
         ["Bonn: IS true (said 2026-01-02)", "Rome: WAS true (said 2026-01-03)"]),
        ([home(1, "Bonn"), home(2, "Bonn", "no longer lives in", speaker="assistant")],
         ["Bonn: IS true (said 2026-01-03)"]),
        # what was over is not ended again by what comes after it
        ([home(1, "Rome"), home(2, "Rome", "no longer lives in", until="2024"), home(5, "Bonn")],
         ["Bonn: IS true (said 2026-01-06)", "Rome: WAS true until 2024 (said 2026-01-03)"]),
        ([home(1, "Rome"), home(2, "Rome", "no longer lives in"), home(5, "Bonn", speaker="assistant")],
         ["Bonn: IS true (said 2026-01-06)", "Rome: WAS true until 2026-01-03 (said 2026-01-03)"]),
        # and what was so before does not keep what is so now from being ended
        ([home(1, "Bonn"), home(2, "Rome", "lived in"), home(3, "Porto")],
         ["Bonn: WAS true until 2026-01-04 (said 2026-01-02)", "Porto: IS true (said 2026-01-04)",
          "Rome: WAS true (said 2026-01-03)"]),
        # dates that are told later are taken, and of an earlier time of it they change nothing
        ([home(1, "Rome", "lived in"), home(2, "Rome", "lived in", since="2001")],
         ["Rome: WAS true since 2001 (said 2026-01-03)"]),
        ([home(1, "Rome"), home(2, "Rome", "no longer lives in", since="2001")],
         ["Rome: WAS true since 2001 until 2026-01-03 (said 2026-01-03)"]),
        ([home(1, "Rome", until="2027"), home(2, "Rome")], ["Rome: IS true until 2027 (said 2026-01-03)"]),
        ([home(1, "Rome", "lived in", since="2011", until="2015"), home(2, "Rome", "lived in", until="2005")],
         ["Rome: WAS true since 2011 until 2015 (said 2026-01-03)"]),
    ],
)  # fmt: skip
def test_dates_say_since_when_and_until_when(claims: list[Claim], expected: list[str]) -> None:
    assert lines(*claims) == [f"Tom lives in {one}" for one in expected]


def test_a_bond_is_over_when_one_end_says_so_and_doubted_when_the_assistant_says_otherwise() -> None:
    bond = say(1, "Tom", "married to", "Eva")
    for other, state in (
        (say(5, "Tom", "divorced", "Eva"), "was"),
        (say(5, "Jan", "married to", "Tom"), "was"),
        (say(5, "Eva", "married to", "Jan"), "was"),
        (say(5, "Eva", "married to", "Jan", speaker="assistant"), "is"),
    ):
        found = {frozenset((f.subject.id, f.object.id)): f for f in facts_of([bond, other])}
        assert found[frozenset(("tom", "eva"))].state == state, other
        rest = [fact for ends, fact in found.items() if ends != {"tom", "eva"}]
        assert [fact.state for fact in rest] == ([] if other.holds == "was" else ["doubted" if state == "is" else "is"])
    # a relation that binds nobody leaves room for others
    liked = lines(say(1, "Tom", "likes", "tea"), say(2, "Tom", "likes", "milk"))
    assert liked == ["Tom likes milk: IS true (said 2026-01-03)", "Tom likes tea: IS true (said 2026-01-02)"]
    # nor does a place have one inhabitant
    lived = lines(home(1, "Rome"), say(2, "Eva", "lives in", "Rome"))
    assert lived == ["Eva lives in Rome: IS true (said 2026-01-03)", "Tom lives in Rome: IS true (said 2026-01-02)"]


def test_the_ends_of_a_bond_stand_in_the_order_of_those_they_are() -> None:
    # under his other name he stands before her
    names = Names(1, ["aaron", "ann", "tom"], [alias := say(3, "Tom", "also called", "Aaron")])
    bond, again = say(1, "Tom", "married to", "Ann"), say(2, "Aaron", "married to", "Ann")
    (fact,) = [fact for fact in facts_of([bond, again, alias], names.entity) if fact.relation == "is married to"]
    assert (fact.subject.id, fact.object.id, fact.claims) == ("aaron", "ann", (bond, again))


def test_of_spellings_used_as_often_the_longer_one_is_shown_and_a_kind_says_more_than_none() -> None:
    facts = facts_of([say(1, "Jose", "likes", "tea"), say(2, "José", "likes", "milk", subject_kind="person"),
                      say(3, "I", "like", "tea", subject_kind="thing")])  # fmt: skip
    assert {(fact.subject.id, fact.subject.name, fact.subject.kind) for fact in facts} == {
        ("jose", "José", "person"),
        ("@user", "the user", "person"),
    }


def test_two_names_of_one_entity_say_nothing_of_each_other() -> None:
    names = Names(1, ["anna", "annie"], [alias := say(3, "Annie", "also called", "Anna")])
    tea = say(2, "Annie", "likes", "tea")
    found = facts_of([say(1, "Annie", "likes", "Anna"), tea, alias], names.entity)
    assert {fact.claims for fact in found} == {(alias,), (tea,)}


def test_of_one_turn_what_is_counts() -> None:
    was, now = say(1, "Anna", "lived in", "Lyon"), say(1, "Anna", "lives in", "Lyon")
    assert distinct([was, now, was]) == [now]


PEOPLE, PLACES = st.sampled_from(["Anna", "anna", "Tom", "the user"]), st.sampled_from(["Lyon", "Porto", "Rome", "Eva"])
RELATIONS = st.sampled_from(["lives in", "used to live in", "likes", "married to", "divorced", "works at"])
CLAIMS = st.builds(
    lambda day, who, how, what, speaker, since, source: say(
        day, who, how, what, f"{source}", speaker=speaker, since=since
    ),
    st.integers(0, 30), PEOPLE, RELATIONS, PLACES, st.sampled_from(["user", "assistant"]),
    st.sampled_from([None, "2025", "2025-12", "2026-01-20", "2026-03"]), st.integers(0, 6),
)  # fmt: skip
TODAY = st.sampled_from(["", "2026-01-15", "2026-06-01"])
NAMES = st.sampled_from(["Anna", "Tom", "the user", "Eva", "Lyon"])
# cycles, an entity that is its own neighbour, two that are one and two again
ALIASES = st.lists(
    st.builds(lambda day, one, how, other, source: (day, one, how, other, source), st.integers(0, 3), NAMES,
              st.sampled_from(["also called", "aka", "is not called"]), NAMES, st.integers(0, 6))
    .filter(lambda told: told[1] != told[3])
    .map(lambda told: say(*told[:4], f"{told[4]}")),
    max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(CLAIMS, max_size=14), ALIASES, TODAY, st.randoms())
def test_any_order_of_arrival_makes_the_same_graph(
    claims: list[Claim], aliases: list[Claim], today: str, chance: random.Random
) -> None:
    # of one id the store keeps one claim
    kept = list({one.id: one for one in [*claims, *aliases]}.values())

    def graph(told: list[Claim]) -> tuple[list[Fact], list[str]]:
        names = Names(1, [], [one for one in told if one.relation == ALIAS])
        return facts_of(told, names.entity, today), names.with_aliases(["anna", "tom"])

    facts = graph(kept)
    shuffled = list(kept)
    chance.shuffle(shuffled)
    assert graph([*shuffled, *shuffled]) == facts


@settings(max_examples=60, deadline=None)
@given(st.lists(CLAIMS, max_size=14), TODAY)
def test_there_is_one_home_at_a_time_and_nothing_is_lost(claims: list[Claim], today: str) -> None:
    kept = list({one.id: one for one in claims}.values())
    facts = facts_of(kept, today=today)
    so = [fact for fact in facts if fact.state == "is" and not fact.ahead]
    for relation in ("lives in", "works at"):
        now = [fact.subject.id for fact in so if fact.relation == relation]
        assert len(now) == len(set(now))
    married = [end for fact in so if fact.relation == "is married to" for end in (fact.subject, fact.object)]
    assert len({end.id for end in married}) == len(married)
    assert sorted(one.id for fact in facts for one in fact.claims) == sorted(one.id for one in kept)
    assert all(0 < fact.confidence <= 1 for fact in facts)


@settings(max_examples=40, deadline=None)
@given(st.lists(CLAIMS, max_size=12), st.integers(0, 6))
def test_without_a_source_the_graph_is_as_if_it_had_never_been(claims: list[Claim], source: int) -> None:
    kept = list({one.id: one for one in claims}.values())
    left = [one for one in kept if one.source != str(source)]
    ids = {one.id for fact in facts_of(left) for one in fact.claims}
    assert ids == {one.id for one in left}
    assert all(one.source != str(source) for fact in facts_of(left) for one in fact.claims)
