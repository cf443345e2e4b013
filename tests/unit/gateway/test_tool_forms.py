"""Forms of tools that clients offer."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.http.errors import ApiError
from services.gateway.openai.tool_forms import Form, args_of_text, forms_of, offered, text_of_call

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize("tool", [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": True},
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"name": "weather", "parameters": CITY},
])  # fmt: skip
def test_a_function_is_offered_as_it_is(tool: dict[str, Any]) -> None:
    ((function, form),) = offered([tool]).values()
    assert (function.name, function.parameters, form) == ("weather", CITY, Form("weather"))


def test_a_custom_tool_takes_one_text() -> None:
    for form in (
        {"type": "grammar", "syntax": "regex", "definition": "a+"},
        {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
    ):
        ((function, _),) = offered(
            [{"type": "custom", "name": "patch", "description": "Edits", "format": form}]
        ).values()
        assert function.description == "Edits\n\nIts input must fit this grammar (regex):\na+"
        assert list((function.parameters or {})["properties"]) == ["input"]
    assert text_of_call(args_of_text("a\n")) == "a\n"
    assert text_of_call({"input": 3}) == '{"input":3}'


def test_a_namespace_tells_tools_of_one_name_apart() -> None:
    inner = {"type": "function", "name": "find"}
    spaces = [{"type": "namespace", "name": name, "description": f"{name}.", "tools": [inner]} for name in ("a", "b")]
    hosted = {"type": "web_search_preview"}
    assert forms_of([inner, *spaces, hosted], ("web_search",)) == {
        "find": Form("find"),
        "a__find": Form("find", "a"),
        "b__find": Form("find", "b"),
    }
    assert offered(spaces)["a__find"][0].description == "a."


@pytest.mark.parametrize(("tool", "message"), [
    ({"type": "namespace", "name": "a", "tools": [{"type": "namespace", "tools": []}]}, "tools.0.tools.0: tools of"),
    ({"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}, "tools.0.tools.0: tools of"),
    ({"type": "namespace", "name": "a"}, "tools.0: tools of type namespace"),
    ({"type": "custom", "name": "a", "format": {"type": "grammar"}}, "must have a definition"),
    ({"type": "custom"}, "tools.0: name: field required"),
    ({"type": "function", "name": "no name!"}, "tools.0: name: string should match"),
    ({"type": "function", "name": "x" * 129}, "tools.0: name: string should match"),
    ({"type": "function", "name": "a", "parameters": "none"}, "tools.0: parameters: input should be"),
    ({"type": "function", "function": "x"}, "tools.0: the tool must be an object"),
    ("weather", "tools.0: the tool must be an object with a type"),
    ({"type": "code_interpreter"}, "tools.0: tools of type code_interpreter are not supported"),
])  # fmt: skip
def test_what_cannot_be_offered_is_refused(tool: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        offered([tool], ("web_search",))
    assert refused.value.status_code == 400


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ApiError, match="same name"):
        offered([{"name": "a"}, {"name": "a"}])
