"""Intent and entities by rule, and a model's answer as it may come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.memory.classify import by_rules, parsed
from services.memory.engram import Engram, merged


def turn(query: str, answer: str = "") -> Engram:
    return Engram(id="1-0:A", user_id="u", kind="turn", time=1, recorded=1, query=query, answer=answer)


@pytest.mark.parametrize(
    ("query", "intent"),
    [
        ("What is the capital of France?", "question"),
        ("Please remember my preferred language is Elixir.", "remember"),
        ("How do I like my coffee?", "recall"),
        ("What language do I prefer?", "recall"),
        ("What do you remember about Australian geography?", "recall"),
        ("How do I sort a list in Python?", "code"),
        ("What major AI news broke this week?", "lookup"),
        ("Hello there!", "chat"),
        ("Write a poem about rain.", "writing"),
        ("I like my coffee black.", "chat"),
        ("", "chat"),
    ],
)
def test_the_rules_name_an_intent(query: str, intent: str) -> None:
    assert by_rules(turn(query)).intent == intent


def test_what_the_turn_did_says_more_than_its_words() -> None:
    done = [{"tool": "web_search", "error": "search timeout after 10s"}, {"tool": "save_topic", "error": None}]
    assert by_rules(replace(turn("Elixir, by the way."), tool_calls=tuple(done))).intent == "remember"


def test_the_rules_find_names_and_no_sentence_beginnings() -> None:
    label = by_rules(turn("Who met Marie Curie in Paris?", "Pierre Curie met her. The Sorbonne was near."))
    assert set(label.entities) >= {"Marie Curie", "Paris", "Pierre Curie"}
    assert not {"Who", "The"} & set(label.entities)


def test_a_models_answer_is_read_also_with_words_around_it() -> None:
    label = parsed('Sure: {"intent": "question", "entities": ["Paris", "Paris", " ", 3]} Done.')
    assert label is not None
    assert (label.intent, label.entities, label.by) == ("question", ("Paris",), "model")


@pytest.mark.parametrize("text", ["", "no", "{", '{"intent": "dance", "entities": []}', '{"intent": "question"}', "[]"])
def test_what_is_no_label_is_none(text: str) -> None:
    assert parsed(text) is None


def test_a_models_label_counts_over_the_rules_whichever_comes_first() -> None:
    engram = turn("Hello")
    rules, model = by_rules(engram).note(engram), parsed('{"intent": "chat", "entities": []}')
    assert model is not None
    for first, second in ((rules, model.note(engram)), (model.note(engram), rules)):
        assert merged({"class": first}, {"class": second})["class"].values["by"] == "model"
