"""Rows for trainers: what is chosen, what is left out, and what each row says of its origin."""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import pytest

from services.reward.export import Filters, LeftOut, critique_rows, dpo_rows, kto_rows, nothing_because, row_digest
from services.reward.service import bounded, exchange, instructed
from shared.contracts import ToolCallRecord

ANYBODY: dict[str, bool] = {}


def answer(name: str = "1-0:A", **values: Any) -> dict[str, Any]:
    query_id, _, respondent = name.partition(":")
    return {
        "response_id": name,
        "query_id": query_id,
        "session_id": f"s{query_id}",
        "user_id": "ann",
        "answer": f"answer of {respondent}",
        "messages": orjson.dumps([{"role": "user", "content": f"question {query_id}"}]).decode(),
        "config": f"config {respondent}",
        "intent": "question",
        "time": 1_000,
        "vote": None,
        "score": None,
        "feedback": "Clear.",
        "rubric": "realistic",
        "tools": 0,
        "calls": "",
        "material": 0,
        "judges": "",
        "judged": orjson.dumps([{"role": "user", "content": f"Grade the answer to {query_id}"}]).decode(),
        **values,
    }


def pair(winner: str = "A", query: str = "1-0", **values: Any) -> dict[str, Any]:
    given = {"judges": "", "vote_a": None, "vote_b": None, "score_a": None, "score_b": None, **values}
    a, b = given.pop("a", {}), given.pop("b", {})
    return {"winner": winner, "a": answer(f"{query}:A", **a), "b": answer(f"{query}:B", **b), **given}


def dpo(*pairs: dict[str, Any], consents: dict[str, bool] = ANYBODY, **filters: Any) -> list[dict[str, Any]]:
    return list(dpo_rows(pairs, consents, Filters(**filters)))


def kto(*answers: dict[str, Any], consents: dict[str, bool] = ANYBODY, **filters: Any) -> list[dict[str, Any]]:
    return list(kto_rows(answers, consents, Filters(**filters)))


def critiques(*answers: dict[str, Any], consents: dict[str, bool] = ANYBODY, **filters: Any) -> list[dict[str, Any]]:
    return list(critique_rows(answers, consents, Filters(**filters)))


def called(**values: Any) -> list[dict[str, Any]]:
    """One call of a tool and its result, as messages."""
    given = {"tool": "calculate", "args": {"expression": "6*7"}, "result": "42", "call_id": "c1", **values}
    return exchange([ToolCallRecord(**given)])


def with_calls(**values: Any) -> dict[str, Any]:
    return {"tools": 1, "calls": bounded(called(**values))}


@pytest.mark.parametrize(("winner", "loser"), [("A", "B"), ("B", "A")])
def test_the_winner_is_chosen_and_the_loser_rejected(winner: str, loser: str) -> None:
    (row,) = dpo(pair(winner, score_a=4, score_b=2))
    assert row["prompt"] == [{"role": "user", "content": "question 1-0"}]
    assert row["chosen"] == [{"role": "assistant", "content": f"answer of {winner}"}]
    assert row["rejected"] == [{"role": "assistant", "content": f"answer of {loser}"}]
    assert row["provenance"] == {
        "query_id": "1-0",
        "session_id": "s1-0",
        "intent": "question",
        "time": 1_000,
        "source": "judge",
        "judges": "",
        "graded": True,
        "margin": 2.0 if winner == "A" else -2.0,
        "same_prompt": True,
        "chosen_config": f"config {winner}",
        "rejected_config": f"config {loser}",
        "chosen_id": f"1-0:{winner}",
        "rejected_id": f"1-0:{loser}",
    }


def test_what_teaches_nothing_is_left_out_and_the_rest_goes_on() -> None:
    same = pair("A", "2-0", a={"answer": "Yes. "}, b={"answer": "Yes."})
    rows = dpo(pair("tie", "1-0"), same, pair("B", "3-0"))
    assert [row["provenance"]["query_id"] for row in rows] == ["3-0"]


@pytest.mark.parametrize(
    ("winner", "votes", "wanted"),
    [
        # for the winner, against the loser: a person says the same
        ("A", (1.0, None), "judge and person"),
        ("A", (None, -1.0), "judge and person"),
        ("B", (None, 1.0), "judge and person"),
        ("B", (-1.0, None), "judge and person"),
        ("B", (-0.5, 0.5), "judge and person"),
        # against the winner, for the loser: the verdict is not used
        ("A", (-1.0, None), None),
        ("A", (None, 1.0), None),
        ("B", (None, -1.0), None),
        ("B", (1.0, None), None),
        ("A", (1.0, 1.0), None),
        ("A", (-1.0, -1.0), None),
        # neither
        ("A", (0.0, 0.0), "judge"),
        ("B", (None, None), "judge"),
    ],
)
def test_a_persons_vote_bears_a_verdict_out_or_takes_it_out(
    winner: str, votes: tuple[float | None, float | None], wanted: str | None
) -> None:
    judged = pair(winner, vote_a=votes[0], vote_b=votes[1])
    assert [row["provenance"]["source"] for row in dpo(judged)] == ([] if wanted is None else [wanted])
    borne_out = wanted == "judge and person"
    assert len(dpo(judged, human_only=True)) == borne_out


def test_a_margin_is_the_winners_lead_and_an_ungraded_pair_has_none() -> None:
    led = pair("B", "1-0", score_a=2, score_b=5)
    behind = pair("B", "2-0", score_a=5, score_b=2)
    half = pair("A", "3-0", score_a=5)
    other_half = pair("A", "4-0", score_b=1)
    every = dpo(led, behind, half, other_half)
    assert [(row["provenance"]["graded"], row["provenance"]["margin"]) for row in every] == [
        (True, 3.0), (True, -3.0), (False, 0.0), (False, 0.0),
    ]  # fmt: skip
    assert [row["provenance"]["query_id"] for row in dpo(led, behind, half, min_margin=3)] == ["1-0"]
    assert dpo(led, min_margin=3.5) == []
    assert dpo(behind, half, min_margin=0.5) == []


def test_it_is_told_when_the_two_went_on_from_different_conversations() -> None:
    (row,) = dpo(pair("A", b={"messages": "[]"}))
    assert row["provenance"]["same_prompt"] is False


def test_filters_admit_from_one_time_to_before_another_and_only_who_agreed() -> None:
    answers = [answer(f"{n}-0:A", time=n, vote=1, score=5, user_id=user) for n, user in ((1, "ann"), (2, "bob"))]
    pairs = [pair("A", f"{n}-0", a={"time": n, "user_id": user}) for n, user in ((1, "ann"), (2, "bob"))]
    for rows, items in ((kto, answers), (critiques, answers), (dpo, pairs)):
        for filters, wanted in (
            ({}, ["1-0", "2-0"]),
            ({"since": 2}, ["2-0"]),
            ({"until": 2}, ["1-0"]),
            ({"since": 1, "until": 2}, ["1-0"]),
            ({"since": 2, "until": 2}, []),
            ({"consent": True}, ["2-0"]),
            ({"consent": False}, ["1-0", "2-0"]),
        ):
            found = rows(*items, consents={"bob": True}, **filters)  # type: ignore[arg-type]
            assert [row["provenance"]["query_id"] for row in found] == wanted, (rows, filters)
    assert kto(answers[0], consent=True) == [], "who was never asked has not agreed"
    for filters in ({}, {"consent": True}, {"consent": False}):
        for rows, items in ((kto, answers), (critiques, answers), (dpo, pairs)):
            found = rows(*items, consents={"bob": True, "ann": False}, **filters)  # type: ignore[operator]
            assert [row["provenance"]["query_id"] for row in found] == ["2-0"], "who refused is in no file"


def test_an_export_without_rows_says_why() -> None:
    left_out: LeftOut = Counter()
    same = pair(b={"answer": "answer of A "})
    pairs = [pair("tie"), pair("tie"), pair(a={"user_id": "ben"}), pair(vote_a=-1.0), same]
    assert list(dpo_rows(pairs, {"ben": False}, Filters(), left_out)) == []
    assert nothing_because("dpo", left_out) == (
        "no rows: of 5 verdicts all are left out: 2 ties, 1 of users who refused training, 1 contradicted by a vote, "
        "1 of two answers that are the same"
    )
    left_out.clear()
    answers = [answer(score=3), answer(score=4, time=1), answer(vote=1, score=5, time=9)]
    assert list(kto_rows(answers, ANYBODY, Filters(min_margin=4, until=9), left_out)) == []
    assert left_out == {
        "that are neither good nor bad": 1,
        "with too small a margin": 1,
        "not of the time asked for": 1,
    }
    left_out.clear()
    wanted = Filters(human_only=True, consent=True)
    assert list(critique_rows([answer(), *answers[1:]], ANYBODY, wanted, left_out)) == []
    assert left_out == {"without a grade": 1, "of users who have not agreed to training": 2}
    assert "there are no verdicts yet; a second respondent" in nothing_because("dpo", Counter())
    assert nothing_because("kto", Counter({"that nobody voted on": 2})) == (
        "no rows: of 2 answers with a grade or a vote all are left out: 2 that nobody voted on"
    )


REFUSED = {"refused": False, "ann": True}


@pytest.mark.parametrize(
    ("rows", "items", "filters", "why"),
    [
        (
            dpo_rows,
            [
                pair("tie"),
                pair(a={"user_id": "refused"}),
                pair(a={"material": 1}),
                pair(b={"material": 1}),
                pair(b=with_calls()),
                pair(b={"answer": " answer of A"}),
                pair(vote_a=-1.0, score_a=5, score_b=1),
                pair(vote_b=1.0, score_a=5, score_b=1),
                pair(score_a=5, score_b=1),
                pair(vote_a=1.0, score_a=3, score_b=1),
                pair(vote_a=1.0, score_a=5),
            ],
            {"min_margin": 2.5, "human_only": True},
            {
                "ties": 1,
                "of users who refused training": 1,
                "to files or passages, which are not kept": 2,
                "of which the two called other tools or were told something else by them": 1,
                "of two answers that are the same": 1,
                "contradicted by a vote": 2,
                "that no vote bears out": 1,
                "with too small a margin of grades": 2,
            },
        ),
        (
            kto_rows,
            [
                answer(),
                answer(score=3),
                answer(vote=0.0),
                answer(score=5, user_id="refused"),
                answer(score=5, material=1),
                answer(score=4),
                answer(vote=-0.5),
            ],
            {"min_margin": 1.1},
            {
                "that are neither good nor bad": 3,
                "of users who refused training": 1,
                "to files or passages, which are not kept": 1,
                "with too small a margin": 2,
            },
        ),
        (kto_rows, [answer(score=5), answer()], {"human_only": True}, {"that no vote bears out": 2}),
        (
            critique_rows,
            [
                answer(vote=1.0),
                # of several reasons the first is told
                answer(judged="", **with_calls()),
                answer(score=5, vote=1.0, user_id="refused"),
                answer(score=5),
                answer(score=4, vote=1.0),
                answer(score=2, vote=1.0),
                answer(score=5, vote=1.0, **with_calls()),
                answer(score=5, vote=1.0, judged=""),
            ],
            {"min_margin": 2, "human_only": True, "tools": "leave-out"},
            {
                "without a grade": 2,
                "of users who refused training": 1,
                "that nobody voted on": 1,
                "with too small a margin": 2,
                "with tool calls": 1,
                "of which it is not kept what the judge read": 1,
            },
        ),
    ],
)
def test_each_that_is_left_out_is_counted_once_and_the_next_is_taken(
    rows: Any, items: list[dict[str, Any]], filters: dict[str, Any], why: dict[str, int]
) -> None:
    left_out: LeftOut = Counter()
    compared: dict[str, Any] = {"vote_a": 1.0, "score_a": 5, "score_b": 1}
    last = pair(query="9-0", **compared) if rows is dpo_rows else answer("9-0:A", score=5, vote=1.0)
    found = list(rows([*items, last], REFUSED, Filters(**filters), left_out))
    assert [row["provenance"]["query_id"] for row in found] == ["9-0"]
    assert left_out == why


def test_what_is_asked_of_answers_with_tools_is_asked_of_no_others() -> None:
    for tools in ("include", "leave-out"):
        assert len(critiques(answer(score=4), tools=tools)) == len(kto(answer(score=4), tools=tools)) == 1
        assert len(dpo(pair(), tools=tools)) == 1
    assert len(critiques(answer(score=4, **with_calls()))) == 1


def test_a_share_of_the_sessions_is_for_testing_each_as_a_whole() -> None:
    names = [f"session-{n}" for n in range(400)]
    assert {Filters().split(name) for name in names} == {"train"}
    assert {Filters(test_share=1.0).split(name) for name in names} == {"test"}
    tested = {name for name in names if Filters(test_share=0.25).split(name) == "test"}
    assert 60 < len(tested) < 140
    # a larger share takes more in and none out
    assert tested < {name for name in names if Filters(test_share=0.5).split(name) == "test"}
    (row,) = kto(answer(vote=1), test_share=1.0)
    assert row["split"] == "test"


@pytest.mark.parametrize(
    ("vote", "score", "label", "value", "source"),
    [
        (1.0, None, True, 1.0, "person"),
        (-0.5, 5, False, -0.5, "person"),
        (0.0, 5, True, 1.0, "judge"),
        (None, 4, True, 0.5, "judge"),
        (None, 1, False, -1.0, "judge"),
    ],
)
def test_a_persons_vote_outweighs_a_grade(
    vote: float | None, score: int | None, label: bool, value: float, source: str
) -> None:
    (row,) = kto(answer(vote=vote, score=score))
    assert row["label"] is label
    assert row["completion"] == [{"role": "assistant", "content": "answer of A"}]
    assert {name: row["provenance"][name] for name in ("source", "value", "config", "response_id")} == {
        "source": source,
        "value": value,
        "config": "config A",
        "response_id": "1-0:A",
    }


def test_an_answer_that_nobody_thought_well_or_ill_of_is_no_row() -> None:
    rows = kto(answer(vote=None, score=3), answer(vote=0.0), answer(), answer("2-0:A", vote=1.0))
    assert [row["provenance"]["query_id"] for row in rows] == ["2-0"]
    assert kto(answer(score=5), human_only=True) == []
    assert len(kto(answer(vote=-1.0, score=5), human_only=True)) == 1


def test_the_least_distance_from_the_middle_is_asked_of_votes_and_grades_alike() -> None:
    answers = [answer("1-0:A", score=4), answer("2-0:A", score=1), answer("3-0:A", vote=0.5)]
    assert [row["provenance"]["query_id"] for row in kto(*answers, min_margin=1)] == ["1-0", "2-0", "3-0"]
    assert [row["provenance"]["query_id"] for row in kto(*answers, min_margin=2)] == ["2-0"]
    graded = [answer("1-0:A", score=4), answer("2-0:A", score=1), answer("3-0:A", score=3)]
    assert [row["provenance"]["query_id"] for row in critiques(*graded)] == ["1-0", "2-0", "3-0"]
    assert [row["provenance"]["query_id"] for row in critiques(*graded, min_margin=1)] == ["1-0", "2-0"]
    assert [row["provenance"]["query_id"] for row in critiques(*graded, min_margin=2)] == ["2-0"]


def test_a_critique_is_the_judges_words_on_what_it_read() -> None:
    (row,) = critiques(answer(score=4, vote=-0.5))
    assert row["prompt"] == [{"role": "user", "content": "Grade the answer to 1-0"}]
    assert row["completion"] == [{"role": "assistant", "content": "Clear. [RESULT] 4"}]
    assert row["score"] == 4
    told = row["provenance"]
    assert (told["source"], told["rubric"], told["voted"], told["vote"]) == ("judge", "realistic", True, -0.5)
    assert (told["config"], told["response_id"]) == ("config A", "1-0:A")
    (unvoted,) = critiques(answer(score=4))
    assert (unvoted["provenance"]["voted"], unvoted["provenance"]["vote"]) == (False, 0.0)
    rows = critiques(answer(), answer("2-0:A", score=2), answer("3-0:A", score=2, vote=0.0), human_only=True)
    assert [row["provenance"]["query_id"] for row in rows] == ["3-0"]


def test_rows_of_the_same_words_have_the_same_digest_wherever_they_come_from() -> None:
    (row,) = kto(answer("1-0:A", vote=1))
    (spaced,) = kto(answer("1-0:A", vote=1, answer="answer\n of   A", time=5, session_id="other"), test_share=1.0)
    assert row_digest(row) == row_digest(spaced)
    for change in ({"vote": -1}, {"answer": "another"}, {"messages": '[{"role": "user", "content": "else"}]'}):
        (different,) = kto(answer("1-0:A", **{"vote": 1, **change}))
        assert row_digest(row) != row_digest(different), change


# ── tools and what else the model had read ───────────────────────────────────────────────────────────────────────


def test_calls_and_results_stand_behind_the_question_in_the_form_of_trainers() -> None:
    (row,) = kto(answer(vote=1.0, **with_calls()))
    assert row["prompt"] == [
        {"role": "user", "content": "question 1-0"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "calculate", "arguments": {"expression": "6*7"}}}],
        },
        {"role": "tool", "name": "calculate", "content": "42"},
    ]
    assert row["completion"] == [{"role": "assistant", "content": "answer of A"}]
    assert len(exchange([ToolCallRecord(tool="t", args={}, result="r", call_id=str(n)) for n in range(3)])) == 6


def test_a_pair_is_kept_where_both_called_the_same_and_heard_the_same() -> None:
    same, other = with_calls(), with_calls(result="41")
    (row,) = dpo(pair(a=same, b=same))
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "tool"]
    assert [message["role"] for message in (*row["chosen"], *row["rejected"])] == ["assistant", "assistant"]
    for a, b in ((same, other), (same, {}), ({}, same)):
        left_out: LeftOut = Counter()
        assert list(dpo_rows([pair(a=a, b=b)], ANYBODY, Filters(), left_out)) == []
        assert "called other tools" in nothing_because("dpo", left_out)


@pytest.mark.parametrize(
    ("values", "filters", "why"),
    [
        (with_calls(), {"tools": "leave-out"}, "with tool calls"),
        # longer than is kept
        ({"tools": 1, "calls": ""}, {}, "with tool calls that are not kept"),
        ({"material": 1}, {}, "to files or passages, which are not kept"),
    ],
)
def test_an_answer_whose_prompt_cannot_be_whole_is_left_out_and_counted(
    values: dict[str, Any], filters: dict[str, Any], why: str
) -> None:
    for rows, items in (
        (kto_rows, [answer(vote=1.0, **values)]),
        (dpo_rows, [pair(a=values, b=values)]),
        (dpo_rows, [pair(b=values)]),
    ):
        left_out: LeftOut = Counter()
        assert list(rows(items, ANYBODY, Filters(**filters), left_out)) == []
        assert left_out == {why: 1}


@pytest.mark.parametrize(
    ("values", "filters", "why"),
    [
        ({"judged": ""}, {}, "of which it is not kept what the judge read"),
        ({"judged": None}, {}, "of which it is not kept what the judge read"),
        (with_calls(), {"tools": "leave-out"}, "with tool calls"),
    ],
)
def test_a_critique_without_what_the_judge_read_is_left_out(
    values: dict[str, Any], filters: dict[str, Any], why: str
) -> None:
    left_out: LeftOut = Counter()
    assert list(critique_rows([answer(score=4, **values)], ANYBODY, Filters(**filters), left_out)) == []
    assert left_out == {why: 1}


def test_instructions_are_one_message_in_front() -> None:
    asked = {"role": "user", "content": "q"}
    own, clients = {"role": "system", "content": "Own."}, {"role": "system", "content": "Be brief."}
    both = {"role": "system", "content": "Own.\n\nBe brief."}
    assert instructed("", [asked]) == [asked]
    assert instructed("Own.", [asked]) == [own, asked]
    assert instructed("", [clients, asked]) == [clients, asked]
    assert instructed("Own.", [asked, clients, asked]) == [both, asked, asked]


def test_more_than_is_kept_of_one_answer_is_not_kept() -> None:
    assert bounded([]) == ""
    assert bounded(called(result="x" * 200_000)) == ""
    assert orjson.loads(bounded(called(result="x" * 100_000)))[1]["content"] == "x" * 100_000


def test_what_each_of_several_judges_said_stands_beside_what_they_came_to() -> None:
    said = '[{"model": "one", "score": 4, "feedback": "Clear."}]'
    rows = [*dpo(pair(judges=said)), *kto(answer(score=4, judges=said)), *critiques(answer(score=4, judges=said))]
    assert [row["provenance"]["judges"] for row in rows] == [said] * 3
