"""What the terminal shows of a query."""

from __future__ import annotations

import io
import uuid
from typing import Any

import pytest
from rich.console import Console

from services.cli.commands.answer_view import AnswerView
from services.cli.commands.ask import sessions_table
from services.cli.sse import Event

CALL = {"call_id": "c", "tool": "web_search", "args": {"query": "news"}}
ENDED = {"thinking": "", "tool_calls": [], "usage": {}, "finish_reason": "stop", "model": "m"}


def shown(*events: tuple[str, str, dict[str, Any]], thinking: bool = True) -> tuple[str, AnswerView]:
    out = io.StringIO()
    view = AnswerView(Console(file=out, width=200), thinking=thinking)
    for entry_id, kind, data in events:
        view.show(Event(entry_id, kind, data))
    return out.getvalue(), view


def test_thinking_tools_and_answer_are_shown_in_their_order() -> None:
    text, view = shown(
        ("1-1", "thinking", {"text": "I should "}),
        ("1-2", "thinking", {"text": "search."}),
        ("1-3", "tool.request", CALL | {"step": 0}),
        ("1-4", "tool.result", CALL | {"result": "a\nlong text", "error": None, "duration_ms": 12}),
        ("1-5", "answer", {"text": "It [bold]is"}),
        ("1-6", "answer", {"text": " so."}),
        ("1-7", "completed", ENDED | {"answer": "It [bold]is so."}),
    )
    assert text == (
        'I should search.\n→ web_search {"query": "news"}\n← web_search (12 ms): a long text\nIt [bold]is so.\n'
    )
    assert view.outcome is not None


def test_a_restart_makes_the_text_after_its_mark_void_and_keeps_what_came_before() -> None:
    text, view = shown(
        ("1-1", "answer", {"text": "Kept. "}),
        ("1-2", "answer", {"text": "Half a sen"}),
        ("2-1", "claimed", {"query_id": "1-0", "session_id": "s"}),
        ("2-2", "restarted", {"step": 0, "discard_after": "1-1"}),
        ("2-3", "answer", {"text": "Whole sentence."}),
        ("2-4", "completed", ENDED | {"answer": "Kept. Whole sentence."}),
    )
    assert view.answer == "Kept. Whole sentence."
    assert "the unfinished text above is void" in text
    assert text.endswith("Kept. Whole sentence.\n")
    assert text.count("Whole sentence.") == 1


def test_members_of_a_committee_are_shown_when_they_have_spoken_and_are_no_part_of_the_answer() -> None:
    a, b = {"persona": "Analyst", "round": 1}, {"persona": "Skeptic", "round": 1}
    text, view = shown(
        ("1-1", "persona.working", a),
        ("1-2", "persona.working", b),
        ("1-3", "answer", {"text": "It ", **a}),
        ("1-4", "answer", {"text": "No", **b}),
        ("1-5", "restarted", {"step": 0, "discard_after": "1-3", **b}),
        ("1-6", "persona.done", {**a, "response": "It pays."}),
        ("1-7", "answer", {"text": "So."}),
        ("1-8", "completed", ENDED | {"answer": "So."}),
    )
    assert text == (
        "· Analyst, round 1 deliberates\n· Skeptic, round 1 deliberates\n· Analyst, round 1: It pays.\nSo.\n"
    )
    assert view.answer == "So."


def test_an_answer_that_never_came_in_parts_is_shown_at_the_end() -> None:
    assert shown(("1-1", "completed", ENDED | {"answer": "All at once."}))[0] == "All at once.\n"


def test_thinking_can_be_left_out() -> None:
    text, _ = shown(("1-1", "thinking", {"text": "secret"}), ("1-2", "answer", {"text": "x"}), thinking=False)
    assert "secret" not in text


def test_a_failed_tool_shows_its_error() -> None:
    text, _ = shown(("1-1", "tool.result", CALL | {"result": "", "error": "fetch failed: 404", "duration_ms": 7}))
    assert text == "← web_search (7 ms): fetch failed: 404\n"


def test_control_characters_of_a_page_never_reach_the_terminal() -> None:
    text, _ = shown(("1-1", "answer", {"text": "a\x1b[2Jb\x07\rc\x9b31m"}))
    assert text == "a[2Jbc31m"


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({"dropped_turns": 1}, "1 oldest turn"),
        ({"attachments": [{"id": "f", "name": "a.png"}, {"id": "g"}]},
         "images of earlier messages: a.png, a file"),
        ({"dropped_turns": 2, "attachments": [{"id": "f", "name": "a.png"}]},
         "2 oldest turns, images of earlier messages: a.png"),
    ],
)  # fmt: skip
def test_answer_view_names_turns_and_images_left_out(cut: dict[str, Any], expected: str) -> None:
    data = {"dropped_turns": 0, "kept_turns": 1, "prompt_tokens": 9}
    text, _ = shown(("1-1", "context.truncated", data | cut))
    assert text == f"· the conversation no longer fits the model's context; left out: {expected}\n"


def test_a_notice_repeated_by_every_attempt_is_shown_once() -> None:
    notice = {"code": "thinking_unsupported", "message": "this model cannot think aloud"}
    assert shown(("1-1", "notice", notice), ("1-2", "notice", notice))[0].count("cannot think") == 1


@pytest.mark.parametrize("width", [80, 60, 30])
def test_no_part_of_a_sessions_id_is_cut_off(width: int) -> None:
    rows = [{"session_id": str(uuid.UUID(int=n)), "title": "A long question " * 9, "updated": None} for n in (1, 2)]
    out = io.StringIO()
    Console(file=out, width=width).print(sessions_table(rows, current=rows[0]["session_id"]))
    shown = "".join(line.split("│")[1].strip() + " " for line in out.getvalue().splitlines() if line.startswith("│"))
    assert all(row["session_id"] in shown.replace(" ", "") for row in rows)
    if width >= 60:
        assert f"{rows[0]['session_id']} * {rows[1]['session_id']}" in shown
