"""What the judge is shown of the conversation that led to an answer."""

from __future__ import annotations

from typing import Any

import pytest

from services.critic.critic import found_by, gradeable, instruction_of, shortened, with_found
from services.critic.rubrics import Rubric, rubric_for
from shared.contracts import ResponseGeneration, ToolCallRecord


def response(answer: str = "a", **values: Any) -> ResponseGeneration:
    return ResponseGeneration(
        **{
            "query_id": "1-0",
            "response_id": "1-0:A",
            "session_id": "s",
            "user_id": "u",
            "respondent_id": "A",
            "generator_id": "g",
            "query": "q",
            "answer": answer,
            "model": "m",
            "finish_reason": "stop",
            **values,
        }
    )


def call(result: str, error: str | None = None) -> ToolCallRecord:
    return ToolCallRecord(tool="web_search", args={}, result=result, error=error, call_id="c")


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_first_question_stands_by_itself() -> None:
    assert instruction_of("Why?", []) == "Why?"
    assert instruction_of("Why?", [said("system", "Be kind."), said("user", "  ")]) == "Why?"


def test_the_conversation_comes_before_the_question_in_its_order() -> None:
    before = [said("user", "One?"), said("system", "Be kind."), said("assistant", "Two."), said("user", " \n")]
    assert instruction_of("Why?", before) == (
        "The conversation so far:\nUser: One?\nAssistant: Two.\n\nThe user's message to answer now:\nWhy?"
    )


def test_nothing_is_shown_from_before_what_has_no_room() -> None:
    before = [said("user", "oldest"), said("assistant", "y" * 300), *[said("user", "x" * 1_950)] * 3]
    told = instruction_of("Why?", before)
    assert told.count("x") == 3 * 1_950
    assert "y" not in told.partition("The user's message")[0]
    assert "oldest" not in told


def test_a_long_message_is_shortened_and_the_conversation_around_it_stays() -> None:
    long = "begins " + "x" * 20_000 + " ends"
    before = [said("user", "the oldest"), said("assistant", long), said("user", "the newest")]
    told = instruction_of("Why?", before)
    assert "User: the oldest\nAssistant: begins xxx" in told
    assert "x […] x" in told
    assert "x ends\nUser: the newest\n" in told
    assert told.count("x") < 2_000


def test_the_newest_messages_that_there_is_room_for_are_shown() -> None:
    before = [said("user", f"{n} " + "x" * 1_500) for n in range(20)]
    told = instruction_of("Why?", before)
    assert len(told) < 6_200
    assert [n for n in range(20) if f"User: {n} x" in told] == [16, 17, 18, 19]


@pytest.mark.parametrize("most", [200, 201, 999])
def test_what_is_shortened_has_its_beginning_and_its_end(most: int) -> None:
    text = "".join(chr(33 + n % 90) for n in range(1_000))
    cut = shortened(text, most)
    assert len(cut) == most
    assert text.startswith(cut.split(" […] ")[0])
    assert text.endswith(cut.split(" […] ")[1])
    # two thirds of it the beginning
    begins, ends = map(len, cut.split(" […] "))
    assert 2 * ends <= begins <= 2 * ends + 2
    assert shortened(text, 1_000) == text
    assert shortened(text, 199) == ""


def test_what_was_found_is_context_and_each_answers_own_is_there_once() -> None:
    assert with_found("Why?") == with_found("Why?", "", "") == "Why?"
    told = with_found("Why?", "one", "two")
    assert told.startswith(
        "Why?\n\nWhat the assistant was given or had found when it answered (context, not an answer):"
    )
    assert told.endswith("\none\n\ntwo")
    assert with_found("Why?", "same", "same").count("same") == 1
    both = with_found("Why?", "a" * 8_000, "b" * 8_000)
    assert 3_900 < both.count("a") < 4_100
    assert 3_900 < both.count("b") < 4_100


def test_answers_without_words_and_by_choice_those_of_tools_are_left_out() -> None:
    assert gradeable(response(), skip_tool_answers=True)
    assert not gradeable(response(" \n"), skip_tool_answers=False)
    searched = response(tool_calls=[call("found")])
    assert gradeable(searched, skip_tool_answers=False)
    assert not gradeable(searched, skip_tool_answers=True)


def test_what_was_found_has_what_stood_before_the_question() -> None:
    assert found_by(response(material="It is teal.\n")) == "Given with the question: It is teal."
    both = found_by(response(material="It is teal.", tool_calls=[call("one")]))
    assert both == "Given with the question: It is teal.\n\nweb_search: one"
    crowded = found_by(response(material="m" * 20_000, tool_calls=[call("x" * 20_000)]))
    assert len(crowded) == 8_000
    assert 3_900 < crowded.count("m") < 4_000
    assert crowded.count("x") > 3_000
    # what was found is whole where it leaves room
    roomy = found_by(response(material="m" * 20_000, tool_calls=[call("x" * 100)]))
    assert (roomy.count("x"), len(roomy)) == (100, 8_000)


def test_what_was_found_is_what_tools_found_within_bounds() -> None:
    calls = [call("one"), call("[tool error: no]", "no"), call("two")]
    assert found_by(response(tool_calls=calls)) == "web_search: one\n\nweb_search: two"
    assert found_by(response()) == ""
    assert len(found_by(response(tool_calls=[call("x" * 20_000)]))) == 8_000


@pytest.mark.parametrize("name", ["search_memory", "recall_memory", "search_memories"])
def test_rubric_of_an_older_tool_name_fits_the_tool(name: str) -> None:
    rubrics = {one: Rubric(one, "") for one in ("realistic", "style")}
    assert rubric_for(["search_memory"], {name: "style"}, rubrics) == rubrics["style"]
