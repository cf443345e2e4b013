"""What an entry of a journal says, whoever wrote it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from shared.records.journal import EntryType, JournalEntry, response_id


@pytest.mark.parametrize(
    ("fields", "entry"),
    [
        (["type", "answer", "time", "7", "data", "{}"], JournalEntry("1-2", EntryType.ANSWER, 7, b"{}")),
        # of as many words, and others
        (["data", "{}", "time", "7", "type", "answer"], JournalEntry("1-2", EntryType.ANSWER, 7, b"{}")),
        (["type", "answer", "data", "{}", "time", "7"], JournalEntry("1-2", EntryType.ANSWER, 7, b"{}")),
        (["type", "answer", "time", "7", "told", "[]"], JournalEntry("1-2", EntryType.ANSWER, 7, b"{}", b"[]")),
        (["type", "answer", "at", "7", "data", "[]"], JournalEntry("1-2", EntryType.ANSWER, 0, b"[]")),
        (["kind", "answer", "time", "7", "data", "[]"], JournalEntry("1-2", "", 7, b"[]")),
        (
            ["claim", "x", "type", "tool.request", "time", "7", "data", "{}", "token", "t\xff", "crossed", "c"],
            JournalEntry("1-2", EntryType.TOOL_REQUEST, 7, b"{}", b"", "t\ufffd"),
        ),
        (["type", "hologr\xff", "time", "-7", "data", "x"], JournalEntry("1-2", "hologr\\xff", 0, b"x")),
        (["type", "answer", "time", "9" * 5_000, "data", "{}"], JournalEntry("1-2", EntryType.ANSWER, 0, b"{}")),
        (["type", "hologram", "time", "soon"], JournalEntry("1-2", "hologram", 0, b"{}")),
        (["type", "state", "odd"], JournalEntry("1-2", EntryType.STATE, 0, b"{}")),
        ([], JournalEntry("1-2", "", 0, b"{}")),
    ],
)
def test_an_entry_of_any_fields_is_read_and_what_is_missing_is_empty(fields: list[str], entry: JournalEntry) -> None:
    assert JournalEntry.parse(("1-2", [word.encode("latin-1") for word in fields])) == entry


@pytest.mark.parametrize(
    ("data", "value"),
    [(b'{"text":"said","n":1}', {"text": "said", "n": 1}), (b"[1]", {}), (b"null", {}), (b"{", {}), (b"", {})],
)
def test_value_of_an_entry_is_an_object_or_empty(data: bytes, value: dict[str, Any]) -> None:
    assert JournalEntry("1-2", EntryType.ANSWER, 0, data).value() == value


def test_an_answer_is_known_by_its_query_and_its_respondent() -> None:
    assert response_id("7-1", "B") == "7-1:B"


def end(told: Any) -> JournalEntry:
    told = told if isinstance(told, bytes) else orjson.dumps(told)
    return JournalEntry("3-9", EntryType.COMPLETED, 5, b"{}", told)


def test_an_end_tells_of_the_entries_before_it_without_the_data_of_large_ones() -> None:
    told = [["3-1", "notice", 5, {"code": "n"}], ["3-2", "tool.result", "6", None], ["3-3", "hologram", 7, {}]]
    assert end(told).earlier() == [
        JournalEntry("3-1", EntryType.NOTICE, 5, b'{"code":"n"}'),
        JournalEntry("3-2", EntryType.TOOL_RESULT, 6, b""),
        JournalEntry("3-3", "hologram", 7, b"{}"),
    ]
    assert end([]).earlier() == []
    at: list[Any] = ["3-1", "notice"]
    for nothing in (b"", b"{", 5, [at], [[*at, "soon", {}]], [[*at, None, {}]], [["x", "answer", 5, {}]]):
        assert end(nothing).earlier() is None


def test_what_cannot_be_read_of_an_entry_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.telemetry.unread._said", {})
    entry = JournalEntry("3-9", EntryType.COMPLETED, 5, b"{")
    assert entry.value() == {}
    told = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(one["stream"], one["entry_id"], one["reason"][:25]) for one in told] == [
        ("a journal", "3-9", "completed: its data is no")
    ]
