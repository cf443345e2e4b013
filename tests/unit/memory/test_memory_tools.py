"""What models can ask of the memory."""

from __future__ import annotations

from typing import Any

from services.memory.tools import MemoryTools


def test_what_is_saved_lasts_and_what_is_read_does_not() -> None:
    nothing: Any = None
    tools = MemoryTools(nothing, nothing, nothing, nothing).tools()
    assert {tool.name for tool in tools if tool.lasting} == {"save_memory", "save_topic"}
