"""Sessions read whole and written elsewhere: nothing is added, lost or changed, however often it is done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.entries import event_of

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.bus.keys import (
    deleted_key,
    inbox_key,
    journal_key,
    result_key,
    session_key,
    steps_key,
    turns_key,
    user_sessions_key,
)
from shared.records.erasing import erase
from shared.records.journal import EntryType
from shared.records.lanes import GROUPS, pairs
from shared.records.session_records import SessionRecord, read_sessions, session_ids, write_sessions
from shared.records.sessions import MAX_TURNS, Sessions, Turn
from shared.records.steps import Unanswered, keeping, read_steps, read_unanswered, tell_after

_text = st.text(max_size=20)
_ids = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,20}\Z")
_times = st.integers(0, 2**45)
_query_ids = st.builds(lambda ms, seq: f"{ms}-{seq}", st.integers(1, 10**12), st.integers(0, 99))
_turn = st.fixed_dictionaries(
    {
        "query": _text,
        "answer": _text,
        "time": _times,
        "interrupted": st.booleans(),
        "ratio": st.none() | st.floats(0.1, 10),
    }
)
_turns = st.dictionaries(_query_ids, _turn, max_size=5)
_session = st.fixed_dictionaries(
    {
        "user_id": st.sampled_from(["ann", "bob", "local"]),
        "title": _text,
        "created": _times,
        "updated": _times,
        "used": _times,
        "turns": st.dictionaries(st.sampled_from(["A", "B"]), _turns.filter(bool)),
    }
)


def records(sessions: dict[str, Any]) -> list[dict[str, Any]]:
    def order(query_id: str) -> tuple[int, ...]:
        return tuple(int(part) for part in query_id.split("-"))

    return [
        {
            **session,
            "session_id": session_id,
            "turns": {
                respondent: [{"query_id": query_id, **turns[query_id]} for query_id in sorted(turns, key=order)]
                for respondent, turns in session["turns"].items()
            },
        }
        for session_id, session in sessions.items()
    ]


@pytest.fixture
async def elsewhere(redis_server: EmbeddedRedis) -> AsyncIterator[Bus]:
    async with Bus(redis_server.url, "test/2") as opened:
        yield opened


async def everything(bus: Bus) -> dict[str, Any]:
    """The sessions, with their turns from all pages."""
    found: dict[str, Any] = {}
    async for ids in session_ids(bus):
        async for records in read_sessions(bus, sorted(set(ids) - found.keys())):
            for record in records:
                known = found.setdefault(record["session_id"], {**record, "turns": {}})
                for respondent, turns in record["turns"].items():
                    known["turns"].setdefault(respondent, []).extend(turns)
    return found


async def write(bus: Bus, values: list[dict[str, Any]]) -> list[int]:
    return await write_sessions(bus, [SessionRecord.model_validate(value) for value in values])


@given(sessions=st.dictionaries(_ids, _session, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_sessions_arrive_as_they_were(bus: Bus, elsewhere: Bus, sessions: dict[str, Any]) -> None:
    await bus.link.call("FLUSHALL")
    await elsewhere.link.call("FLUSHALL")
    wanted = {record["session_id"]: record for record in records(sessions)}
    await write(bus, list(wanted.values()))
    assert await everything(bus) == wanted
    for _ in range(2):
        await write(elsewhere, list((await everything(bus)).values()))
        assert await everything(elsewhere) == wanted
    for session_id, record in wanted.items():
        turns = await Sessions(elsewhere).turns(session_id, "A")
        assert [turn.query_id for turn in turns] == [turn["query_id"] for turn in record["turns"].get("A", [])]
        assert session_id in {info.session_id for info in await Sessions(elsewhere).of_user(record["user_id"], 100)}


async def test_a_pinned_session_arrives_pinned_with_its_settings_and_in_its_place(bus: Bus, elsewhere: Bus) -> None:
    for name in ("old", "new"):
        await Sessions(bus).open(name, "ann", "t")
    old = await Sessions(bus).info("old")
    assert old is not None
    await Sessions(bus).change(old, pinned=True, settings={"temperature": 0.5})
    # nothing to change
    assert await Sessions(bus).change(old) is old
    await write(elsewhere, list((await everything(bus)).values()))
    found = await Sessions(elsewhere).of_user("ann", 10)
    assert [(info.session_id, info.pinned) for info in found] == [("old", True), ("new", False)]
    assert [info.settings for info in found] == [{"temperature": 0.5}, {}]


async def test_the_chosen_version_arrives_where_the_session_has_not_gone_on(bus: Bus, elsewhere: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "ann", "t")
    for turn in (Turn("1-0", "q", "one", 1), Turn("2-0", "q", "two", 2, after="0-9")):
        await bus.link.pipe(sessions.appending("s", "A", turn))
    info = await sessions.info("s")
    assert info is not None
    await sessions.change(info, tip="1-0")
    copied = list((await everything(bus)).values())
    await write(elsewhere, copied)
    arrived = await Sessions(elsewhere).info("s")
    assert arrived is not None
    assert arrived.tip == "1-0"
    await elsewhere.link.pipe(Sessions(elsewhere).appending("s", "A", Turn("3-0", "more", "three", 3)))
    await write(elsewhere, copied)
    arrived = await Sessions(elsewhere).info("s")
    assert arrived is not None
    assert arrived.tip == ""


async def test_what_happened_in_every_query_arrives_with_it(bus: Bus, elsewhere: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "ann", "t")
    events = [("1-1", "thinking", {"text": "Well \u2028 …"}), ("1-2", "completed", {"model": "m"})]
    failed = Unanswered(query="q?", state="failed", error={"code": "model_missing", "message": "no"})
    for number in range(1, MAX_TURNS + 4):
        await bus.link.pipe([*sessions.appending("s", "A", Turn(f"{number}-0", "q", "a", number)),
                             keeping("s", f"{number}-0", events)])  # fmt: skip
        await tell_after(
            bus, "s", f"{number}-0:A", event_of(EntryType.CRITIQUE, {"score": 5}), message_id="7-0", once="critique"
        )
    await bus.link.call(*keeping("s", "99-0", events, failed))
    pages = [page async for page in read_sessions(bus, ["s"])]
    assert [len(record["steps"]) for (record,) in pages] == [2 * MAX_TURNS + 2, 6]
    for _ in range(2):
        for page in pages:
            await write(elsewhere, page)
    key = steps_key("s")
    assert pairs(await elsewhere.link.call("HGETALL", key)) == pairs(await bus.link.call("HGETALL", key))
    told = await read_steps(elsewhere, "s", Turn("53-0", "q", "a", 53), "53-0")
    assert told == await read_steps(bus, "s", Turn("53-0", "q", "a", 53), "53-0")
    assert told is not None
    assert [kind for _, kind, _ in told] == ["thinking", "completed", "critique"]
    assert await read_unanswered(elsewhere, "s") == {"99-0": failed}


async def test_a_turn_is_kept_byte_for_byte(bus: Bus, elsewhere: Bus) -> None:
    turn = Turn("5-1", "naïve\u2028?", "\x00 \U0001f600 ", 7, True, 3.0000000000000004)
    files = ({"id": "f1", "name": "ä.pdf", "type": "application/pdf", "size": 9, "pages": 2}, {"id": "f2"})
    version = Turn("5-2", "naïve?", "yes", 8, noted="5-1", after="4-9", attachments=files, image_tokens=256)
    sessions = Sessions(bus)
    await sessions.open("s", "ann", "t")
    for one in (turn, version):
        await bus.link.pipe(sessions.appending("s", "A", one))
    await write(elsewhere, list((await everything(bus)).values()))
    key = turns_key("s", "A")
    assert await elsewhere.link.call("ZRANGE", key, 0, -1) == await bus.link.call("ZRANGE", key, 0, -1) != []
    assert await Sessions(elsewhere).every_turn("s") == [turn, version]


async def test_a_merge_keeps_all_turns_and_the_later_times(bus: Bus) -> None:
    def session(first: int, **values: Any) -> dict[str, Any]:
        turns = {f"{n}-0": {"query": f"q{n}", "answer": "a", "time": n} for n in range(first, first + 40)}
        return {"user_id": "ann", "title": "t", "created": 5, "used": 1, **values, "turns": {"A": turns}}

    await write(bus, records({"s": session(30, updated=100, used=100)}))
    assert await write(bus, records({"s": session(1, updated=50, used=50, created=1, title="older")})) == [29]
    (found,) = (await everything(bus)).values()
    assert [turn["query"] for turn in found["turns"]["A"]] == [f"q{n}" for n in range(1, 70)]
    assert (found["title"], found["created"], found["updated"], found["used"]) == ("t", 5, 100, 100)


async def test_a_long_session_comes_in_pages_and_arrives_whole(bus: Bus, elsewhere: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("long", "ann", "t")
    await sessions.open("short", "ann", "t")
    turns = {"A": [Turn(f"{n}-0", "q", "a" * 100, n) for n in range(1, 4 * MAX_TURNS + 2)]}
    turns["B"] = turns["A"][: MAX_TURNS + 3]
    for respondent, kept in turns.items():
        await bus.link.pipe([c for turn in kept for c in sessions.appending("long", respondent, turn)])
    pages = [page async for page in read_sessions(bus, ["long", "short"])]
    assert [[r["session_id"] for r in page] for page in pages] == [["long", "short"], *[["long"]] * 4]
    assert max(len(r["turns"].get("A", [])) for page in pages for r in page) == MAX_TURNS
    for _ in range(2):
        for page in pages:
            await write(elsewhere, page)
    assert await everything(elsewhere) == await everything(bus)
    for respondent, kept in turns.items():
        page = await Sessions(elsewhere).page("long", respondent, 1_000)
        assert page.turns == kept


async def test_another_users_session_is_not_touched(bus: Bus) -> None:
    session = {"title": "t", "created": 1, "updated": 1, "used": 1, "turns": {}}
    await write(bus, records({"s": {**session, "user_id": "ann"}}))
    before = await everything(bus)
    turns = {"A": {"1-0": {"query": "q", "answer": "a", "time": 1}}}
    assert await write(bus, records({"s": {**session, "user_id": "bob", "updated": 9, "turns": turns}})) == [-1]
    assert await everything(bus) == before
    assert await Sessions(bus).of_user("bob", 10) == []


async def test_a_session_is_read_as_it_stands_whoever_wrote_it(bus: Bus) -> None:
    bare = {"session_id": "s", "user_id": "ann", "title": "", "created": 0, "updated": 7, "used": 7, "turns": {}}
    await bus.link.call("HSET", session_key("s"), "user_id", "ann", "updated", 7, "pinned", "yes", "tip", "x")
    await bus.link.call("HSET", session_key("odd"), "created", "soon", "settings", "[1]")
    nobodys = {**bare, "session_id": "odd", "user_id": "", "updated": 0, "used": 0}
    # those named twice come once
    assert [page async for page in read_sessions(bus, ["s", "odd", "s"])] == [[bare, nobodys]]
    # its place in the list is of its own
    await bus.link.call("ZADD", user_sessions_key("ann"), 9, "s")
    await bus.link.call("HSET", session_key("s"), "pinned", 1, "tip", "1-0", "settings", '{"a":1}', "title", "t")
    await bus.link.call("HSET", steps_key("s"), "1-0", "[1]", "2-0 unanswered", "{", "2-0", '"x"', "3-0", "never asked")
    for respondent, place in (("A", 2), ("A", 1), ("B", 3)):
        turn = Turn(f"{place}-0", "q", "a", place)
        await bus.link.pipe(Sessions(bus).appending("s", respondent, turn))
    ((told,),) = [page async for page in read_sessions(bus, ["s"])]

    def turns(*places: int) -> list[dict[str, Any]]:
        rest = {"query": "q", "answer": "a", "interrupted": False, "ratio": None}
        return [{"query_id": f"{place}-0", **rest, "time": place} for place in places]

    assert told == {
        **bare, "title": "t", "used": 9, "pinned": True, "settings": {"a": 1}, "updated": told["updated"],
        "turns": {"A": turns(1, 2), "B": turns(3)}, "steps": {"1-0": [1], "2-0": "x"},
    }  # fmt: skip


async def test_the_keys_of_a_kind_are_found_page_by_page(bus: Bus) -> None:
    names = {f"s{number}" for number in range(1_200)}
    await bus.link.pipe([("HSET", session_key(name), "user_id", "u") for name in names])
    await bus.link.pipe([("SET", deleted_key(name), "1-0") for name in names])
    pages = [page async for page in session_ids(bus)]
    assert {name for page in pages for name in page} == names
    assert len(pages) > 1


async def test_a_session_that_is_deleted_meanwhile_is_left_out(bus: Bus) -> None:
    await Sessions(bus).open("there", "ann", "t")
    (page,) = [page async for page in read_sessions(bus, ["gone", "there"])]
    assert [record["session_id"] for record in page] == ["there"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_id": "a}{b"}, {"session_id": ""}, {"user_id": ""}, {"created": -1}, {"updated": "7"}, {"used": None},
        {"turns": {"C": []}}, {"turns": {"A": [{"query_id": "x", "query": "q", "answer": "a", "time": 1}]}},
        {"turns": {"A": [{"query_id": "1-0", "query": "q", "answer": 5, "time": 1}]}}, {"lane": "q"},
        {"turns": {"A": [{"query_id": "2-0", "query": "q", "answer": "a", "time": 1, "after": "none"}]}},
        {"turns": {"A": [{"query_id": "2-0", "query": "q", "answer": "a", "time": 1, "noted": "none"}]}},
        {"turns": {"A": [{"query_id": "2-0", "query": "q", "answer": "a", "time": 1, "attachments": [{}]}]}},
        {"tip": "none"}, {"steps": {"1-0 lane": {}}}, {"steps": {"x": {}}},
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    good = {"session_id": "s", "user_id": "u", "title": "", "created": 1, "updated": 1, "used": 1, "turns": {}}
    SessionRecord.model_validate(good)
    with pytest.raises(ValidationError):
        SessionRecord.model_validate({**good, **wrong})


def test_what_few_sessions_and_turns_have_may_be_left_out() -> None:
    turn = {"query_id": "1-0", "query": "q", "answer": "a", "time": 1}
    least = {"session_id": "s", "user_id": "u", "title": "", "created": 1, "updated": 2, "used": 3}
    record = SessionRecord.model_validate({**least, "turns": {"A": [turn]}})
    assert record.model_dump() == {
        **least, "pinned": False, "settings": None, "tip": None, "steps": {},
        "turns": {"A": [{**turn, "interrupted": False, "ratio": None, "noted": None, "after": None, "attachments": [],
                         "image_tokens": None}]},
    }  # fmt: skip


async def test_what_tools_told_those_who_asked_goes_with_the_query(bus: Bus) -> None:
    asked = orjson.dumps({"call_id": "c1", "tool": "probe", "args": {}})
    journal, result = journal_key("7-0", "A"), result_key("probe", "c1")
    inboxes = [inbox_key(GROUPS["A"], replica) for replica in ("asked", "another")]
    await bus.link.pipe(
        [
            ("XADD", journal, "*", "type", "claimed", "data", '{"replica":"asked"}'),
            ("XADD", journal, "*", "type", "tool.request", "data", asked),
            ("SET", result, "told"),
            *(("XADD", inbox, "*", "call_id", call) for inbox in inboxes for call in ("c1", "c2")),
        ]
    )
    await erase(bus, ["7-0"])
    assert await bus.link.call("EXISTS", journal, result) == 0
    left = [[fields[1] for _, fields in await bus.range(inbox)] for inbox in inboxes]
    assert left == [[b"c2"], [b"c1", b"c2"]]
