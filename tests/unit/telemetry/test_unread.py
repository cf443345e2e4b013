"""Whatever cannot be understood is said in the log, once."""

from __future__ import annotations

import orjson
import pytest

from shared.participant.settings import Described, stored_values
from shared.records.journal import EntryType, JournalEntry
from shared.records.sessions import kept
from shared.telemetry.unread import not_understood

# The log remembers so many entries.
REMEMBERED = 1_000


@pytest.fixture(autouse=True)
def nothing_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Other entries take the place of those that were logged before."""
    for number in range(REMEMBERED):
        not_understood("local2:others", f"{number}-0", "no JSON")
    capsys.readouterr()


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    lines = capsys.readouterr().err.splitlines()
    return [found for line in lines if (found := orjson.loads(line))["event"] == "bus.not_understood"]


def test_it_is_said_once_with_stream_id_and_reason_and_without_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        not_understood("local2:x", "1-0", "no JSON", b"a secret")
    (line,) = said(capsys)
    assert (line["stream"], line["entry_id"], line["reason"], line["level"]) == (
        "local2:x",
        "1-0",
        "no JSON",
        "warning",
    )
    assert "secret" not in str(line)
    not_understood("local2:x", "1-0", "no JSON", b"something else")
    assert len(said(capsys)) == 1


def test_log_remembers_a_thousand_entries(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [f"{number}-0" for number in range(REMEMBERED + 1)]
    for entry_id in (*ids, *ids[1:], ids[0]):
        not_understood("local2:x", entry_id, "no JSON")
    assert [line["entry_id"] for line in said(capsys)] == [*ids, ids[0]]


def test_settings_that_cannot_be_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert stored_values("critic", [b"model", b'"m"', b"num_ctx", b"{"]) == {"model": "m"}
    assert Described.parse("critic", b"[]") is None
    assert Described.parse("critic", None) is None
    assert [(line["stream"], line["entry_id"]) for line in said(capsys)] == [
        ("settings of critic", "num_ctx"), ("description of critic", ""),
    ]  # fmt: skip


def test_a_turn_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert kept([b"1-0 nonsense"]) == {}
    (line,) = said(capsys)
    assert "nonsense" not in str(line)


def test_an_entry_of_a_journal_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [JournalEntry("1-1", EntryType.TOOL_RESULT, 0, b"{}"), JournalEntry("1-2", EntryType.ANSWER, 0, b"{")]
    for entry in entries:
        entry.typed()
    assert entries[1].value() == {}
    assert [line["entry_id"] for line in said(capsys)] == ["1-1", "1-2"]
