"""Each check of a story, fulfilled and not."""

from __future__ import annotations

from typing import Any

import pytest

from services.cli.stories.checks import Outcome, Seen, check_turn
from services.cli.stories.story import Turn

CALL = {
    "tool": "web_fetch",
    "args": {},
    "result": "URL: x\nExtracted text:\nkeepers climbed towers polished lenses harbour entrance",
}
GENERATION = {"query_id": "5-0", "response_id": "5-0:A", "answer": "yes", "thinking": "hm", "tool_calls": []}
REPLY: dict[str, Any] = {
    "query_id": "5-0",
    "answer": "Paris is the capital. It’s  lovely.",
    "thinking": "hm",
    "tool_calls": [],
    "events": ["query.received", "tool.request.a", "tool.result.a", "response.generation"],
}
PAIR = {
    "original_query_id": "5-0",
    "query_id_a": "5-0:A",
    "query_id_b": "5-0:B",
    "winner": "A",
    "score_a": None,
    "score_b": 3,
}


def seen(reply: dict[str, Any] | None = None, **more: Any) -> Seen:
    return Seen({**REPLY, **(reply or {})}, **{"generations": [GENERATION], **more})


def failures(turn: dict[str, Any], what: Seen) -> list[Outcome]:
    return [o for o in check_turn(Turn.model_validate({"query": "What about the harbour?", **turn}), what) if not o.ok]


@pytest.mark.parametrize(
    ("turn", "good", "bad"),
    [
        ({"expected_content": ["paris"]}, seen(), seen({"answer": "Lyon"})),
        ({"expected_content": ["Paris", "capital"]}, seen(), seen({"answer": "Paris"})),
        ({"expected_content": [{"any_of": ["Lyon", "Paris"]}]}, seen(), seen({"answer": "Nice"})),
        ({"expected_content": ["it's lovely"]}, seen(), seen({"answer": "it is lovely"})),
        ({"must_not_contain": ["I cannot browse"]}, seen(), seen({"answer": "Sorry, i CANNOT  browse."})),
        ({"must_not_contain": ["I don't"]}, seen(), seen({"answer": "I don’t"})),
        ({"expected_bus_events": {"present": ["tool.request.a"]}}, seen(), seen({"events": ["query.received"]})),
        ({"expected_bus_events": {"absent": ["tool.request.b"]}}, seen(), seen({"events": ["tool.request.b"]})),
        (
            {"expected_bus_events": {"in_order": ["tool.request.a", "response.generation"]}},
            seen(),
            seen({"events": ["response.generation", "tool.request.a"]}),
        ),
        ({}, seen(), seen(generations=[])),
        ({}, seen(), seen(generations=[GENERATION, GENERATION])),
        (
            {"respondents": ["A", "B"]},
            seen(generations=[GENERATION, {**GENERATION, "response_id": "5-0:B"}]),
            seen(),
        ),
        ({"response_generation_checks": ["thinking_not_empty"]}, seen(), seen({"thinking": " "})),
        (
            {"response_generation_checks": ["thinking_not_empty"]},
            seen(),
            seen(generations=[{**GENERATION, "thinking": ""}]),
        ),
        ({"response_generation_checks": ["tool_calls_empty"]}, seen(), seen({"tool_calls": [CALL]})),
        ({"response_generation_checks": ["tool_calls_empty"]}, seen(), seen({"tool_calls": None})),
        (
            {"response_generation_checks": ["tool_calls_not_empty"]},
            seen({"tool_calls": [CALL]}, generations=[{**GENERATION, "tool_calls": [CALL]}]),
            seen({"tool_calls": [CALL]}),
        ),
        ({"response_generation_checks": ["answer_not_empty"]}, seen(), seen({"answer": ""})),
        (
            {"tool_calls": ["web_search", "web_fetch"]},
            seen({"tool_calls": [{"tool": "web_search"}, {"tool": "x"}, {"tool": "web_fetch"}]}),
            seen({"tool_calls": [{"tool": "web_fetch"}, {"tool": "web_search"}]}),
        ),
        (
            {"answer_uses_result_of": "web_fetch"},
            seen({"tool_calls": [CALL], "answer": "Keepers climbed towers and polished lenses."}),
            seen({"tool_calls": [CALL], "answer": "I could not read about the harbour entrance."}),
        ),
        (
            {"critique": {"min_score": 2}},
            seen(critiques=[{"response_id": "5-0:A", "score": 2}]),
            seen(critiques=[{"response_id": "5-0:A", "score": 1}]),
        ),
        ({"critique": {}}, seen(critiques=[{"response_id": "5-0:A", "score": 5}]), seen(critiques=[])),
        (
            {"critique": {}},
            seen(critiques=[{"response_id": "5-0:A", "score": 5}]),
            seen(critiques=[{"response_id": "5-0:A", "score": None}]),
        ),
        (
            {"critique": {}},
            seen(critiques=[{"response_id": "5-0:A", "score": 5}]),
            seen(critiques=[{"response_id": "5-0:A", "score": True}]),
        ),
        ({"pairwise": {"winner": ["A"]}}, seen(pairwise=[PAIR]), seen(pairwise=[{**PAIR, "winner": "tie"}])),
        ({"pairwise": {}}, seen(pairwise=[PAIR]), seen()),
        ({"pairwise": {}}, seen(pairwise=[PAIR]), seen(pairwise=[{**PAIR, "query_id_b": "5-0"}])),
        (
            {"pairwise": {"fields": ["score_a", "score_b"]}},
            seen(pairwise=[PAIR]),
            seen(pairwise=[{k: v for k, v in PAIR.items() if k != "score_a"}]),
        ),
        ({"engrams": {}}, seen(engrams=[{"id": "5-0:A", "respondent_id": "A"}]), seen()),
        (
            {"engrams": {"annotated": ["score"]}},
            seen(engrams=[{"id": "5-0:A", "respondent_id": "A", "score": 4}]),
            seen(engrams=[{"id": "5-0:A", "respondent_id": "A", "score": None}]),
        ),
        (
            {"engrams": {"respondents": ["A", "B"]}},
            seen(engrams=[{"respondent": "A"}, {"respondent": "B"}]),
            seen(engrams=[{"respondent": "A"}]),
        ),
        (
            {"deliberations": {"personas": ["P", "Q"]}},
            seen({"deliberations": [{"persona": p, "round": 1, "response": "x"} for p in "PQ"]}),
            seen({"deliberations": [{"persona": "P", "round": 1, "response": "x"}]}),
        ),
    ],
)
def test_a_check_holds_when_it_should_and_fails_when_it_should(turn: dict[str, Any], good: Seen, bad: Seen) -> None:
    assert failures(turn, good) == []
    assert len(failures(turn, bad)) >= 1


def test_a_failed_check_shows_what_was_seen_instead() -> None:
    (failure,) = failures({"expected_content": ["Lyon"]}, seen())
    assert failure == Outcome("answer contains 'Lyon'", False, "answer: Paris is the capital. It’s lovely.")


def test_a_word_of_the_question_does_not_count_as_use_of_a_result() -> None:
    text = "keepers towers harbour lenses polished climbed"
    reply = {"tool_calls": [CALL], "answer": text}
    assert failures({"answer_uses_result_of": "web_fetch"}, seen(reply)) == []
    assert failures({"query": text, "answer_uses_result_of": "web_fetch"}, seen(reply))
