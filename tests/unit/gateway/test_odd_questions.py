"""What clients of OpenAI's API send that nobody expects: it is refused, or taken as far as it can be."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.http.errors import ApiError
from services.gateway.openai.chat_body import check_schema
from services.gateway.openai.responses import messages_of
from shared.contracts import ChatToolCall


@pytest.mark.parametrize("kind", [None, 5, True, "", "poem", [], ["message"], {}, {"type": "message"}])
def test_an_item_of_no_kind_that_is_known_is_refused(kind: Any) -> None:
    with pytest.raises(ApiError, match=r"input\.0: items of type .* are not supported") as caught:
        messages_of([{"type": kind, "role": "user", "content": "Well?"}])
    assert (caught.value.status_code, caught.value.code) == (400, "unsupported")


@pytest.mark.parametrize(
    ("told", "args"),
    [
        (None, {}),
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", {"unparsed": "[1]"}),
        ("a=1", {"unparsed": "a=1"}),
        ([1], {"unparsed": [1]}),
        (False, {"unparsed": False}),
    ],
)
def test_a_call_that_a_client_tells_of_is_taken_with_whatever_arguments(told: Any, args: dict[str, Any]) -> None:
    name = "n" * 300
    (message,) = messages_of([{"type": "function_call", "call_id": "c", "name": name, "arguments": told}])
    assert message.tool_calls == [ChatToolCall(id="c", name=name, args=args)]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "poem"},
        {"pattern": "("},
        {"pattern": "a{99999999999999999999}"},
        {"pattern": "(" * 3000 + ")" * 3000},
        {"$schema": {}},
        {"$schema": ["https://json-schema.org/draft/2020-12/schema"]},
        {"$schema": 5},
        {"anyOf": [{"properties": {"a": {"type": [{"a": n} for n in range(100_000)]}}}]},
    ],
)
def test_what_is_no_json_schema_is_refused(schema: dict[str, Any]) -> None:
    # one that comes again is known
    for what in ("the form", "the tool"):
        with pytest.raises(ApiError, match=f"{what}: is no JSON schema: .") as caught:
            check_schema(schema, what)
        assert (caught.value.status_code, caught.value.code) == (400, "invalid_request")
