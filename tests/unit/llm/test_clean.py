"""The streaming cleaner: what leaks is moved, everything else stays as it was, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.llm.clean import Cleaner, PrintedCall
from shared.llm.port import TextDelta, ThinkingDelta

TOOLS = ("web_search", "save_topic")

# Each kind of text with what it must become: (text, thinking, calls).
Part = tuple[str, str, str, tuple[tuple[str, dict[str, object]], ...]]

PLAIN = st.text(alphabet="ab <>|/\n{}\"':,.é🦊\u2028`", max_size=12).filter(lambda t: "<" not in t and "`" not in t)
THOUGHT = st.text(alphabet="xy <>/|\n", max_size=12).filter(lambda t: not any(m in t for m in ("</", "<c", "<|")))
PAIRS = st.sampled_from(
    [
        ("<think>", "</think>"),
        ("<|channel>thought", "<channel|>"),
        ("<|think|>", "<|/think|>"),
        ("<|think|>", "<|think|>"),
    ]
)
CALL = '<|tool_call>call:web_search{query:<|"|>a <b>, {c}<|"|>}<tool_call|>'


def cleaned(chunks: list[str], tools: tuple[str, ...] = TOOLS) -> tuple[str, str, list[PrintedCall]]:
    cleaner = Cleaner(tools)
    pieces = [piece for chunk in chunks for piece in cleaner.feed(chunk)]
    pieces.extend(cleaner.finish())
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
    thinking = "".join(piece.text for piece in pieces if isinstance(piece, ThinkingDelta))
    return text, thinking, [piece for piece in pieces if isinstance(piece, PrintedCall)]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[str, str, str, int]:
    """A text with leaks, what must be left of it as text and as thinking, and how many calls it has."""
    source = text = thinking = ""
    count = 0
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["plain", "thought", "call"]))
        if kind == "plain":
            piece = draw(PLAIN)
            source, text = source + piece, text + piece
            continue
        # Directly after a quote mark it would be talk about a marker.
        source, text = source + ".", text + "."
        if kind == "thought":
            opener, closer = draw(PAIRS)
            inner = draw(THOUGHT)
            source, thinking = source + opener + inner + closer, thinking + inner
        else:
            source, count = source + CALL, count + 1
    return source, text, thinking, count


def cut(source: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(place % (len(source) + 1) for place in places), len(source)]
    return [source[start:end] for start, end in pairwise(edges)]


@given(scenes(), st.sets(st.integers(0, 400), max_size=30))
def test_leaks_are_moved_and_the_rest_is_exact_for_every_way_to_cut_the_text(
    scene: tuple[str, str, str, int], places: set[int]
) -> None:
    source, text, thinking, count = scene
    got_text, got_thinking, calls = cleaned(cut(source, places))
    assert (got_text, got_thinking) == (text, thinking)
    assert calls == [PrintedCall("web_search", {"query": "a <b>, {c}"})] * count


@given(st.text(alphabet="<>|/thinkcoaluge`\n'\" {}_x", max_size=60), st.sets(st.integers(0, 100), max_size=20))
def test_any_text_means_the_same_whole_and_cut(source: str, places: set[int]) -> None:
    assert cleaned(cut(source, places)) == cleaned([source])


@given(st.text(max_size=200), st.sets(st.integers(0, 200), max_size=20))
def test_text_without_markers_is_never_changed(source: str, places: set[int]) -> None:
    if not any(marker in source for marker in ("<think>", "</think>", "<|", "|>", "<tool_call>")):
        assert cleaned(cut(source, places)) == (source, "", [])


@given(st.text(max_size=100).filter(lambda t: "<" not in t), st.sets(st.integers(0, 200), max_size=30))
def test_a_json_answer_that_is_no_call_is_never_changed(inner: str, places: set[int]) -> None:
    source = '{"name": "' + inner
    assert cleaned(cut(source, places)) == (source, "", [])


def test_a_split_marker_is_found_at_every_place_it_can_be_split() -> None:
    for opener, closer in (("<think>", "</think>"), ("<|channel>thought", "<channel|>"), ("<|think|>", "<|/think|>")):
        source = f"before{opener}inside{closer}after"
        for place in range(len(source) + 1):
            assert cleaned([source[:place], source[place:]]) == ("beforeafter", "inside", [])
        assert cleaned(list(source)) == ("beforeafter", "inside", [])


def test_text_that_cannot_become_a_marker_is_not_held_back() -> None:
    cleaner = Cleaner()
    assert list(cleaner.feed("a < b and <thin")) == [TextDelta("a < b and ")]
    assert list(cleaner.feed("g>")) == [TextDelta("<thing>")]


@pytest.mark.parametrize(
    "talk", ["The `<think>` tag", "it says '<think>' and", 'a "</think>" b', "```\n<think>x</think>\n```"]
)
def test_a_marker_that_is_quoted_is_text(talk: str) -> None:
    assert cleaned([talk]) == (talk, "", [])
    assert cleaned(list(talk)) == (talk, "", [])


def test_a_marker_after_a_closed_code_fence_is_a_leak_again() -> None:
    assert cleaned(list("```\nx\n```\n<think>y</think>z")) == ("```\nx\n```\nz", "y", [])


def test_a_thought_that_is_never_closed_stays_a_thought() -> None:
    assert cleaned(["<think>on and", " on"]) == ("", "on and on", [])


def test_a_closing_marker_without_its_opening_is_dropped() -> None:
    assert cleaned(["thought\n</thi", "nk>answer"]) == ("thought\nanswer", "", [])


@pytest.mark.parametrize(
    "source",
    [
        '{"name": "web_search", "arguments": {"query": "x"}}',
        ' \n{"name": "web_search", "parameters": {"query": "x"}}\n',
        '{"arguments": "{\\"query\\": \\"x\\"}", "name": "web_search", "type": "function"}',
        '<tool_call>\n{"name": "web_search", "arguments": {"query": "x"}}\n</tool_call>',
        '<|tool_call>call:web_search{query:<|"|>x<|"|>}',
        '<|tool_call>{"name": "web_search", "arguments": {"query": "x"}}<tool_call|>',
    ],
)
def test_a_printed_call_is_a_call_also_character_by_character(source: str) -> None:
    for chunks in ([source], list(source)):
        text, _, calls = cleaned(chunks)
        assert calls == [PrintedCall("web_search", {"query": "x"})]
        assert text.strip() == ""


@pytest.mark.parametrize(
    "source",
    [
        '{"name": "no_such_tool", "arguments": {"query": "x"}}',
        '{"name": "web_search", "arguments": {"query": "x"}} is how you call it',
        '{"name": "web_search", "arguments": {"query": "x"}, "why": "because"}',
        '{"name": "web_search"}',
        '{"name": "web_search", "arguments": [1]}',
        'Call {"name": "web_search", "arguments": {"query": "x"}}',
        '{"name": "web_search", "arguments": {"query": "x"}',
        "<|tool_call>web_search please<tool_call|>",
        '<|tool_call>call:web_search{query:<|"|>x}<tool_call|>',
        "<tool_call>nothing to parse</tool_call>",
    ],
)
def test_what_only_looks_like_a_call_stays_text(source: str) -> None:
    assert cleaned([source]) == (source, "", [])
    assert cleaned(list(source)) == (source, "", [])


def test_nothing_is_a_call_when_no_tools_are_on_offer() -> None:
    assert cleaned([CALL], ()) == (CALL, "", [])


def test_a_long_json_answer_is_let_go_as_soon_as_it_cannot_be_a_call() -> None:
    cleaner = Cleaner(TOOLS)
    assert list(cleaner.feed('{"city": "')) == []
    assert list(cleaner.feed("x" * 80)) == [TextDelta('{"city": "' + "x" * 80)]
