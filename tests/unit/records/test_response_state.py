"""What has happened in a response, reduced from its journal."""

from __future__ import annotations

from typing import Any

import pytest
from support.entries import whole

from shared.records.events import EntryType, ModelMessage, Noticed, decode
from shared.records.response_state import EMPTY, Call, ResponseState, Text, replay

CALLING = {"tool_calls": [{"id": "1", "name": "probe", "args": {}}]}
ANN, BEA = {"persona": "Ann", "round": 1}, {"persona": "Bea", "round": 1}


def state(*entries: tuple[str, str, dict[str, Any]]) -> ResponseState:
    return replay(decode(entry_id, kind, 5, whole(kind, data), f"token {entry_id}") for entry_id, kind, data in entries)


def texts(found: ResponseState) -> list[tuple[str, str]]:
    return [(part.kind.value, part.text) for part in found.parts if isinstance(part, Text)]


def test_text_before_a_tool_call_is_no_part_of_the_answer_and_stays_in_its_place() -> None:
    found = state(
        ("1-1", "thinking", {"text": "hm "}),
        ("1-2", "answer", {"text": "One "}),
        ("1-3", "answer", {"text": "moment."}),
        ("1-4", "message", CALLING),
        ("1-5", "thinking", {"text": "so"}),
        ("1-6", "answer", {"text": "It is."}),
    )
    assert (found.answer, found.thinking) == ("It is.", "hm so")
    assert texts(found) == [("thinking", "hm "), ("answer", "One moment."), ("thinking", "so"), ("answer", "It is.")]


def test_restart_voids_text_of_its_speaker_behind_an_entry() -> None:
    found = state(
        ("1-1", "answer", {"text": "a"}),
        ("1-2", "answer", {"text": "b"}),
        ("1-3", "answer", {"text": "hers", **ANN}),
        ("1-4", "answer", {"text": "c"}),
        ("2-1", "restarted", {"discard_after": "1-2"}),
        ("2-2", "answer", {"text": "d"}),
    )
    assert found.answer == "abd"
    assert texts(found) == [("answer", "ab"), ("answer", "hers"), ("answer", "d")]


@pytest.mark.parametrize("discard_after", ["x", "", "1-9"])
def test_restart_with_a_malformed_or_later_id_voids_nothing(discard_after: str) -> None:
    found = state(("1-1", "answer", {"text": "a"}), ("2-1", "restarted", {"discard_after": discard_after}))
    assert found.answer == "a"


def test_text_before_a_tool_call_is_never_void() -> None:
    found = state(("1-1", "answer", {"text": "a"}), ("1-2", "message", CALLING), ("2-1", "restarted", {}))
    assert texts(found) == [("answer", "a")]


def test_members_who_speak_at_once_have_one_text_each() -> None:
    pieces = [(f"1-{n}", "answer", {"text": str(n), **(ANN if n % 2 else BEA)}) for n in range(1, 7)]
    found = state(*pieces, ("1-9", "answer", {"text": "So."}))
    assert texts(found) == [("answer", "135"), ("answer", "246"), ("answer", "So.")]
    assert found.answer == "So."
    assert found.unsettled == {("Ann", 1): "0-0", ("Bea", 1): "1-1", None: "1-6"}


def test_result_stands_at_the_place_of_its_request() -> None:
    found = state(
        ("1-1", "tool.request", {"call_id": "a"}),
        ("1-2", "tool.request", {"call_id": "b"}),
        ("1-3", "notice", {}),
        ("1-4", "tool.result", {"call_id": "b", "result": "of b"}),
        ("1-5", "tool.result", {"call_id": "never asked", "result": "alone"}),
    )
    seen = [(call.id, call.token, call.answered and call.answered.result) for call in found.calls]
    assert seen == [("1-1", "token 1-1", None), ("1-2", "token 1-2", "of b"), ("1-5", "", "alone")]
    assert [type(part) is Call for part in found.parts] == [True, True, False, True]


def test_call_has_its_token_and_its_result() -> None:
    found = state(
        ("1-1", "tool.request", {"call_id": "a"}),
        ("1-2", "tool.request", {"call_id": "b"}),
        ("1-3", "tool.result", {"call_id": "b", "result": "of b"}),
        ("1-4", "tool.result", {"call_id": "never asked", "result": "alone"}),
        # The first request of this call was malformed.
        ("2-1", "tool.request", {"call_id": "never asked"}),
    )
    names = ("a", "b", "never asked", "c")
    assert [found.token(name) for name in names] == ["token 1-1", "token 1-2", "token 2-1", None]
    results = [found.result(name) for name in names]
    assert [result and result.result for result in results] == [None, "of b", "alone", None]


def test_newest_event_is_the_last_for_which_the_condition_is_true() -> None:
    found = state(
        *((f"1-{n}", "notice", {"code": "even" if n % 2 == 0 else "odd", "message": str(n)}) for n in range(1, 5))
    )
    odd = found.newest(Noticed, lambda notice: notice.code == "odd")
    newest = found.newest(Noticed)
    assert odd is not None
    assert newest is not None
    assert (odd.message, newest.message) == ("3", "4")
    assert found.newest(ModelMessage) is None
    assert found.newest(Noticed, lambda notice: notice.code == "none") is None


def test_text_is_unsettled_until_its_message_or_a_restart() -> None:
    partial = [
        ("1-1", "claimed", {}),
        ("1-2", "state", {}),
        ("1-3", "thinking", {"text": "a"}),
        ("1-4", "answer", {"text": "b"}),
        ("1-5", "answer", {"text": "hers", **ANN}),
        ("2-1", "claimed", {}),
    ]
    assert state(*partial).unsettled == {None: "1-2", ("Ann", 1): "1-4"}
    assert state(*partial, ("2-2", "restarted", {"discard_after": "1-2"})).unsettled == {("Ann", 1): "1-4"}
    assert state(*partial, ("2-2", "message", {})).unsettled == {("Ann", 1): "1-4"}


def test_large_result_of_a_completed_answer_comes_from_its_own_entry() -> None:
    ended = [
        {"call_id": name, "tool": "t", "args": {}, "result": said, **({"result_in": "1-1"} if not said else {})}
        for name, said in (("small", "y"), ("large", ""), ("gone", ""))
    ]
    found = state(
        ("1-1", "tool.result", {"call_id": "large", "result": "x" * 9, "data": [1]}),
        ("1-2", "completed", {"tool_calls": ended}),
    )
    assert [(call.result, call.data) for call in found.ended_calls] == [("y", None), ("x" * 9, [1]), ("", None)]


def test_only_late_entries_follow_the_end() -> None:
    found = state(
        ("1-1", "answer", {"text": "a"}),
        ("1-2", "failed", {}),
        ("1-3", "answer", {"text": "b"}),
        ("1-4", "cancelled", {}),
        ("1-5", "hologram", {}),
        ("9-0", "critique", {"score": 4}),
    )
    assert found.end is not None
    assert (found.end.id, found.answer, found.last) == ("1-2", "a", "9-0")
    assert [type(part).__name__ for part in found.parts] == ["Text", "Entry", "Entry"]


def test_tokens_are_those_of_all_whole_messages() -> None:
    found = state(
        ("1-1", "message", {"prompt_tokens": 30, "completion_tokens": 2, **ANN}),
        ("1-2", "message", {"prompt_tokens": None, "completion_tokens": 10}),
    )
    assert found.spent == {"prompt_tokens": 30, "completion_tokens": 12}
    assert len(list(found.events(ModelMessage))) == 2
    assert list(found.events(Noticed)) == []


def test_unfinished_text_is_that_behind_the_last_whole_message() -> None:
    found = state(
        ("1-1", "answer", {"text": "a"}),
        ("1-2", "message", {}),
        ("1-3", "thinking", {"text": "hm"}),
        ("1-4", "answer", {"text": "b"}),
        ("1-5", "message", ANN),
        ("1-6", "answer", {"text": "c"}),
    )
    assert (found.unfinished(EntryType.ANSWER), found.unfinished(EntryType.THINKING)) == ("bc", "hm")
    assert found.unsettled == {None: "1-2"}


def test_long_text_costs_no_recursion() -> None:
    found = state(*((f"1-{n}", "answer", {"text": "x"}) for n in range(1, 20_001)))
    assert len(found.answer) == 20_000
    assert EMPTY.answer == ""
