"""A journal as a result."""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.records import QueryRecord
from services.gateway.view import View
from shared.records.journal import EntryType, JournalEntry

RECORD = QueryRecord("5-0", "ann", "s", "Why?", "chat", 1_000, 901_000)


def journal(*entries: tuple[EntryType, dict[str, Any]]) -> list[JournalEntry]:
    return [
        JournalEntry(f"1-{number}", kind, 1_000 + number * 10, orjson.dumps(data))
        for number, (kind, data) in enumerate(entries, 1)
    ]


def result(record: QueryRecord, entries: list[JournalEntry]) -> dict[str, Any]:
    view = View(record)
    view.add(entries)
    return view.shown()


def test_a_query_without_entries_is_queued() -> None:
    shown = result(RECORD, [])
    assert shown["state"] == "queued"
    assert shown["events"] == ["query.received"]
    assert shown["answer"] == ""


def test_what_was_said_before_a_tool_call_is_not_the_answer() -> None:
    call = {"id": "c", "name": "web_search", "args": {}}
    shown = result(
        RECORD,
        journal(
            (EntryType.CLAIMED, {"model": "m"}),
            (EntryType.THINKING, {"text": "hm "}),
            (EntryType.ANSWER, {"text": "I will look."}),
            (EntryType.MESSAGE, {"tool_calls": [call], "prompt_tokens": 3, "completion_tokens": None}),
            (EntryType.TOOL_REQUEST, {"call_id": "c", "tool": "web_search", "args": {"query": "x"}, "step": 0}),
            (EntryType.THINKING, {"text": "so"}),
            (EntryType.ANSWER, {"text": "Because"}),
        ),
    )
    assert (shown["state"], shown["answer"], shown["thinking"], shown["model"]) == ("running", "Because", "hm so", "m")
    assert shown["usage"] == {"prompt_tokens": 3, "completion_tokens": 0}
    assert shown["tool_calls"] == [{"tool": "web_search", "args": {"query": "x"}, "result": None, "call_id": "c"}]


def test_a_restarted_call_takes_its_text_back_and_nothing_else() -> None:
    shown = result(
        RECORD,
        journal(
            (EntryType.THINKING, {"text": "kept "}),
            (EntryType.MESSAGE, {"tool_calls": []}),
            (EntryType.THINKING, {"text": "lost"}),
            (EntryType.ANSWER, {"text": "lost"}),
            (EntryType.RESTARTED, {"discard_after": "1-2", "step": 1}),
            (EntryType.ANSWER, {"text": "found"}),
        ),
    )
    assert (shown["answer"], shown["thinking"]) == ("found", "kept ")


def test_what_the_committee_says_among_itself_is_not_the_answer() -> None:
    shown = result(
        RECORD,
        journal(
            (EntryType.ANSWER, {"text": "I doubt it", "persona": "sceptic", "round": 1}),
            (EntryType.ANSWER, {"text": "Yes"}),
            (EntryType.MESSAGE, {"tool_calls": [{"id": "x"}], "persona": "sceptic", "round": 1}),
        ),
    )
    assert shown["answer"] == "Yes"


def test_a_cancelled_query_shows_what_had_been_written() -> None:
    shown = result(RECORD, journal((EntryType.CANCELLED, {"answer": "Half", "thinking": "t"})))
    assert (shown["state"], shown["answer"], shown["finish_reason"]) == ("cancelled", "Half", "cancelled")
    assert shown["events"] == ["query.received", "query.cancel"]


def test_what_others_add_after_the_end_is_shown() -> None:
    shown = result(
        RECORD,
        journal(
            (EntryType.COMPLETED, {"answer": "A", "deliberations": [{"persona": "p"}]}),
            (EntryType.CRITIQUE, {"score": 4}),
            (EntryType.PAIRWISE, {"winner": "A"}),
            (EntryType.REWARD, {"reward": 1}),
        ),
    )
    assert (shown["critique"], shown["pairwise"]) == ({"score": 4}, {"winner": "A"})
    assert shown["deliberations"] == [{"persona": "p"}]
    assert shown["events"][-3:] == ["critique.result", "pairwise.result", "reward.event"]


def test_times_are_seconds_since_acceptance_also_when_clocks_differ() -> None:
    early = JournalEntry("1-1", EntryType.STATE, 900, b"{}")
    late = JournalEntry("1-2", EntryType.STATE, 1_250, b"{}")
    assert [event["t"] for event in result(RECORD, [early, late])["event_log"]] == [0, 0, 0.25]
