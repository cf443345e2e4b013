"""A journal as it is kept with its session: what it says, that it says nothing twice, and how large it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.entries import WHOLE, whole

from shared.records.compaction import MOST_BYTES, Event, bounded, compacted, parse
from shared.records.events import decode
from shared.records.response_state import EMPTY, apply, replay

CALL = {"call_id": "c", "tool": "web_search", "args": {"query": "x"}, "step": 0}
RESULT = {"call_id": "c", "tool": "web_search", "args": {"query": "x"}, "result": "a page", "error": None, "data": [1]}


def folded(*entries: tuple[str, str, dict[str, Any]], answer: str | None = None) -> list[tuple[str, str, Any]]:
    """The compacted events, without fields that `whole` has added."""
    state, added = EMPTY, dict[str, set[str]]()
    for entry_id, kind, data in entries:
        added[entry_id] = set(WHOLE.get(kind, ())) - set(data)
        state = apply(state, decode(entry_id, kind, 0, whole(kind, data)))
    return [
        (entry_id, kind, {name: value for name, value in data.items() if name not in added[entry_id]})
        for entry_id, kind, data in compacted(state, answer)
    ]


def message(*calls: str, **labels: Any) -> dict[str, Any]:
    return {"step": 0, "role": "assistant", "content": "said", "thinking": "thought", "prompt_tokens": 7,
            "tool_calls": [{"id": "1", "name": name, "args": {"a": 1}} for name in calls], **labels}  # fmt: skip


def test_pieces_are_joined_a_result_stands_where_it_was_asked_for_and_the_answer_is_its_turns() -> None:
    assert folded(
        ("1-0", "claimed", {"query_id": "q", "session_id": "s", "replica": "r", "model": "m"}),
        ("1-1", "state", {"from": "IDLE", "action": "RECEIVE", "to": "RECEIVING"}),
        ("1-2", "thinking", {"text": "I "}),
        ("1-3", "thinking", {"text": "look."}),
        ("1-4", "answer", {"text": "One "}),
        ("1-5", "answer", {"text": "moment."}),
        ("1-6", "message", message("web_search")),
        ("1-7", "tool.request", CALL),
        ("1-8", "notice", {"code": "n", "message": "Mind."}),
        ("1-9", "tool.result", RESULT),
        ("1-10", "answer", {"text": "It is so."}),
        ("1-11", "message", message()),
        ("1-12", "completed", {"answer": "It is so.", "thinking": "…", "tool_calls": [RESULT],
                               "usage": {"prompt_tokens": 1}, "model": "m", "finish_reason": "stop",
                               "said_before": ["One moment."]}),
        answer="It is so.",
    ) == [
        ("1-0", "claimed", {"query_id": "q", "session_id": "s", "model": "m"}),
        ("1-1", "state", {"from": "IDLE", "action": "RECEIVE", "to": "RECEIVING"}),
        ("1-2", "thinking", {"text": "I look."}),
        ("1-4", "answer", {"text": "One moment."}),
        ("1-6", "message", {"step": 0, "role": "assistant", "prompt_tokens": 7, "content": "",
                            "tool_calls": [{"name": "web_search"}]}),
        ("1-7", "tool.result", RESULT),
        ("1-8", "notice", {"code": "n", "message": "Mind."}),
        ("1-11", "message", {"step": 0, "role": "assistant", "prompt_tokens": 7, "content": "", "tool_calls": []}),
        ("1-12", "completed", {"usage": {"prompt_tokens": 1}, "finish_reason": "stop", "model": "m"}),
    ]  # fmt: skip


def test_text_that_a_restart_voids_is_not_kept_and_that_of_others_is() -> None:
    pia = {"persona": "Pia", "round": 1}
    events = folded(
        ("1-1", "thinking", {"text": "kept"}),
        ("1-2", "tool.request", CALL),
        ("1-3", "thinking", {"text": "Pia's", **pia}),
        ("1-4", "thinking", {"text": "void"}),
        ("1-5", "answer", {"text": "void"}),
        ("2-0", "claimed", {"query_id": "q", "session_id": "s"}),
        ("2-1", "restarted", {"step": 1, "discard_after": "1-2"}),
        ("2-2", "thinking", {"text": "new"}),
    )
    assert [(kind, data.get("text")) for _, kind, data in events] == [
        ("thinking", "kept"), ("tool.request", None), ("thinking", "Pia's"), ("claimed", None), ("restarted", None),
        ("thinking", "new"),
    ]  # fmt: skip


def test_members_of_a_committee_who_speak_at_once_have_one_text_each() -> None:
    ann, bea = {"persona": "Ann", "round": 1}, {"persona": "Bea", "round": 1}
    pieces = [(f"1-{n}", "answer", {"text": str(n), **(ann if n % 2 else bea)}) for n in range(1, 9)]
    done = [
        ("1-9", "message", message("x", **ann)),
        ("2-0", "persona.done", {**ann, "response": "1357", "thinking": "t"}),
    ]
    told = folded(("1-0", "persona.working", ann), *pieces, *done, answer="the Self's")
    assert [(kind, data.get("text"), data.get("persona")) for _, kind, data in told] == [
        ("persona.working", None, "Ann"), ("answer", "1357", "Ann"), ("answer", "2468", "Bea"),
        ("message", None, "Ann"), ("persona.done", None, "Ann"),
    ]  # fmt: skip
    assert told[-1][2] == ann


def test_what_a_failed_answer_had_written_stays_and_an_answer_of_other_words_than_its_turn() -> None:
    failed = folded(("1-1", "answer", {"text": "half"}), ("1-2", "failed", {"code": "c", "message": "m"}))
    assert [kind for _, kind, _ in failed] == ["answer", "failed"]
    assert folded(("1-1", "completed", {"answer": "b"}), answer="a b") == [("1-1", "completed", {"answer": "b"})]
    assert folded(("1-1", "cancelled", {"answer": "a"}), answer="a") == [("1-1", "cancelled", {})]


def test_behind_the_end_is_only_what_others_add_and_what_nobody_knows_is_left_out() -> None:
    events = folded(
        ("1-1", "hologram", {"text": "?"}),
        ("1-2", "thinking", {"text": 5}),
        ("1-3", "failed", {"code": "c", "message": "m"}),
        ("1-4", "failed", {"code": "again", "message": "m"}),
        ("9-0", "critique", {"score": 5}),
    )
    assert [kind for _, kind, _ in events] == ["failed", "critique"]
    malformed = [decode("1-1", "notice", 0, b"no json"), decode("1-2", "state", 0, b"[]")]
    assert compacted(replay(malformed)) == []


@pytest.mark.parametrize(
    ("told", "stays"),
    [
        ([message("probe")], True),
        # a call of somebody else says nothing of it, and neither does a message without one
        ([message("probe", persona="Pia", round=1)], False),
        ([message()], False),
        ([message("probe"), message("probe", persona="Pia", round=1), message()], True),
    ],
)
def test_what_was_said_before_a_call_is_no_answer_and_stays_whatever_is_voided_later(
    told: list[dict[str, Any]], stays: bool
) -> None:
    said = [("1-1", "thinking", {"text": "hm"}), ("1-2", "answer", {"text": "One moment."})]
    said += [(f"1-{number}", "message", one) for number, one in enumerate(told, 3)]
    void = ("2-0", "restarted", {"discard_after": "1-0"})
    kinds = [kind for _, kind, _ in folded(*said, void)]
    assert kinds == (["thinking", "answer"] if stays else []) + ["message"] * len(told) + ["restarted"]
    # beside the turn's answer, what is its part is left out
    kinds = [kind for _, kind, _ in folded(*said, answer="x")]
    assert kinds == ["thinking", *(["answer"] if stays else []), *["message"] * len(told)]


def test_text_up_to_where_it_is_void_stays_and_what_comes_after_begins_anew() -> None:
    events = folded(
        ("1-1", "answer", {"text": "a"}),
        ("1-2", "answer", {"text": "b"}),
        ("1-3", "answer", {"text": "c"}),
        ("2-0", "restarted", {"step": 0, "discard_after": "1-2"}),
        ("2-1", "answer", {"text": "d"}),
    )
    assert events == [
        ("1-1", "answer", {"text": "ab"}),
        ("2-0", "restarted", {"step": 0, "discard_after": "1-2"}),
        ("2-1", "answer", {"text": "d"}),
    ]


def test_only_the_last_who_claimed_is_told_and_a_result_without_its_request_stands_by_itself() -> None:
    assert folded(
        ("1-0", "claimed", {"query_id": "q", "attachments": [{"id": "f"}]}),
        ("1-1", "tool.request", CALL),
        ("1-2", "tool.request", {**CALL, "call_id": "d"}),
        ("2-0", "claimed", {"query_id": "q", "replica": "r"}),
        ("2-1", "tool.result", {**RESULT, "call_id": "d", "result": "of d"}),
        ("2-2", "tool.result", {**RESULT, "call_id": "never asked"}),
    ) == [
        ("1-1", "tool.request", CALL),
        ("1-2", "tool.result", {**RESULT, "call_id": "d", "result": "of d"}),
        ("2-0", "claimed", {"query_id": "q"}),
        ("2-2", "tool.result", {**RESULT, "call_id": "never asked"}),
    ]


@pytest.mark.parametrize(
    ("said", "answer", "kept"),
    [
        ("a", "b", True), ("a", "a", False), ("x" * 16_000, "b", True), ("x" * 16_001, "b", False),
    ],
)  # fmt: skip
def test_an_end_repeats_no_answer_of_its_turn_and_keeps_no_large_one(said: Any, answer: str, kept: bool) -> None:
    data = {"answer": said, "model": "m"}
    told = {"answer": said, "model": "m"} if kept else {"model": "m"}
    assert folded(("1-1", "completed", data), answer=answer) == [("1-1", "completed", told)]
    assert folded(("1-1", "completed", data)) == [("1-1", "completed", data)]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"persona": "Pia", "round": 2}, {"persona": "Pia", "round": 2}),
        ({"persona": "Pia"}, {"persona": "Pia", "round": 0}),
        ({"persona": "", "round": 2}, {}),
        ({"round": 2}, {}),
    ],
)
def test_a_text_says_who_of_a_committee_wrote_it_in_which_round(labels: dict[str, Any], told: dict[str, Any]) -> None:
    assert folded(("1-1", "answer", {"text": "x", **labels})) == [("1-1", "answer", {"text": "x", **told})]
    # that of who answers is the turn's
    assert (
        folded(("1-1", "answer", {"text": "x", **labels}), answer="y")
        == [("1-1", "answer", {"text": "x", **told})][: bool(told)]
    )


def test_a_message_names_its_calls_and_says_nothing_else_of_them() -> None:
    data = {"role": "assistant", "content": "x", "thinking": "y", "tool_calls": [{"id": "1", "name": "a", "args": {}}]}
    assert folded(("1-1", "message", data)) == [
        ("1-1", "message", {"role": "assistant", "content": "", "tool_calls": [{"name": "a"}]})
    ]


_json = st.recursive(
    st.none() | st.integers(-(2**53), 2**53) | st.builds(str.__mul__, st.text(max_size=5), st.integers(0, 2_000)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)


@given(data=st.lists(_json, max_size=6), most=st.sampled_from([400, 5_000]))
@settings(max_examples=50, deadline=None)
def test_a_record_is_never_larger_than_it_may_be_and_keeps_the_end(data: list[Any], most: int) -> None:
    end = ("2-0", "completed", {"model": "m"})
    events: list[Event] = [*((f"1-{n}", "tool.result", {"data": one}) for n, one in enumerate(data)), end]
    record = bounded(events, most)
    assert len(record) <= most
    told = parse(record)
    assert told[-1] == end


def test_what_is_small_is_kept_whole_and_what_is_cut_says_so() -> None:
    small = [("1-1", "thinking", {"text": "é" * 9_000})]
    assert parse(bounded(small)) == small
    events: list[Event] = [
        ("1-1", "thinking", {"text": "x" * 90_000}),
        ("1-2", "tool.result", {"data": [{"title": "t"}] * 5_000}),
    ]
    record = bounded(events)
    assert MOST_BYTES // 100 < len(record) <= MOST_BYTES
    (_, _, thinking), (_, _, result) = parse(record)
    assert thinking["text"] == "x" * 16_000 + "… (74,000 characters more are not kept)"
    assert result["data"] == [{"title": "t"}] * 200


def test_a_record_that_may_just_be_as_large_as_it_is_is_kept_whole() -> None:
    events: list[Event] = [("1-1", "thinking", {"text": "x" * 900}), ("1-2", "state", {"to": "B"})]
    whole = bounded(events)
    assert bounded(events, len(whole)) == whole
    # a byte less, and it is cut as far as it takes
    text = "x" * 250 + "… (650 characters more are not kept)"
    assert parse(bounded(events, len(whole) - 1)) == [("1-1", "thinking", {"text": text}), events[1]]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 60 + "… (1 characters more are not kept)"),
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, "x" * 61], [1, 2, 3]),
        ({str(n): n for n in range(30)}, {str(n): n for n in range(30)}),
        ({str(n): n for n in range(31)}, {str(n): n for n in range(30)}),
        ({"a": [{"b": "x" * 61}]}, {"a": [{"b": "x" * 60 + "… (1 characters more are not kept)"}]}),
        (5, 5),
    ],
)
def test_everything_is_cut_to_the_same_length_wherever_it_stands(value: Any, kept: Any) -> None:
    # something that is too much in any other form
    events: list[Event] = [("1-1", "tool.result", {"data": value, "much": ["y" * 100] * 9})]
    ((_, _, data),) = parse(bounded(events, 400 + len(orjson.dumps(kept))))
    assert data["data"] == kept


def test_of_what_is_still_too_much_the_beginning_stays_and_the_end() -> None:
    events: list[Event] = [(f"1-{n}", "state", {"to": "B"}) for n in range(17)]
    size = len(bounded(events[:8])) + 5
    told = parse(bounded(events, size))
    assert [one for one, _, _ in told] == [*(f"1-{n}" for n in range(4)), "1-16"]
    told = parse(bounded(events, 10))
    assert [one for one, _, _ in told] == ["1-16"]
    # as short as anything is cut
    text = "x" * 60 + "… (940 characters more are not kept)"
    told = parse(bounded([(f"1-{n}", "thinking", {"text": "x" * 1_000}) for n in range(4)], 330))
    assert told == [("1-0", "thinking", {"text": text}), ("1-3", "thinking", {"text": text})]


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"[]", b"{}", b'{"events":[["1-0","x"]]}', b'{"events":[[1,2,3]]}', b'{"events":[["x","state",{}]]}'],
)
def test_what_is_no_record_is_refused(record: bytes) -> None:
    with pytest.raises(ValueError):
        parse(record)


def test_a_record_is_plain_json() -> None:
    data: dict[Any, Any] = {"to": "IDLE", 5: "as tools say it"}
    record = orjson.loads(bounded([("1-0", "state", data)]))
    told = {"to": "IDLE", "5": "as tools say it"}
    assert record == {"events": [["1-0", "state", told]]}


def test_a_record_of_an_earlier_release_is_read_without_its_message_references() -> None:
    record = orjson.dumps({"events": [["1-0", "state", {}]], "crossed": [["agent.transition", "5-0"]]})
    assert parse(record) == [("1-0", "state", {})]


def test_the_console_s_example_is_kept_as_it_stands_there() -> None:
    console = Path(__file__).parents[3] / "services/console/src/chat/folding.json"
    example = orjson.loads(console.read_bytes())
    events = folded(*map(tuple, example["journal"]), answer=example["answer"])
    assert [list(event) for event in events] == example["kept"]
