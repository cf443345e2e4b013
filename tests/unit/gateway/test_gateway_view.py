"""A journal as a result."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from support.entries import whole

from services.gateway.queries import view
from services.gateway.queries.records import QueryRecord
from shared.records.journal import EntryType, JournalEntry
from shared.records.response_state import replay

RECORD = QueryRecord("5-0", "ann", "s", "Why?", "chat", "", accepted=1_000, deadline=901_000)


def journal(*entries: tuple[EntryType, dict[str, Any]]) -> list[JournalEntry]:
    return [
        JournalEntry(f"1-{number}", kind, 1_000 + number * 10, orjson.dumps(whole(kind, data)))
        for number, (kind, data) in enumerate(entries, 1)
    ]


def result(record: QueryRecord, entries: list[JournalEntry]) -> dict[str, Any]:
    return view.result(record, replay(entry.typed() for entry in entries))


def test_a_query_without_entries_is_queued() -> None:
    shown = result(RECORD, [])
    assert shown["state"] == "queued"
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


def test_a_large_result_is_shown_from_the_entry_that_has_it() -> None:
    ended = {"tool": "t", "args": {}, "error": None, "duration_ms": 3}
    shown = result(
        RECORD,
        journal(
            (EntryType.TOOL_RESULT, {**ended, "call_id": "large", "result": "x" * 9, "data": [1], "step": 0}),
            (EntryType.COMPLETED, {"answer": "so", "tool_calls": [
                {**ended, "call_id": "small", "result": "y", "data": None},
                {**ended, "call_id": "large", "result": "", "data": None, "result_in": "1-1"},
                {**ended, "call_id": "gone", "result": "", "data": None, "result_in": "1-9"},
            ]}),
        ),
    )  # fmt: skip
    assert shown["tool_calls"] == [
        {**ended, "call_id": "small", "result": "y", "data": None},
        {**ended, "call_id": "large", "result": "x" * 9, "data": [1]},
        {**ended, "call_id": "gone", "result": None, "data": None},
    ]


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


def test_what_others_add_after_the_end_is_shown() -> None:
    said = {"persona": "p", "round": 1, "response": "Hm."}
    late = {kind: whole(kind, {}) for kind in (EntryType.CRITIQUE, EntryType.PAIRWISE, EntryType.REWARD)}
    entries = journal((EntryType.COMPLETED, {"answer": "A", "deliberations": [said]}), *late.items())
    shown = result(RECORD, entries)
    assert [shown[kind] for kind in late] == list(late.values())
    assert shown["deliberations"] == [said]


def test_vote_is_shown_until_it_is_withdrawn() -> None:
    votes = [(EntryType.REWARD, {"reward": value}) for value in (1.0, -0.5, None)]
    shown = [result(RECORD, journal((EntryType.COMPLETED, {}), *votes[:count])) for count in (1, 2, 3)]
    assert [one.get("reward", {}).get("reward") for one in shown] == [1.0, -0.5, None]
    assert "reward" not in shown[2]


PHOTO, PLAN = {"id": "f1", "name": "photo.png"}, {"id": "f2", "name": "plan.png"}
LEFT_OUT = "images of earlier messages do not fit the model's context and are left out: {}; attach them again to ask "
LEFT_OUT += "about them"


@pytest.mark.parametrize(
    ("entries", "notices"),
    [
        (
            [
                (EntryType.NOTICE, {"code": "low_grade", "message": "m"}),
                (EntryType.CONTEXT_TRUNCATED, {"dropped_turns": 0, "attachments": [PHOTO]}),
                (EntryType.CONTEXT_TRUNCATED, {"dropped_turns": 2, "attachments": [PHOTO, PLAN]}),
            ],
            {
                "low_grade": "m",
                "turns_left_out": "the conversation does not fit the model's context: the oldest 2 turns are left out",
                "images_left_out": LEFT_OUT.format("photo.png, plan.png"),
            },
        ),
        (
            [(EntryType.ATTACHMENTS, {"files": [{**PHOTO, "sent": "left_out"}, {**PLAN, "sent": "image"}]})],
            {"images_left_out": LEFT_OUT.format("photo.png")},
        ),
        (
            [(EntryType.ATTACHMENTS, {"files": [{**PHOTO, "sent": "unseen"}, {"id": "x", "sent": "away"}]})],
            {
                "images_unseen": "the model cannot see images; it has only the names of these: photo.png",
                "files_unavailable": "the memory does not answer, and the model has only the names of these files: "
                "a file",
            },
        ),
        (
            [(EntryType.ATTACHMENTS, {"files": [{**PLAN, "sent": "unreadable"}]})],
            {"files_unreadable": "the text of these files cannot be read: plan.png"},
        ),
        ([(EntryType.ATTACHMENTS, {"files": [{**PLAN, "sent": "search"}]})], {}),
        (
            [
                (EntryType.ATTACHMENTS, {"files": 7}),
                (EntryType.ATTACHMENTS, {"files": ["x", {"sent": []}]}),
                (EntryType.CONTEXT_TRUNCATED, {"dropped_turns": "x", "attachments": {"id": "f"}}),
            ],
            {},
        ),
    ],
    ids=["cut twice", "left out at first", "unseen and away", "unreadable", "searchable", "another form"],
)
def test_content_that_the_model_did_not_get_is_a_notice(
    entries: list[tuple[EntryType, dict[str, Any]]], notices: dict[str, str]
) -> None:
    shown = result(RECORD, journal(*entries, (EntryType.COMPLETED, {"answer": "so"})))
    assert {one["code"]: one["message"] for one in shown["notices"]} == notices
