"""What models can ask of the memory."""

from __future__ import annotations

from typing import Any

from services.memory.tools import MemoryTools


def test_what_saves_says_that_it_changes_something() -> None:
    nothing: Any = None
    tools = MemoryTools(nothing, nothing, nothing, nothing).tools()
    assert {tool.name for tool in tools if not tool.read_only} == {"save_memory", "save_topic"}
