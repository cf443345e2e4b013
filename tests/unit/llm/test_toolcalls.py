"""Arguments in every form that backends send, and Gemma's own notation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.llm.toolcalls import arguments_of, json_call, marked_call

WORDS = st.text(alphabet='abc {}[],:é"\n', max_size=10)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


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


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUES, max_size=4))
def test_every_value_survives_gemmas_notation(args: dict[str, Any]) -> None:
    assert marked_call(f"call:save_topic{gemma(args)}", ()) == ("save_topic", args)


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    for source in (text, f"call:f{{{text}", f"call:f{{{text}}}"):
        found = marked_call(source, ("f",))
        assert found is None or isinstance(found[1], dict)


@pytest.mark.parametrize(
    ("given_arguments", "expected"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        (None, {}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ("not json", {"unparsed": "not json"}),
        ("[1]", {"unparsed": "[1]"}),
        (7, {"unparsed": 7}),
    ],
)
def test_arguments_become_a_dict(given_arguments: Any, expected: dict[str, Any]) -> None:
    assert arguments_of(given_arguments) == expected


@pytest.mark.parametrize("name", ["{}", "[]", "7", "null", '"other"'])
def test_a_name_that_is_no_offered_tool_makes_no_call(name: str) -> None:
    assert json_call(f'{{"name": {name}, "arguments": {{}}}}', frozenset({"f"})) is None


def test_brackets_without_end_are_no_call() -> None:
    assert marked_call("call:f{a:" + "[" * 100_000, ()) is None
