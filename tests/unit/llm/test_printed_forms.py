"""Every form of docs/model-servers.md is a call, and prose stays prose, however the stream is cut."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.printed_forms import FORMS, OFFERED, PROSE, Printed

from shared.llm.clean import Cleaner, asks_for_code
from shared.llm.port import TextDelta, ThinkingDelta
from shared.llm.printed_calls import PrintedCall

Result = tuple[str, str, list[tuple[str, dict[str, object], str | None]]]
PAGE = Path(__file__).parents[3] / "docs" / "model-servers.md"


def cleaned(chunks: list[str], question: str) -> Result:
    cleaner = Cleaner(OFFERED, asked=lambda: asks_for_code(question))
    pieces = [piece for chunk in chunks for piece in cleaner.feed(chunk)]
    pieces.extend(cleaner.finish())
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
    thinking = "".join(piece.text for piece in pieces if isinstance(piece, ThinkingDelta))
    return text, thinking, [(call.name, call.args, call.error) for call in pieces if isinstance(call, PrintedCall)]


def cut(source: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(place % (len(source) + 1) for place in places), len(source)]
    return [source[start:end] for start, end in pairwise(edges)]


def test_there_are_enough_of_both() -> None:
    assert len(FORMS) >= 90
    assert len(PROSE) >= 30
    assert len({form.name for form in FORMS}) == len(FORMS)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_printed_call_is_a_call(form: Printed) -> None:
    for chunks in ([form.text], list(form.text), cut(form.text, set(range(0, len(form.text), 5)))):
        text, thinking, calls = cleaned(chunks, form.question)
        assert (text.strip(), thinking) == (form.rest.strip(), "")
        assert calls == [(name, args, None) for name, args in form.calls]


@pytest.mark.parametrize("prose", PROSE, ids=lambda prose: prose.name)
def test_prose_stays_prose_to_the_character(prose: Printed) -> None:
    for chunks in ([prose.text], list(prose.text), cut(prose.text, set(range(0, len(prose.text), 5)))):
        assert cleaned(chunks, prose.question) == (prose.text, "", [])


FRAGMENTS = st.sampled_from(
    [*(form.text for form in FORMS), *(prose.text for prose in PROSE),
     "<think>", "</think>", "\n", "```", "```json\n", "`", "{", "}", "[", "]", '"', "web_search(", "Action: ", "x. ",
     "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|channel|>", "<|message|>", "<|start|>", "<|", "|>", "functools"]
)  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Forms and prose one after the other, whole, cut short or with something in between."""
    answer = ""
    for _ in range(draw(st.integers(1, 4))):
        part = draw(FRAGMENTS)
        if draw(st.booleans()):
            place = draw(st.integers(0, len(part)))
            part = part[:place] + draw(st.sampled_from(["", part[place:], draw(FRAGMENTS) + part[place:]]))
        answer += part
    return answer


@settings(max_examples=400, deadline=None)
@given(answers(), st.sets(st.integers(0, 900), max_size=12), st.sampled_from(["What is new?", "Show me the JSON."]))
def test_an_answer_means_the_same_whole_and_cut(source: str, places: set[int], question: str) -> None:
    assert cleaned(cut(source, places), question) == cleaned([source], question)


def test_every_form_has_a_row_with_its_source_in_the_page() -> None:
    row = re.compile(r"^\| ([^|]+?) \| (?:\\\||[^|\n])+ \| ([^|]+?) \|$", re.MULTILINE)
    rows = dict(row.findall(PAGE.read_text(encoding="utf-8")))
    for form in FORMS:
        assert rows.get(form.name.partition(",")[0]), form.name
