"""Server-sent events and OpenAI's chunks, byte by byte."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.entries import whole

from services.gateway.http.errors import sentence
from services.gateway.openai.completions import Chunks
from services.gateway.operations.bus_stream import matches
from services.gateway.queries.sse import frame, parts
from shared.records.events import Entry, EntryType, decode


def test_an_event_is_id_type_and_data_as_written() -> None:
    assert frame(b"answer", "1-2", b'{"text":"a\\nb"}') == b'id: 1-2\nevent: answer\ndata: {"text":"a\\nb"}\n\n'


@given(st.text())
def test_data_with_line_breaks_stays_one_event(text: str) -> None:
    raw = orjson.dumps({"a": text}, option=orjson.OPT_INDENT_2)
    lines = frame(b"x", "1-1", raw).decode().removesuffix("\n\n").split("\n")
    data = "\n".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    assert orjson.loads(data) == {"a": text}
    assert all(lines)


def test_fields_in_another_order_are_understood() -> None:
    assert parts(("1-1", [b"data", b"{}", b"type", b"answer", b"time", b"1"])) == (b"answer", b"{}")
    assert parts(("1-1", [b"odd", b"1"])) == (b"unknown", b"{}")


@pytest.mark.parametrize(
    ("subject", "patterns", "expected"),
    [("tool.request.x", ["tool.*"], True), ("query.received", ["tool.*"], False), ("query.received", ["*"], True),
     ("query.received", ["query.received"], True), ("query.received", ["query.receive"], False)],
)  # fmt: skip
def test_a_pattern_is_a_subject_or_the_beginning_of_one(subject: str, patterns: list[str], expected: bool) -> None:
    assert matches(subject, patterns) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            {"loc": ("body", "options", "temperature"), "msg": "Input should be less than or equal to 2", "type": "x"},
            "options.temperature: input should be less than or equal to 2",
        ),
        ({"loc": ("body",), "msg": "Field required", "type": "missing"}, "a JSON body is expected"),
        (
            {"loc": ("body", "rating"), "msg": "Extra inputs are not permitted", "type": "extra_forbidden"},
            "rating: there is no such field",
        ),
        (
            {"loc": ("body",), "msg": "Input should be a valid dictionary or instance of A", "type": "model_type"},
            "body: a JSON object is expected",
        ),
    ],
)
def test_invalid_value_is_a_sentence_that_names_the_field(error: dict[str, Any], expected: str) -> None:
    assert sentence(error) == expected


def entry(number: int, kind: EntryType, **data: Any) -> Entry:
    return decode(f"1-{number}", kind, 0, whole(kind, data))


def contents(raw: bytes, field: str = "content") -> str:
    found = []
    for block in raw.decode().split("\n\n"):
        if block.startswith("data: {"):
            choices = orjson.loads(block[6:]).get("choices") or [{"delta": {}}]
            found.append(choices[0]["delta"].get(field) or "")
    return "".join(found)


@given(text=st.text(min_size=1, max_size=30), cut=st.integers(0, 30), sizes=st.lists(st.integers(1, 7), min_size=1))
def test_a_call_that_says_the_same_again_is_sent_once(text: str, cut: int, sizes: list[int]) -> None:
    chunks = Chunks("1-0", "m", include_usage=False)
    first = [entry(2, EntryType.ANSWER, text=text[:cut])] if text[:cut] else []
    again, start, number = [], 0, 10
    while start < len(text):
        size = sizes[number % len(sizes)]
        again.append(entry(number, EntryType.ANSWER, text=text[start : start + size]))
        start, number = start + size, number + 1
    out = chunks.feed([entry(1, EntryType.STATE), *first, entry(9, EntryType.RESTARTED, discard_after="1-1"), *again])
    assert contents(out) == text


def test_an_answer_that_was_not_streamed_is_sent_at_the_end() -> None:
    chunks = Chunks("1-0", "m", include_usage=False)
    out = chunks.feed([entry(1, EntryType.COMPLETED, answer="All at once", finish_reason="tool_calls")])
    assert contents(out) == "All at once"
    assert b'"finish_reason":"stop"' in out
    assert out.endswith(b"data: [DONE]\n\n")
    assert chunks.done


def test_what_personas_say_is_not_sent() -> None:
    chunks = Chunks("1-0", "m", include_usage=False)
    out = chunks.feed(
        [entry(1, EntryType.ANSWER, text="no", persona="p", round=1), entry(2, EntryType.ANSWER, text="yes")]
    )
    assert contents(out) == "yes"
