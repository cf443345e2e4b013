"""What is kept of tools' results, where."""

from __future__ import annotations

from typing import Any

import pytest

from services.generator.results import ended_call, published_call
from shared.contracts import MOST_RESULT, ToolCallRecord
from shared.records.journal import LARGE_RESULT


def record(tool: str = "web_fetch", result: str = "found", data: Any = None) -> ToolCallRecord:
    return ToolCallRecord(tool=tool, args={"url": "u"}, result=result, call_id="c", duration_ms=7, data=data)


def test_the_end_of_a_journal_names_the_entry_of_a_large_result() -> None:
    small, large = {"url": "u", "title": "t"}, ["x" * LARGE_RESULT]
    whole = {"tool": "web_fetch", "args": {"url": "u"}, "error": None, "call_id": "c", "duration_ms": 7}
    assert ended_call(record(data=small), {}) == {**whole, "result": "found", "data": small}
    assert ended_call(record(data=small), {"c": "1-4"}) == {**whole, "result": "", "data": small, "result_in": "1-4"}
    assert ended_call(record(data=large), {"c": "1-4"}) == {**whole, "result": "", "data": None, "result_in": "1-4"}


@pytest.mark.parametrize(
    ("one", "kept"),
    [
        (record(result="x" * MOST_RESULT), None),
        (
            record(result="x" * (MOST_RESULT + 1), data={"url": "u"}),
            record(result="x" * MOST_RESULT, data={"url": "u"}),
        ),
        (record(data=["x" * MOST_RESULT]), record()),
        # by what it says of its finds an answer is trusted
        (record(tool="search_memory", data={"hits": ["x" * MOST_RESULT]}), None),
    ],
)
def test_observers_are_told_as_much_of_a_result_as_they_keep(one: ToolCallRecord, kept: ToolCallRecord | None) -> None:
    assert published_call(one) == (kept or one)
