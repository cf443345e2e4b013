"""Each check of a story, fulfilled and not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from local2_stories.bus_tap import BusMessage
from local2_stories.checks import Outcome, Seen, check_turn
from local2_stories.story import Turn

CALL = {
    "tool": "web_fetch",
    "args": {},
    "result": "URL: x\nExtracted text:\nkeepers climbed towers polished lenses harbour entrance",
}
GENERATION = {"query_id": "5-0", "response_id": "5-0:A", "thinking": "hm", "tool_calls": []}
REPLY: dict[str, Any] = {
    "query_id": "5-0",
    "answer": "Paris is the capital. It’s  lovely.",
    "thinking": "hm",
    "tool_calls": [],
    "event_log": [{"subject": "query.received", "stream": "local2:query.received", "id": "5-0"}],
}
EVENTS = ("query.received", "tool.request.a", "tool.result.a", "response.generation")
PAIR = {
    "original_query_id": "5-0",
    "query_id_a": "5-0:A",
    "query_id_b": "5-0:B",
    "winner": "A",
    "score_a": 4,
    "score_b": 3,
}
BOTH = [
    {"id": "5-0:A", "respondent_id": "A", "pairwise_winner": True, "pairwise_verdict": "A"},
    {"id": "5-0:B", "respondent_id": "B", "pairwise_winner": False, "pairwise_verdict": "A"},
]
TIE = [{**engram, "pairwise_winner": None, "pairwise_verdict": "tie"} for engram in BOTH]
COMPARED = {"engrams": {"respondents": ["A", "B"], "annotated": ["pairwise_winner"]}}


def seen(reply: dict[str, Any] | None = None, **more: Any) -> Seen:
    """What was seen, with the messages of `events`, `generations`, `critiques` and `pairwise` on the bus, and those
    of every call that the reply tells."""
    told = {**REPLY, **(reply or {})}
    answer = {"answer": told["answer"]}
    generations = [{**answer, **g} for g in more.pop("generations", [{**GENERATION, **answer}])]
    critiques, pairwise = more.pop("critiques", []), more.pop("pairwise", [])
    subjects = more.pop("events", EVENTS)
    bus = [BusMessage(subject, f"5-{n}", {}) for n, subject in enumerate(subjects) if subject != "response.generation"]
    for call_id, call in enumerate(told["tool_calls"] or (), 1):
        call["call_id"] = f"c{call_id}"
        asked = {"call_id": call["call_id"]}
        bus += [BusMessage(f"tool.request.{call['tool']}", f"6-{call_id}", asked)]
        bus += [BusMessage(f"tool.result.{call['tool']}", f"7-{call_id}", asked, causation_id=f"6-{call_id}")]
    kinds = (("response.generation", generations), ("critique.result", critiques), ("pairwise.result", pairwise))
    bus += [BusMessage(kind, f"8-{n}", p) for kind, payloads in kinds for n, p in enumerate(payloads)]
    return Seen(told, bus, **more)


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
        ({"expected_bus_events": {"present": ["tool.request.a"]}}, seen(), seen(events=["query.received"])),
        (
            {"expected_bus_events": {"absent": ["tool.request.b"]}},
            seen(),
            seen(events=["query.received", "tool.request.b"]),
        ),
        (
            {"expected_bus_events": {"in_order": ["tool.request.a", "response.generation"]}},
            seen(),
            seen(events=["query.received"]),
        ),
        ({"expected_bus_events": {"absent": ["tool.request.c*"]}}, seen(), seen(events=["tool.request.cd"])),
        ({"expected_bus_events": {"present": ["tool.*"]}}, seen(), seen(events=["query.received"])),
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
        ({"pairwise": {"fields": ["score_b"]}}, seen(pairwise=[PAIR]), seen(pairwise=[{**PAIR, "score_b": None}])),
        ({"pairwise": {"fields": ["score_b"]}}, seen(pairwise=[PAIR]), seen(pairwise=[{**PAIR, "score_b": 6}])),
        ({"pairwise": {"fields": ["reason"]}}, seen(pairwise=[{**PAIR, "reason": "x"}]), seen(pairwise=[PAIR])),
        (COMPARED, seen(pairwise=[PAIR], engrams=BOTH), seen(pairwise=[PAIR], engrams=TIE)),
        (COMPARED, seen(pairwise=[PAIR], engrams=BOTH), seen(engrams=BOTH)),
        (
            COMPARED,
            seen(pairwise=[{**PAIR, "winner": "tie"}], engrams=TIE),
            seen(pairwise=[{**PAIR, "winner": "B"}], engrams=BOTH),
        ),
        ({"preferences": {"dpo": 1}}, seen(dpo=[{}]), seen()),
        ({"preferences": {"dpo": 0}}, seen(), seen(dpo=[{}])),
        ({}, seen(), seen(generations=[{**GENERATION, "answer": "what B said"}])),
        ({}, seen(), seen({"event_log": []})),
        ({}, seen(), seen({"event_log": [{"stream": "local2:tool.request.x", "id": "6-0"}]})),
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


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ({"payload": {"call_id": "another"}}, "the result of web_fetch names its call and its request"),
        ({"causation_id": "1-1"}, "the result of web_fetch names its call and its request"),
    ],
)
def test_a_result_that_is_not_that_of_its_call_fails_by_name(wrong: dict[str, Any], check: str) -> None:
    right = seen({"tool_calls": [CALL]})
    assert [o.check for o in check_turn(Turn(query="x"), right) if not o.ok] == []
    bus = [
        replace(message, **wrong) if message.subject == "tool.result.web_fetch" else message for message in right.bus
    ]
    assert [o.check for o in check_turn(Turn(query="x"), replace(right, bus=bus)) if not o.ok] == [check]


def test_a_call_that_never_left_is_told_with_an_error_and_no_other() -> None:
    right = seen({"tool_calls": [CALL]})
    bus = [message for message in right.bus if not message.subject.startswith("tool.")]
    said = [o.check for o in check_turn(Turn(query="x"), replace(right, bus=bus)) if not o.ok]
    assert said == ["web_fetch was asked on the bus"]
    unknown = seen({"tool_calls": [{**CALL, "error": "unknown tool: 'web_fetch'"}]})
    assert [o for o in check_turn(Turn(query="x"), replace(unknown, bus=bus)) if not o.ok] == []


def test_what_another_respondent_did_is_not_what_the_shown_answer_led_to() -> None:
    usual = seen()
    theirs = BusMessage("tool.request.x", "6-0", {}, respondent_id="B")
    turn = Turn.model_validate({"query": "x", "expected_bus_events": {"absent": ["tool.request.x"]}})
    assert [o for o in check_turn(turn, replace(usual, bus=[*usual.bus, theirs])) if not o.ok] == []


def test_messages_are_in_the_order_of_the_bus_also_within_a_millisecond() -> None:
    said = ["response.generation", "tool.result.x", "query.received", "tool.request.x"]
    found = sorted([BusMessage(subject, "5-0", {}) for subject in said], key=BusMessage.place)
    assert [message.subject for message in found] == said[2:] + said[1::-1]
    late = BusMessage("query.received", "6-0", {})
    assert sorted([late, *found], key=BusMessage.place)[-1] is late
