"""Arguments in every form that backends send."""

from __future__ import annotations

from typing import Any

import pytest

from shared.llm.toolcalls import arguments_of


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
        ("{'a': 1,}", {"a": 1}),
        (b"{'a': True}", {"a": True}),
        ("not json", {"unparsed": "not json"}),
        ('{"a": 1} and more', {"unparsed": '{"a": 1} and more'}),
        ("[1]", {"unparsed": "[1]"}),
        (7, {"unparsed": 7}),
    ],
)
def test_arguments_become_a_dict(given_arguments: Any, expected: dict[str, Any]) -> None:
    assert arguments_of(given_arguments) == expected
