"""The entries of a journal as typed events: written strictly, read tolerantly."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from golden.replaying import JOURNALS, load
from pydantic import ValidationError

from shared.records.events import MODELS, AnswerPiece, Completed, EntryType, Event, Unknown, decode, encode, shown


def read(kind: str, data: Any) -> Event:
    return decode("1-1", kind, 5, data if isinstance(data, bytes) else orjson.dumps(data)).event


def test_every_entry_type_has_one_model() -> None:
    assert set(MODELS) == set(EntryType)


@pytest.mark.parametrize("path", sorted(JOURNALS.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_entries_are_written_as_they_were_read(path: Any) -> None:
    for entry_id, fields in load(path)[0]:
        entry = decode(entry_id, fields["type"], 0, fields["data"].encode())
        assert not isinstance(entry.event, Unknown)
        assert encode(entry.event) == (fields["type"], fields["data"].encode())
        assert orjson.dumps(shown(entry.event)).decode() == fields["data"]


def test_unknown_fields_are_refused_when_written_and_ignored_when_read() -> None:
    with pytest.raises(ValidationError):
        AnswerPiece(text="a", mood="good")  # type: ignore[call-arg]
    assert read("answer", {"text": "a", "mood": "good"}) == AnswerPiece(text="a")


@pytest.mark.parametrize(
    ("kind", "data"),
    [("hologram", {"text": "a"}), ("answer", b"{"), ("answer", []), ("answer", {}), ("answer", {"text": 5})],
    ids=["unknown type", "no JSON", "no object", "missing field", "wrong type"],
)
def test_entry_that_cannot_be_understood_is_unknown(kind: str, data: Any) -> None:
    assert read(kind, data) == Unknown(kind)


def test_values_are_read_like_their_json_text() -> None:
    assert decode("1-1", "answer", 5, {"text": "a"}) == decode("1-1", "answer", 5, b'{"text":"a"}')


@pytest.mark.parametrize(
    ("kind", "data", "fields"),
    [
        ("completed", {"answer": "so", "tool_calls": 7, "model": None}, {"answer": "so", "tool_calls": []}),
        ("completed", b"{", {"answer": "", "finish_reason": ""}),
        ("failed", {"message": "no"}, {"code": "internal", "message": "no"}),
        ("cancelled", [], {"answer": "", "thinking": ""}),
    ],
    ids=["malformed fields", "no JSON", "missing field", "no object"],
)
def test_malformed_terminal_entry_ends_the_response_with_its_good_fields(
    kind: str, data: Any, fields: dict[str, Any]
) -> None:
    event = read(kind, data)
    assert type(event) is MODELS[kind]
    assert shown(event).items() >= fields.items()


def test_speaker_is_the_member_of_a_committee() -> None:
    assert AnswerPiece(text="a", persona="Ann", round=2).speaker == ("Ann", 2)
    assert AnswerPiece(text="a").speaker is None
    assert isinstance(read("completed", {}), Completed)
    assert read("hologram", {}).speaker is None
