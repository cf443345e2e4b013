"""What the judge is shown of the conversation that led to an answer."""

from __future__ import annotations

from typing import Any

import pytest

from services.critic.critic import gradeable, instruction_of, reference_of
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


@pytest.mark.parametrize(("length", "shown"), [(5_900, True), (6_000, False)])
def test_only_the_newest_messages_that_there_is_room_for_are_shown(length: int, shown: bool) -> None:
    before = [said("user", "the oldest"), said("assistant", "x" * length), said("user", "the newest")]
    told = instruction_of("Why?", before)
    assert "User: the newest\n" in told
    assert ("x" * length in told) is shown
    # nothing is left out of the middle
    assert ("the oldest" in told) is (length + 60 < 6_000)
    assert len(told) < 6_200


def test_answers_without_words_and_by_choice_those_of_tools_are_left_out() -> None:
    assert gradeable(response(), skip_tool_answers=True)
    assert not gradeable(response(" \n"), skip_tool_answers=False)
    searched = response(tool_calls=[call("found")])
    assert gradeable(searched, skip_tool_answers=False)
    assert not gradeable(searched, skip_tool_answers=True)


def test_the_reference_has_what_stood_before_the_question() -> None:
    assert reference_of(response(material="It is teal.\n")) == "Given with the question: It is teal."
    both = reference_of(response(material="It is teal.", tool_calls=[call("one")]))
    assert both == "Given with the question: It is teal.\n\nweb_search: one"
    crowded = reference_of(response(material="m" * 20_000, tool_calls=[call("x" * 20_000)]))
    assert len(crowded) == 8_000
    assert 3_900 < crowded.count("m") < 4_000
    assert crowded.count("x") > 3_000
    # what was found is whole where it leaves room
    assert reference_of(response(material="m" * 20_000, tool_calls=[call("x" * 100)])).count("x") == 100


def test_the_reference_is_what_tools_found_within_bounds() -> None:
    calls = [call("one"), call("[tool error: no]", "no"), call("two")]
    assert reference_of(response(tool_calls=calls)) == "web_search: one\n\nweb_search: two"
    assert reference_of(response()) == ""
    assert len(reference_of(response(tool_calls=[call("x" * 20_000)]))) == 8_000
