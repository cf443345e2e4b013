"""Values in the notations that models print."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.llm.lenient_literals import UnfinishedError, arguments_at, value_at

WORDS = st.text(alphabet='abc {}[],:é"\n', max_size=10)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUES, max_size=4)


def gemma(value: Any) -> str:
    """A value in Gemma's notation."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
        case _:
            return "{" + ",".join(f"{key}:{gemma(inner)}" for key, inner in value.items()) + "}"


@given(OBJECTS)
def test_every_value_survives_gemmas_notation(args: dict[str, Any]) -> None:
    written = gemma(args)
    assert value_at(written, 0) == (args, len(written))


@given(OBJECTS, st.integers(0, 200))
def test_the_beginning_of_a_value_is_unfinished(args: dict[str, Any], end: int) -> None:
    for written in (json.dumps(args), json.dumps(args, ensure_ascii=False, indent=1)):
        assert value_at(f"  {written} and more", 2) == (args, 2 + len(written))
        with pytest.raises(UnfinishedError):
            value_at(written[: end % len(written)], 0)


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    for source in (text, "{" + text, f"[{text}]", f"{{a: {text}}}"):
        for cut in (False, True):
            try:
                _, end = value_at(source, 0, cut=cut)
            except ValueError:
                continue
            assert 0 <= end <= len(source)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{'a': 'it\\'s', \"b\": True, 'c': None,}", {"a": "it's", "b": True, "c": None}),
        ("{'a': 'it's'}", {"a": "it's"}),
        ('{"a": "say "no" now"}', {"a": 'say "no" now'}),
        ('{"a": "line\nline"}', {"a": "line\nline"}),
        ("{a: 1, b.c: [1.5, -2e3,], d: word}", {"a": 1, "b.c": [1.5, -2000.0], "d": "word"}),
        ('{"a": """x "y" z"""}', {"a": 'x "y" z'}),
        ("{<escape>a<escape>:<escape>b<escape>}", {"a": "b"}),
        ("{'a': \"\\u00e9\\x41\\t\"}", {"a": "éA\t"}),
        ("{'a' = 1}", {"a": 1}),
        ("{}", {}),
    ],
)
def test_loose_notations_are_read(written: str, value: Any) -> None:
    assert value_at(written, 0) == (value, len(written))


@pytest.mark.parametrize("written", ["{a}", "{'a': [] 2: 3}", "[[1] 2]", "{,}", "{: 1}", "", "]", "[" * 100_000 + "1"])
def test_what_is_no_value_is_refused(written: str) -> None:
    with pytest.raises(ValueError):
        value_at(written, 0)


@pytest.mark.parametrize(
    ("written", "value"),
    [('{"a": {"b": [1', {"a": {"b": [1]}}), ('{"a": "x"', {"a": "x"}), ('{"a": 1,', {"a": 1}), ("[", [])],
)
def test_brackets_may_be_missing_at_the_end(written: str, value: Any) -> None:
    assert value_at(written, 0, cut=True) == (value, len(written))


@pytest.mark.parametrize("written", ['{"a": "x', '{"a": tru', '{"a":', '{"a'])
def test_half_a_string_or_word_is_no_value_even_then(written: str) -> None:
    with pytest.raises(UnfinishedError):
        value_at(written, 0, cut=True)


def test_arguments_of_a_call_in_pythons_notation() -> None:
    written = "(\"a, (b)\", [1], n=2, text='x')"
    assert arguments_at(written, 0) == (["a, (b)", [1]], {"n": 2, "text": "x"}, len(written))
    assert arguments_at("()", 0) == ([], {}, 2)
    with pytest.raises(UnfinishedError):
        arguments_at("(n=1", 0)
