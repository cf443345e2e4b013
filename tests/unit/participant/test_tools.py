"""The description of a tool for models and callers."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest
from pydantic import BaseModel, Field

from shared.contracts import (
    QUERY_CANCEL,
    TOOL_RESULT,
    ToolFunction,
    ToolRequest,
    ToolResultMessage,
    ToolSchema,
)
from shared.errors import DecodeError
from shared.participant.inbox import inbox_bound
from shared.participant.tool import Cancelled, Tool, ToolResult, failure
from shared.participant.tool_client import Caller, new_token

CALL = "7-0:A:0:0"


class Page(BaseModel):
    """Reads a page.

    Call it for an address.
    """

    url: str = Field(min_length=1, max_length=9, description="Where it is")
    kind: str = Field(default="text", description="As what", json_schema_extra={"enum": ["text", "raw"]})
    parts: list[int] = Field(default=[], title="Which")


async def shows(_args: Page, _request: ToolRequest) -> ToolResult:
    return ToolResult("")


def test_tool_schema_has_what_models_read() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "url": {"type": "string", "description": "Where it is"},
            "kind": {"type": "string", "description": "As what", "default": "text", "enum": ["text", "raw"]},
            "parts": {"type": "array", "items": {"type": "integer"}, "default": []},
        },
        "required": ["url"],
    }
    told = ToolFunction(name="read", description="Reads a page. Call it for an address.", parameters=parameters)
    assert Tool("read", Page, shows).schema("reader") == ToolSchema(function=told, participant="reader")
    internal = Tool("read", Page, shows, internal=True, timeout=20.0).schema("reader")
    assert internal == ToolSchema(function=told, participant="reader", internal=True, timeout=20.0)
    changing = Tool("read", Page, shows, read_only=False).schema("reader")
    assert changing == ToolSchema(function=told, participant="reader", read_only=False)
    # a tool of an MCP server has its own description
    other = ToolFunction(name="other", description="d", parameters={})
    assert Tool("read", Page, shows, function=other).schema("mcp") == ToolSchema(function=other, participant="mcp")


def test_tool_schema_without_docstring_is_an_error() -> None:
    class Bare(BaseModel):
        pass

    Bare.__doc__ = None
    with pytest.raises(TypeError, match="Bare needs a docstring"):
        Tool("read", Bare, cast(Any, shows)).schema("reader")


def test_tool_failure_names_its_call() -> None:
    request = ToolRequest(query_id="7-0", call_id=CALL, tool="probe", args={}, session_id="s")
    assert failure(request, "why", 5, "1-1") == ToolResultMessage(
        query_id="7-0", call_id=CALL, tool="probe", result="[tool error: why]", error="why", duration_ms=5,
        session_id="s", request_id="1-1",
    )  # fmt: skip
    assert failure(request, "why") == failure(request, "why", 0, "")


def test_tool_result_with_unknown_fields_is_read() -> None:
    said = {"query_id": "q", "call_id": "c", "tool": "t", "result": "r", "duration_ms": 1}
    assert TOOL_RESULT.read(orjson.dumps({**said, "newer": True})) == ToolResultMessage(**said)
    with pytest.raises(DecodeError, match="the payload is malformed: query_id: Field required"):
        TOOL_RESULT.read(b"{}")


def test_caller_headers_name_its_user_and_query() -> None:
    caller = Caller("q", session_id="s", user_id="ann", respondent_id="B", deadline=5, traceparent="trace")
    assert caller.headers() == {
        "correlation_id": "q", "session_id": "s", "user_id": "ann", "respondent_id": "B", "traceparent": "trace",
        "deadline": 5,
    }  # fmt: skip
    tokens = {new_token() for _ in range(20)}
    assert (len(tokens), {len(token) for token in tokens}) == (20, {32})


def test_cancelled_queries_forget_the_oldest() -> None:
    cancelled = Cancelled()
    for n in range(QUERY_CANCEL.keep + 1):
        cancelled.add(f"{n}-1")
    assert "0-1" not in cancelled
    assert "1-1" in cancelled
    assert f"{QUERY_CANCEL.keep}-1" in cancelled


@pytest.mark.parametrize(
    ("size", "most"), [(0, None), (999, None), (1_000, 1_000), (32_000, 1_000), (64_000, 500), (40_000_000, 1)]
)
def test_inbox_bound_by_the_size_of_the_answer(size: int, most: int | None) -> None:
    assert inbox_bound(size) == (() if most is None else ("MAXLEN", "~", most))
