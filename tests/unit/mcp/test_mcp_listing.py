"""What is offered of a server's tools."""

from __future__ import annotations

import re
from typing import Any

import pytest
from mcp_types import AudioContent, CallToolResult, EmbeddedResource, TextContent, TextResourceContents

from services.mcp.listing import (
    MOST_OF_ONE,
    MOST_TOOLS,
    LeftOut,
    Listed,
    fitting,
    listed,
    pins,
    sorted_out,
    tool_name,
)
from services.mcp.results import tool_result
from services.mcp.secrets import Secrets
from services.mcp.settings import Server
from shared.errors import ToolError

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": False}


def tool(name: str, description: str = "It reads.", **schema: Any) -> Listed:
    return listed("files", name, description, {**SCHEMA, **schema})


def test_a_name_is_made_of_what_models_servers_accept() -> None:
    assert tool_name("files", "read") == "files__read"
    assert tool_name("files", "read.file/ü") == "files__read_file__"
    long = tool_name("files", "r" * 200)
    assert len(long) == 64
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", long)
    assert long != tool_name("files", "r" * 201)


def test_a_schema_goes_through_and_what_is_missing_is_added() -> None:
    assert tool("read").function.parameters == SCHEMA
    bare = listed("files", "now", None, {})
    assert bare.function.parameters == {"type": "object", "properties": {}}
    assert bare.function.description == "The tool now of the server files."
    # what a server says of its effects is none of what a model is told, which waits for a yes
    reading = listed("files", "now", None, {}, read_only=True)
    assert (bare.read_only, reading.read_only, bare.hash) == (False, True, reading.hash)


def test_two_tools_of_one_name_are_both_left_out_with_a_reason() -> None:
    fits, left_out = fitting([tool("a.b"), tool("a_b"), tool("c")], ())
    assert [one.name for one in fits] == ["c"]
    assert (
        left_out
        == [
            LeftOut("files__a_b", "'a.b' and 'a_b' would have the same name; allow only one of them"),
        ]
        * 2
    )
    # as the reason says
    fits, left_out = fitting([tool("a.b"), tool("a_b")], ["a.b"])
    assert ([one.name for one in fits], left_out) == (["a.b"], [])
    # a server may have any number of them, of any length
    _, left_out = fitting([tool("same") for _ in range(1_000)], ())
    assert (len(left_out), max(len(one.why) for one in left_out) < 300) == (1_000, True)


def test_what_is_too_large_or_too_much_is_left_out() -> None:
    fits, left_out = fitting([tool("big", "x" * MOST_OF_ONE), tool("small")], ())
    assert [one.name for one in fits] == ["small"]
    assert "more than 16000 bytes" in left_out[0].why
    # nothing is remembered of it either, and its name counts as well
    assert list(pins([tool("x" * MOST_OF_ONE), tool("big", "x" * MOST_OF_ONE), tool("small")])) == ["small"]
    many = [tool(f"t{n}") for n in range(MOST_TOOLS + 1)]
    fits, left_out = fitting(many, ())
    assert (len(fits), len(left_out)) == (MOST_TOOLS, 1)
    assert "too many tools" in left_out[0].why
    wide = [tool(f"t{n}", "x" * (MOST_OF_ONE - 500)) for n in range(20)]
    assert len(fitting(wide, ())[0]) < 20


@pytest.mark.parametrize(
    "changed",
    [tool("read", "It reads, and sends it away."), tool("read", required=["path"]), tool("read", properties={})],
    ids=["description", "schema", "properties"],
)
def test_a_change_waits_until_it_is_approved(changed: Listed) -> None:
    first = tool("read")
    pinned = pins([first])
    assert sorted_out([first], (), pinned, {}).offered == [first]
    found = sorted_out([changed], (), pinned, {})
    assert (found.offered, [(one.tool, one.why) for one in found.waiting]) == ([], [(changed, "changed")])
    approved = {"files__read": changed.hash}
    assert sorted_out([changed], (), pinned, approved).offered == [changed]
    # what was approved takes the place of what was pinned
    assert [one.why for one in sorted_out([first], (), pinned, approved).waiting] == ["changed"]


def test_a_tool_that_comes_later_waits_too() -> None:
    found = sorted_out([tool("read"), tool("write")], (), pins([tool("read")]), {})
    assert [(one.tool.name, one.why) for one in found.waiting] == [("write", "new")]


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────

NONE = Secrets(Server(command="x"), {})


def test_a_result_is_cut_between_characters_and_says_so() -> None:
    result = tool_result(CallToolResult(content=[TextContent(text="ü" * 1_000)]), NONE, 1_001)
    text, _, note = result.text.partition("\n")
    assert text == "ü" * 500
    assert note == "[cut: the result has 2000 bytes, and 1001 are shown; ask for less at once]"
    assert result.data == {"truncated": True}


def test_a_secret_is_masked_before_a_result_is_cut() -> None:
    secrets = Secrets(Server(command="x", env=("KEY",)), {"KEY": "k" * 20})
    result = tool_result(CallToolResult(content=[TextContent(text="a" * 990 + "k" * 20)]), secrets, 1_000)
    assert result.text == "a" * 990 + "[KEY]"


def test_a_result_without_text_is_its_structure() -> None:
    result = tool_result(CallToolResult(content=[], structured_content={"n": 1}), NONE, 1_000)
    assert (result.text, result.data) == ('{"n":1}', {"truncated": False, "structured": {"n": 1}})
    large = tool_result(
        CallToolResult(content=[TextContent(text="x")], structured_content={"n": "x" * 2_000}), NONE, 1_000
    )
    assert large.data == {"truncated": False}
    assert tool_result(CallToolResult(content=[]), NONE, 1_000).text == "[the tool has nothing to say]"


def test_what_is_no_text_is_named() -> None:
    sound = AudioContent(data="aGVsbG8=", mime_type="audio/wav")
    plain = EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="whole"))
    result = tool_result(CallToolResult(content=[sound, plain]), NONE, 1_000)
    assert result.text == "[sound, audio/wav, 5 bytes]\n[resource file:///a]\nwhole"


def test_a_servers_own_error_is_the_tools() -> None:
    with pytest.raises(ToolError, match=r"^no such file$"):
        tool_result(CallToolResult(content=[TextContent(text="no such file\n")], is_error=True), NONE, 1_000)
    with pytest.raises(ToolError, match="did not say why"):
        tool_result(CallToolResult(content=[], is_error=True), NONE, 1_000)
