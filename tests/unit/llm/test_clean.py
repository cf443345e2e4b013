"""The streaming cleaner: what leaks is moved, everything else stays as it was, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.printed_forms import OFFERED

from shared.llm.call_detection import CUT_OFF, UNREADABLE
from shared.llm.clean import HELD_CHARS, Cleaner, thought_calls
from shared.llm.port import TextDelta, ThinkingDelta
from shared.llm.printed_calls import Offered, PrintedCall

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
        ("[THINK]", "[/THINK]"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
    ]
)
CALL = '<|tool_call>call:web_search{query:<|"|>a <b>, {c}<|"|>}<tool_call|>'


def cleaned(
    chunks: list[str], offered: Offered = OFFERED, *, asked: bool = False, structured: bool = False, cut: bool = False
) -> tuple[str, str, list[PrintedCall]]:
    cleaner = Cleaner(offered, asked=lambda: asked, structured=structured)
    pieces = [piece for chunk in chunks for piece in cleaner.feed(chunk)]
    pieces.extend(cleaner.finish(cut=cut))
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


@given(st.text(max_size=200).filter(lambda t: not set(t) & set("<{[`◁")), st.sets(st.integers(0, 200), max_size=20))
def test_text_without_markers_is_never_changed(source: str, places: set[int]) -> None:
    assert cleaned(cut(source, places)) == (source, "", [])


@given(st.text(max_size=100).filter(lambda t: "<" not in t), st.sets(st.integers(0, 200), max_size=30))
def test_a_json_answer_that_is_no_call_is_never_changed(inner: str, places: set[int]) -> None:
    source = '{"nickname": "' + inner.replace("`", "")
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


SEARCH = '{"name": "web_search", "arguments": {"query": "x"}}'
X = PrintedCall("web_search", {"query": "x"})


def test_calls_between_markers_are_found_without_any_tool_on_offer() -> None:
    args = {"query": "a <b>, {c}"}
    assert cleaned([CALL], {}) == ("", "", [PrintedCall("web_search", args)])
    assert cleaned([SEARCH], {}) == ("", "", [X])


def test_json_that_was_asked_of_the_backend_is_no_call() -> None:
    assert cleaned([SEARCH], structured=True) == (SEARCH, "", [])
    assert cleaned([f"<tool_call>{SEARCH}</tool_call>"], structured=True) == ("", "", [X])


@pytest.mark.parametrize(
    "source",
    [
        "<tool_call>nothing to parse</tool_call>",
        "<|tool_call>web_search please<tool_call|>",
        "[TOOL_CALLS] look it up",
        "<tool_call>",
    ],
)
def test_what_stands_between_markers_and_cannot_be_read_is_told_to_the_model(source: str) -> None:
    for chunks in ([source], list(source)):
        assert cleaned(chunks) == ("", "", [PrintedCall("unreadable_call", {}, UNREADABLE)])
    # where the question is about such things, it may be the answer
    assert cleaned([source], asked=True) == (source, "", [])


@pytest.mark.parametrize("source", [SEARCH, f"```json\n{SEARCH}\n```", f"<tool_call>{SEARCH}</tool_call>"])
@pytest.mark.parametrize("end", [-1, -4, -13, -25])
def test_a_call_that_the_length_limit_cut_off_is_not_run(source: str, end: int) -> None:
    text, _, calls = cleaned([source[:end]], cut=True)
    assert text.strip() == ""
    assert [call for call in calls if call.error is None] in ([], [X])
    assert [call.error for call in calls if call.error] in ([], [CUT_OFF])
    assert calls


def test_of_several_calls_the_length_limit_takes_only_the_last() -> None:
    source = f"<tool_calls>{SEARCH}\n{SEARCH[:-3]}"
    assert cleaned([source], cut=True) == ("", "", [X, PrintedCall("web_search", {}, CUT_OFF)])


def test_a_string_without_end_makes_no_call_of_its_beginning() -> None:
    assert cleaned(['{"name": "web_search", "arguments": {"query": "capital of Fra'])[2] == [
        PrintedCall("web_search", {}, UNREADABLE)
    ]


def test_a_closer_inside_of_an_argument_does_not_end_the_call() -> None:
    args = '{"topic": "a", "content": "say </tool_call> and ``` there"}'
    for source in (
        f'<tool_call>{{"name": "save_topic", "arguments": {args}}}</tool_call>',
        f'```json\n{{"name": "save_topic", "arguments": {args}}}\n```',
    ):
        for chunks in ([source], list(source)):
            content = "say </tool_call> and ``` there"
            assert cleaned(chunks) == ("", "", [PrintedCall("save_topic", {"topic": "a", "content": content})])


def test_ends_of_turns_are_no_text() -> None:
    assert cleaned(list("Fine.<|im_end|>")) == ("Fine.", "", [])
    assert cleaned(["<|start|>assistant<|channel|>final<|message|>Fine.<|return|>"]) == ("Fine.", "", [])


def test_text_is_not_held_back_longer_than_it_can_be_a_call() -> None:
    cleaner = Cleaner(OFFERED)
    assert list(cleaner.feed('{"na')) == []
    assert cleaner.is_buffering
    assert list(cleaner.feed('tion": "')) == [TextDelta('{"nation": "')]
    assert not cleaner.is_buffering


def test_what_may_be_a_call_is_let_go_when_it_takes_too_long() -> None:
    cleaner = Cleaner(OFFERED)
    assert list(cleaner.feed('{"name": "Ada')) == []
    assert list(cleaner.flush()) == [TextDelta('{"name": "Ada')]
    assert list(cleaner.feed('", "arguments": {}}')) == [TextDelta('", "arguments": {}}')]
    assert list(cleaner.finish()) == []


def test_what_is_a_call_for_certain_is_not_let_go() -> None:
    cleaner = Cleaner(OFFERED)
    begun = [*cleaner.feed('{"name": "web_search", "arguments": {"qu'), *cleaner.flush()]
    assert begun == []
    assert [*cleaner.feed('ery": "x"}}'), *cleaner.finish()] == [X]


def test_more_text_than_a_call_may_have_is_let_go_or_told_to_the_model() -> None:
    long = "y" * (HELD_CHARS + 1_000)
    text, _, calls = cleaned(list(cut('{"name": "Ada", "arguments": {"a": "' + long, {9, 40, 20_000, 33_000})))
    assert (text, calls) == ('{"name": "Ada", "arguments": {"a": "' + long, [])
    text, _, calls = cleaned(cut('<tool_call>{"name": "web_search", "arguments": {"query": "' + long, {40, 33_000}))
    assert (text, calls) == ("", [PrintedCall("web_search", {}, CUT_OFF)])


def test_thoughts_that_end_with_a_call_make_it() -> None:
    tagged = f"I look it up.\n<tool_call>\n{SEARCH}\n</tool_call>\n"
    assert list(thought_calls(tagged, OFFERED)) == [X]
    assert list(thought_calls(f"{tagged} No, I know it.", OFFERED)) == []
    assert list(thought_calls(f"I could print {SEARCH}", OFFERED)) == []
    assert list(thought_calls(tagged.replace("web_search", "no_tool"), OFFERED)) == []
