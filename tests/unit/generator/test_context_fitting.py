"""Fitting a conversation into the context: properties that hold for every conversation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generator.context import (
    ContextTooSmall,
    Conversation,
    Fitted,
    Rates,
    characters,
    estimate,
    fit,
    measured_ratio,
    reserve,
    shortened,
    split_turns,
)
from services.generator.loop import tool_message
from shared.contracts import ToolCallRecord
from shared.llm.port import ToolCall

TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 200, "parameters": {}}}
SYSTEM = {"role": "system", "content": "Be brief."}


def turn(number: int, length: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"q{number}"},
        {"role": "assistant", "content": f"a{number}" + "x" * length},
    ]


conversations = st.fixed_dictionaries(
    {
        "history": st.lists(st.integers(0, 6_000), max_size=60).map(
            lambda lengths: [turn(number, length) for number, length in enumerate(lengths)]
        ),
        "current": st.lists(st.integers(1, 3_000), min_size=1, max_size=4).map(
            lambda lengths: [{"role": "user", "content": "y" * length} for length in lengths]
        ),
        "tools": st.sampled_from([[], [TOOL], [TOOL, TOOL]]),
        "num_ctx": st.integers(512, 40_000),
        "ratio": st.floats(1.0, 6.0),
    }
)


@settings(max_examples=200, deadline=None)
@given(conversations)
def test_what_is_sent_never_exceeds_the_context_and_nothing_fixed_is_cut(given_: dict[str, Any]) -> None:
    history, current, tools = given_["history"], given_["current"], given_["tools"]
    num_ctx, ratio = given_["num_ctx"], given_["ratio"]
    fixed = estimate([SYSTEM, *current], tools, Rates(ratio))
    try:
        fitted = fit([SYSTEM], history, current, tools, num_ctx, Rates(ratio))
    except ContextTooSmall:
        assert fixed >= num_ctx
        return
    assert fitted.tokens < num_ctx
    assert fitted.messages[0] == SYSTEM
    assert fitted.messages[len(fitted.messages) - len(current) :] == current
    # whole turns, the newest, in their order
    assert fitted.dropped + fitted.kept == len(history)
    kept = [message for one in history[fitted.dropped :] for message in one]
    assert fitted.messages[1 : len(fitted.messages) - len(current)] == kept
    if fitted.kept:
        assert fitted.tokens <= num_ctx - reserve(num_ctx)
    if fitted.dropped:
        more = [SYSTEM, *(m for one in history[fitted.dropped - 1 :] for m in one), *current]
        assert estimate(more, tools, Rates(ratio)) >= num_ctx - reserve(num_ctx) - len(history) - 1


def test_a_history_that_fits_is_sent_whole() -> None:
    history = [turn(n, 10) for n in range(50)]
    fitted = fit([SYSTEM], history, [{"role": "user", "content": "now"}], [], 32_000)
    assert fitted == Fitted(fitted.messages, 0, 50, fitted.tokens)
    assert len(fitted.messages) == 102


def test_a_long_turn_in_the_middle_hides_the_shorter_ones_before_it() -> None:
    history = [turn(0, 1), turn(1, 100_000), turn(2, 1)]
    fitted = fit([SYSTEM], history, [{"role": "user", "content": "now"}], [], 8_000)
    assert (fitted.dropped, fitted.kept) == (2, 1)


def test_a_question_that_does_not_fit_is_refused_with_its_length() -> None:
    with pytest.raises(ContextTooSmall, match=r"about 33\d\d tokens, but the model's context is 1000"):
        fit([SYSTEM], [], [{"role": "user", "content": "y" * 10_000}], [], 1_000)


def result(length: int, name: str = "files__read") -> dict[str, Any]:
    text = ("line\n" * length)[:length]
    return tool_message(
        ToolCall(id="c", name=name, args={}), ToolCallRecord(tool=name, args={}, result=text, call_id="c")
    )


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=4), st.integers(8_000, 16_000), st.floats(2.0, 6.0))
def test_tool_results_that_do_not_fit_are_cut_the_longest_first_and_say_so(
    lengths: list[int], num_ctx: int, ratio: float
) -> None:
    current = [{"role": "user", "content": "q"}, *(result(length) for length in lengths)]
    fitted = fit([SYSTEM], [turn(0, 10)], current, [], num_ctx, Rates(ratio))
    room = num_ctx - reserve(num_ctx)
    if estimate([SYSTEM, *current], [], Rates(ratio)) <= room:
        assert fitted.messages[-len(current) :] == current
        return
    assert fitted.tokens <= room
    sent = [message["content"] for message in fitted.messages[-len(lengths) :]]
    for message, length, text in zip(current[1:], lengths, sent, strict=True):
        whole = message["content"]
        assert text.partition("\n")[0] == whole.partition("\n")[0]
        assert text.rpartition("\n")[2] == whole.rpartition("\n")[2]
        assert text == whole or f" of {length} characters left out]\n[end" in text
    cut = [len(text) for text, message in zip(sent, current[1:], strict=True) if text != message["content"]]
    assert cut
    # whoever was cut is as long as the others that were, and nobody who was not is longer
    assert max(map(len, sent)) - min(cut) < 60


def test_what_is_no_tools_result_is_never_cut() -> None:
    said = [{"role": "user", "content": result(9_000)["content"]}, result(9_000, "search_memory")]
    assert shortened(said, 5_000) == said
    with pytest.raises(ContextTooSmall):
        fit([SYSTEM], [], said, [], 2_000)


def test_results_too_small_to_be_cut_stay_and_the_question_is_refused() -> None:
    asked = {"role": "user", "content": "y" * 30_000}
    with pytest.raises(ContextTooSmall):
        fit([SYSTEM], [], [asked, result(5_000)], [], 8_000)


def test_a_question_that_leaves_less_than_the_reserve_is_sent_all_the_same() -> None:
    fitted = fit([SYSTEM], [turn(0, 1)], [{"role": "user", "content": "y" * 2_700}], [], 1_000)
    assert (fitted.dropped, fitted.kept) == (1, 0)


def test_thinking_and_tool_calls_count() -> None:
    plain = {"role": "assistant", "content": "hi"}
    rich = {**plain, "thinking": "z" * 90, "tool_calls": [{"id": "1", "name": "f", "args": {}}]}
    assert characters([rich]) > characters([plain]) + 90


@pytest.mark.parametrize(
    ("sent", "counted", "ratio"),
    [(4_000, 1_000, 4.0), (4_000, None, None), (4_000, 0, None), (100, 25, None), (4_000, 10, None), (400, 900, None)],
)
def test_the_backends_count_is_used_only_where_it_can_be_true(
    sent: int, counted: int | None, ratio: float | None
) -> None:
    assert measured_ratio(sent, counted) == ratio


def test_a_clients_history_is_split_before_each_user_message() -> None:
    messages = [
        {"role": "system", "content": "s1"},
        {"role": "assistant", "content": "welcome"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "s2"},
        {"role": "user", "content": "c"},
    ]
    system, turns = split_turns(messages)
    assert [m["content"] for m in system] == ["s1", "s2"]
    assert [[m["content"] for m in one] for one in turns] == [["welcome"], ["a", "b"], ["c"]]


NOW = [{"role": "user", "content": "now"}]


@pytest.mark.parametrize("turns", [0, 1, 2, 7, 60])
def test_halving_comes_to_the_question_alone(turns: int) -> None:
    talk = Conversation([SYSTEM], [turn(number, 10) for number in range(turns)])
    sent = [talk.fit(NOW, [], 32_000).kept]
    while talk.halve():
        fitted = talk.fit(NOW, [], 32_000)
        assert fitted.dropped + fitted.kept == turns
        sent.append(fitted.kept)
    assert sent[0] == turns
    assert sent[-1] == 0
    assert all(after == before // 2 for before, after in pairwise(sent))


def test_a_counted_prompt_decides_how_much_is_sent_next() -> None:
    talk = Conversation([SYSTEM], [turn(number, 1_000) for number in range(20)])
    assert talk.fit(NOW, [], 32_000).dropped == 0
    assert not talk.measure(4_000, 1_000)
    # a language of short tokens
    assert talk.measure(4_000, 2_500)
    assert talk.fit(NOW, [], 8_000).dropped > 0
    assert not talk.measure(4_000, None)
