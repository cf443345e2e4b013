"""What a session's turns and its summary are, and which of them one conversation shows."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from shared.bus.keys import lane_key, queries_key, waiting_key
from shared.contracts import FILES_ALONE
from shared.records.lanes import lane_keys, number, padded, pairs, plain
from shared.records.sessions import SessionInfo, Turn, before, id_or_nothing, kept, object_or_nothing, shown, title_of
from shared.records.summaries import Summary


def turn(place: str, after: str | None = None) -> Turn:
    return Turn(place, "q", "a", 1, after=after)


# Two versions of the second answer, each with what was said behind it.
FIRST, SECOND, THIRD = turn("1-0"), turn("2-0"), turn("3-0")
OTHER, BEHIND = turn("4-0", after="1-5"), turn("5-0")


@pytest.mark.parametrize(
    ("turns", "after", "conversation"),
    [
        ([], None, []),
        ([FIRST, SECOND, THIRD], None, [FIRST, SECOND, THIRD]),
        ([FIRST, SECOND, THIRD, OTHER, BEHIND], None, [FIRST, OTHER, BEHIND]),
        ([FIRST, SECOND, THIRD, OTHER, BEHIND], "3-0", [FIRST, SECOND, THIRD]),
        ([FIRST, SECOND, THIRD, OTHER, BEHIND], "2-9", [FIRST, SECOND]),
        ([FIRST, SECOND, THIRD, OTHER, BEHIND], "4-0", [FIRST, OTHER]),
        ([FIRST, SECOND, THIRD], "0-5", []),
        # one that begins anew
        ([FIRST, SECOND, turn("3-0", after="0-1")], None, [turn("3-0", after="0-1")]),
        ([turn("999-10"), turn("1000-9"), turn("1000-10", after="1000-9")], None,
         [turn("999-10"), turn("1000-9"), turn("1000-10", after="1000-9")]),
    ],
)  # fmt: skip
def test_a_conversation_is_the_turns_of_which_each_is_the_one_before_the_next(
    turns: list[Turn], after: str | None, conversation: list[Turn]
) -> None:
    assert shown(turns, after) == conversation


@pytest.mark.parametrize(
    ("query_id", "earlier"),
    [("7-5", "7-4"), ("7-1", "7-0"), ("7-0", "6-9999999999"), ("0-0", "0-9999999999"), ("1-0", "0-9999999999")],
)
def test_before_an_id_is_the_one_behind_all_others_that_are_before_it(query_id: str, earlier: str) -> None:
    assert before(query_id) == earlier


def test_a_turn_is_kept_as_what_it_says_and_read_with_what_is_known_of_it() -> None:
    said = {"query": "q", "answer": "a", "time": 1, "interrupted": False, "ratio": None}
    assert orjson.loads(turn("1-0").dump()) == said
    files = ({"id": "f1", "name": "a.png"},)
    whole = Turn("1-0", "q", "a", 1, True, 3.5, noted="0-1", after="0-2", attachments=files, image_tokens=300)
    rest = {"interrupted": True, "ratio": 3.5, "noted": "0-1", "after": "0-2", "attachments": [*files],
            "image_tokens": 300}  # fmt: skip
    assert orjson.loads(whole.dump()) == {**said, **rest}
    assert Turn.parse({"query_id": "1-0", **said, **rest, "mood": "good"}) == whole
    assert Turn.parse({"query_id": "1-0", "query": "q", "answer": "a", "time": 1}) == turn("1-0")
    assert turn("1-0").messages() == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("stored", [None, 7, {}, [None, {"name": "x"}, {"id": 1}]])
def test_turn_with_malformed_files_has_none(stored: Any) -> None:
    said = {"query_id": "1-0", "query": "q", "answer": "a", "time": 1}
    assert Turn.parse({**said, "attachments": stored}) == turn("1-0")


@pytest.mark.parametrize(
    ("query", "names", "title"),
    [
        ("q", ["a.png"], "q"),
        (FILES_ALONE, ["a.png", "b.md"], "a.png, b.md"),
        (FILES_ALONE, [None], FILES_ALONE),
    ],
)
def test_session_is_named_after_words_or_else_files(query: str, names: list[str | None], title: str) -> None:
    assert title_of(query, [{"id": "f", "name": name} for name in names]) == title


def test_of_what_is_kept_as_turns_only_what_is_one_is_read() -> None:
    value = {"query": "q", "answer": "a", "time": 1}
    members = [
        b"000000000000001-0000000000 " + orjson.dumps(value), b"no turn", b"alone", b"4-0 7", b"5-0 {}", b"\xff {}",
    ]  # fmt: skip
    assert kept(members) == {"1-0": Turn.parse({"query_id": "1-0", **value})}
    assert kept([]) == {}


@pytest.mark.parametrize(
    ("values", "info"),
    [
        ({}, SessionInfo("s", "", "", 0, 0)),
        (
            {"user_id": "u", "title": "t", "created": "5", "updated": "6", "pinned": "1", "named": "1", "tip": "7-1",
             "settings": '{"mode":"chat"}'},
            SessionInfo("s", "u", "t", 5, 6, True, True, "7-1", {"mode": "chat"}),
        ),
        # whoever wrote it
        ({"created": "-5", "updated": "soon", "pinned": "0", "named": "yes", "tip": "x", "settings": "[1]"},
         SessionInfo("s", "", "", 0, 0)),
    ],
)  # fmt: skip
def test_a_session_is_read_as_it_is_kept_and_what_cannot_be_read_is_nothing(
    values: dict[str, str], info: SessionInfo
) -> None:
    assert SessionInfo.parse("s", values) == info


@pytest.mark.parametrize(
    ("text", "value"), [("", {}), ("{}", {}), ('{"a":1}', {"a": 1}), ("[]", {}), ("{", {}), ("null", {})]
)
def test_an_object_is_read_or_nothing(text: str, value: dict[str, Any]) -> None:
    assert object_or_nothing(text) == value
    assert [id_or_nothing(one) for one in ("7-1", "7", "x", "")] == ["7-1", "7", "", ""]


def test_a_hash_of_anybody_is_texts_and_a_number_of_it_one_or_none() -> None:
    assert pairs([b"a", b"1", b"\xff", b"\xfe"]) == {"a": "1", "\ufffd": "\ufffd"}
    assert pairs([]) == {}
    values = {"n": "12", "minus": "-1", "part": "1.5", "word": "x", "other": "\u0663", "none": ""}
    assert {name: number(values, name) for name in [*values, "missing"]} == {
        **dict.fromkeys(values, 0),
        "n": 12,
        "missing": 0,
    }


def test_ids_are_padded_so_that_their_order_is_that_of_the_text() -> None:
    ids = ["0-1", "5-0", "999-10", "1000-9", "1000-10", "1780000000000-0"]
    assert padded("1780000000000-7") == "001780000000000-0000000007"
    assert sorted(map(padded, reversed(ids))) == [padded(one) for one in ids]
    assert [plain(padded(one).encode()) for one in ids] == ids


SUMMARY = Summary("3-5", 3, "what was said")


def test_a_summary_covers_the_turns_up_to_the_one_that_it_names() -> None:
    assert [SUMMARY.covers(one) for one in ("3-4", "3-5", "3-6", "10-0", "2-9")] == [True, True, False, False, True]
    assert SUMMARY.message() == {
        "role": "system",
        "content": "=== EARLIER IN THIS CONVERSATION ===\n"
        "A summary of its first 3 turns; search_memory finds what was said word for word.\nwhat was said",
    }


@pytest.mark.parametrize(
    ("turns", "after", "tells"),
    [
        ([turn("1-0"), turn("3-5"), turn("4-0")], None, True),
        # a version of what is covered stands behind it, beside it, or in it
        ([turn("1-0"), turn("4-0", after="1-0")], None, False),
        ([turn("1-0"), turn("4-0", after="3-5")], None, True),
        ([turn("1-0"), turn("4-0", after="3-6")], None, True),
        ([turn("1-0"), turn("3-5", after="1-0"), turn("4-0")], None, True),
        ([turn("1-0"), turn("3-6", after="1-0")], None, False),
        ([turn("1-0"), turn("2-0", after="1-0"), turn("4-0")], None, True),
        # what is asked now stands behind an older turn than the last one covered
        ([turn("1-0"), turn("3-5")], "3-4", False),
        ([turn("1-0"), turn("3-5")], "3-5", True),
        ([turn("1-0"), turn("3-5")], "9-0", True),
        ([], "1-0", False),
        ([], None, True),
    ],
)
def test_a_summary_tells_of_one_conversation_where_no_turn_behind_it_goes_back_before_its_end(
    turns: list[Turn], after: str | None, tells: bool
) -> None:
    assert SUMMARY.tells_of(turns, after) is tells


def test_everything_of_a_session_that_lies_beside_the_queries_is_named() -> None:
    lanes = [key("s", respondent) for respondent in "AB" for key in (lane_key, waiting_key)]
    assert lane_keys("s") == [queries_key("s"), *lanes]
