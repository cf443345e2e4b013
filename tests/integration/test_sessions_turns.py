"""Sessions: one owner, all turns, none twice, none after deletion."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import orjson
import pytest
import redis
from support.waiting import eventually

from shared.bus import Bus
from shared.bus.keys import (
    deleted_key,
    session_key,
    steps_key,
    summary_key,
    turns_key,
    user_sessions_key,
)
from shared.contracts import QUERY_RECEIVED
from shared.envelope import now_ms
from shared.records.session_records import read_sessions, session_ids
from shared.records.sessions import MAX_TURNS, SessionInfo, Sessions, Turn


def turn(n: int, answer: str = "a") -> Turn:
    return Turn(f"{1000 + n // 3}-{n % 3}", f"q{n}", answer, n)


async def store(bus: Bus, sessions: Sessions, *turns: Turn, respondent: str = "A") -> None:
    for one in turns:
        await bus.link.pipe(sessions.appending("s", respondent, one))


async def test_all_turns_are_kept_in_the_order_accepted_and_the_newest_are_shown(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    turns = [turn(n) for n in range(170)]
    shuffled = turns[:160]
    random.Random(1).shuffle(shuffled)
    await store(bus, sessions, *shuffled, *turns[160:])
    assert await sessions.turns("s", "A") == turns[-MAX_TURNS:]
    found: list[Turn] = []
    before = None
    while True:
        page = await sessions.page("s", "A", 40, before)
        assert page.total == 170
        found = [*page.turns, *found]
        if not page.earlier:
            break
        before = page.turns[0].query_id
    assert found == turns


async def test_a_page_ends_exactly_where_the_turns_begin(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, *(turn(n) for n in range(4)))
    assert not (await sessions.page("s", "A", 4)).earlier
    page = await sessions.page("s", "A", 3)
    assert page.earlier
    last = await sessions.page("s", "A", 3, page.turns[0].query_id)
    assert (last.turns, last.earlier) == ([turn(0)], False)
    assert (await sessions.page("s", "A", 3, turn(0).query_id)).turns == []
    with pytest.raises(ValueError, match="invalid literal"):
        await sessions.page("s", "A", 3, "no id")


@pytest.mark.parametrize("member", [b"\xff", b"zzz", b"000000000001010-0000000000 \xff", b"0 {}", b""])
async def test_what_cannot_be_read_hides_no_turn_that_can(bus: Bus, raw: redis.Redis, member: bytes) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u1", "t")
    turns = [turn(n) for n in range(60)]
    await store(bus, sessions, *turns)
    # more than a page has, in front of the turns, between them, or behind them; and a session that has no name
    raw.zadd(turns_key("s", "A"), {member + b"x" * n: 0 for n in range(60)})
    raw.hset(b"local2:session:{\xff}", "user_id", "u1")
    for limit in (1, 7, 50):
        page = await sessions.page("s", "A", limit)
        found = page.turns
        while page.earlier:
            page = await sessions.page("s", "A", limit, found[0].query_id)
            found = page.turns + found
        assert found == turns
    assert await sessions.turns("s", "A") == turns[-50:]
    async for ids in session_ids(bus):
        exported = [record async for page in read_sessions(bus, ids) for record in page]
    told = [one["query_id"] for record in exported for one in record["turns"].get("A", [])]
    assert told == [one.query_id for one in turns]


async def test_ids_are_ordered_as_numbers_not_as_text(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    early, late = Turn("999-10", "q", "a", 1), Turn("1000-9", "q", "a", 2)
    later = Turn("1000-10", "q", "a", 3)
    await store(bus, sessions, later, late, early)
    assert [one.query_id for one in await sessions.turns("s", "A")] == ["999-10", "1000-9", "1000-10"]
    assert [one.query_id for one in await sessions.turns("s", "A", "1000-10")] == ["999-10", "1000-9"]
    # an id that does not tell the time
    assert [one.query_id for one in await sessions.turns("s", "A", "x")] == ["999-10", "1000-9", "1000-10"]


async def test_a_turn_stored_again_changes_nothing(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1), turn(2), turn(1, "another"))
    assert await sessions.turns("s", "A") == [turn(1), turn(2)]


async def test_a_newer_versions_turn_is_read(bus: Bus, raw: redis.Redis) -> None:
    value = {**orjson.loads(turn(1).dump()), "mood": "good"}
    raw.zadd(turns_key("s", "A"), {b"000000000001000-0000000001 " + orjson.dumps(value): 0})
    assert await Sessions(bus).turns("s", "A") == [turn(1)]


async def test_a_page_of_a_long_session_is_read_as_fast_as_of_a_short_one(bus: Bus, raw: redis.Redis) -> None:
    """By what Redis says of the commands, not by the clock of this machine."""
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    for start in range(0, 5_000, 500):
        turns = (turn(n, "word " * 200) for n in range(start, start + 500))
        await bus.link.pipe([command for one in turns for command in sessions.appending("s", "A", one)])
    raw.config_resetstat()
    for before in (None, turn(2_500).query_id, turn(60).query_id):
        assert len((await sessions.page("s", "A", 50, before)).turns) == 50
    stats = raw.info("commandstats")
    assert {name.removeprefix("cmdstat_") for name in stats} <= {
        "zrange",
        "zcard",
        "hgetall",
        "echo",
        "info",
        "config|resetstat",
    }
    assert stats["cmdstat_zrange"]["calls"] == 3


async def test_a_session_deleted_while_an_answer_is_in_flight_stays_deleted(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1))
    asked = raw.xadd(QUERY_RECEIVED.stream, {"payload": "{}"}).decode()
    info = await sessions.info("s")
    assert info is not None
    assert not await sessions.deleted("s", asked)
    await sessions.delete(info)
    assert await sessions.deleted("s", asked)
    assert await sessions.open("s", "u", "title", asked) is None
    await store(bus, sessions, turn(2), Turn(asked, "q", "a", 1))
    assert await sessions.info("s") is None
    assert await sessions.turns("s", "A") == []
    assert await sessions.of_user("u", 10) == []
    # the user begins a session of the same name: what was asked in the other does not come into it
    later = raw.xadd(QUERY_RECEIVED.stream, {"payload": "{}"}).decode()
    assert await sessions.open("s", "u", "title", later) == "u"
    await store(bus, sessions, Turn(asked, "q", "a", 1), Turn(later, "q", "a", 2))
    assert [one.query_id for one in await sessions.turns("s", "A")] == [later]


async def test_the_first_user_owns_a_session(bus: Bus) -> None:
    sessions = Sessions(bus)
    assert await sessions.open("s", "alice", "first question") == "alice"
    assert await sessions.open("s", "mallory", "mine now") == "alice"
    info = await sessions.info("s")
    assert info is not None
    assert (info.user_id, info.title) == ("alice", "first question")
    assert await sessions.of_user("mallory", 10) == []
    assert [one.session_id for one in await sessions.of_user("alice", 10)] == ["s"]


async def test_a_session_that_cannot_be_read_does_not_hide_the_users_others(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    # in one millisecond, their names decide
    for name in ("1-old", "2-new"):
        await sessions.open(name, "alice", name)
    await sessions.open("others", "bob", "mine")
    key = user_sessions_key("alice")
    between = raw.zscore(key, "2-new")
    raw.zadd(key, {"no {id}": between, b"\xff": between + 1, "others": between + 2, "gone": between + 3})
    assert [one.session_id for one in await sessions.of_user("alice", 10)] == ["2-new", "1-old"]


async def test_respondents_have_histories_of_their_own(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1, "from A"))
    await store(bus, sessions, turn(1, "from B"), respondent="B")
    assert [one.answer for one in await sessions.turns("s", "A")] == ["from A"]
    assert [one.answer for one in await sessions.turns("s", "B")] == ["from B"]


async def test_all_turns_are_told_in_their_order(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(7), turn(12), turn(2), turn(5))
    await store(bus, sessions, turn(3), respondent="B")
    assert await sessions.every_turn("s") == [turn(n) for n in (2, 5, 7, 12)]
    assert await sessions.every_turn("s", "B") == [turn(3)]


async def test_a_session_is_opened_once_for_its_user_with_the_beginning_of_a_title(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    assert await sessions.open("s", "u", "t" * 100, "5000-0") == "u"
    opened = {b"user_id": b"u", b"title": b"t" * 80, b"created": b"5000", b"updated": b"5000"}
    assert raw.hgetall(session_key("s")) == opened
    assert await sessions.open("s", "u", "other", "6000-0") == "u"
    assert raw.hgetall(session_key("s")) == opened
    # it is listed by its last use
    assert raw.zrange(user_sessions_key("u"), 0, -1, withscores=True) == [(b"s", 6_000.0)]
    # whom it does not belong to has none of that name, also where nobody knows whose it is
    assert await sessions.open("s", "eve", "mine") == "u"
    raw.hset(session_key("nobodys"), "title", "t")
    assert await sessions.open("nobodys", "eve", "mine") == ""
    assert raw.exists(user_sessions_key("eve")) == 0
    assert await sessions.info("nobodys") == SessionInfo("nobodys", "", "t", 0, 0)
    assert await sessions.info("never") is None


async def test_what_is_changed_of_a_session_is_that_and_nothing_else(bus: Bus, raw: redis.Redis) -> None:
    sessions, key = Sessions(bus), user_sessions_key("u")
    await sessions.open("s", "u", "t", "5000-0")
    info = await sessions.info("s")
    assert info == SessionInfo("s", "u", "t", 5_000, 5_000)
    named = await sessions.change(info, title="other")
    assert named == replace(info, title="other", named=True) == await sessions.info("s")
    assert raw.zscore(key, "s") == 5_000
    asked = await sessions.change(named, settings={"mode": "chat"}, tip="7-1")
    assert asked == replace(named, settings={"mode": "chat"}, tip="7-1") == await sessions.info("s")
    # a pinned one stands before all that are used since, and then again by its last use
    pinned = await sessions.change(asked, pinned=True)
    assert pinned == replace(asked, pinned=True) == await sessions.info("s")
    place = raw.zscore(key, "s")
    assert place > 4_000_000_000_000_000
    await sessions.open("s", "u", "t", "7000-0")
    assert raw.zscore(key, "s") >= 4_000_000_000_007_000
    assert await sessions.change(pinned, pinned=False) == asked == await sessions.info("s")
    assert raw.zscore(key, "s") == 5_000
    assert await sessions.change(asked, title="", settings={}, tip="") == replace(
        asked, title="", settings={}, tip=""
    )  # fmt: skip
    # what is deleted meanwhile does not come back
    raw.zrem(key, "s")
    await sessions.change(asked, pinned=True)
    assert raw.zscore(key, "s") is None
    await sessions.delete(asked)
    with pytest.raises(KeyError, match="s"):
        await sessions.change(asked, title="late")
    assert not raw.exists(session_key("s"))


async def test_a_users_sessions_are_told_a_page_at_a_time_the_pinned_ones_first(bus: Bus) -> None:
    sessions = Sessions(bus)
    for number, name in enumerate("abcde"):
        await sessions.open(name, "u", f"title of {name}", f"{5_000 + number}-0")
    for name in "ba":
        pinned_at = now_ms()
        await eventually(lambda pinned_at=pinned_at: now_ms() > pinned_at, every=0.001)
        info = await sessions.info(name)
        assert info is not None
        await sessions.change(info, pinned=True)
    found = await sessions.of_user("u", 10)
    assert [one.session_id for one in found] == ["a", "b", "e", "d", "c"]
    assert [one.session_id for one in await sessions.of_user("u", 2)] == ["a", "b"]
    assert [one.session_id for one in await sessions.of_user("u", 2, 1)] == ["b", "e"]
    assert [one.session_id for one in await sessions.of_user("u", 2, 4)] == ["c"]
    assert await sessions.of_user("eve", 10) == []


async def test_each_of_the_sessions_used_last_comes_with_how_it_began(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    for number, name in enumerate(("a", "empty", "b", "c")):
        await sessions.open(name, "u", "t")
        raw.zadd(user_sessions_key("u"), {name: number})
        for turn_of in (turn(5), turn(3)) if name != "empty" else ():
            await bus.link.pipe(sessions.appending(name, "A", turn_of))
            await bus.link.pipe(sessions.appending(name, "B", turn(1)))
    raw.zadd(user_sessions_key("u"), {"no {id}": 9, b"\xff": 8})
    assert await sessions.beginnings("u", 10) == [("c", turn(3)), ("b", turn(3)), ("a", turn(3))]
    assert await sessions.beginnings("u", 4) == [("c", turn(3)), ("b", turn(3))]
    assert await sessions.beginnings("eve", 10) == []


async def test_the_turns_of_one_conversation_are_shown_up_to_where_it_is_asked_for(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "t")
    line = [Turn(f"{n}-0", f"q{n}", "a", n) for n in range(1, 8)]
    # another version of the fifth, with one behind it
    other = [Turn("8-0", "q5", "b", 8, after="4-5"), Turn("9-0", "more", "b", 9)]
    await store(bus, sessions, *line, *other)

    async def shows(before: str | None = None, **how: Any) -> list[str]:
        return [one.query_id.removesuffix("-0") for one in await sessions.turns("s", "A", before, **how)]

    assert await shows() == ["1", "2", "3", "4", "8", "9"]
    assert await shows(limit=2) == ["8", "9"]
    assert await shows(limit=3) == ["4", "8", "9"]
    # of a query that has a turn: what came before it; of one that has none: where it is asked
    assert await shows("9-0") == ["1", "2", "3", "4", "8"]
    assert await shows("8-0") == ["1", "2", "3", "4"]
    assert await shows("7-0") == ["1", "2", "3", "4", "5", "6"]
    assert await shows("7-0", limit=1) == ["6"]
    assert await shows("7-5") == ["1", "2", "3", "4", "5", "6", "7"]
    assert await shows("99-0", after="7-0") == ["1", "2", "3", "4", "5", "6", "7"]
    assert await shows("99-0", after="8-0", limit=2) == ["4", "8"]
    assert await shows("1-0") == []
    # whatever lies between is passed over, page by page
    assert await shows("99-0", after="2-0", limit=1) == ["2"]


async def test_a_turn_is_found_by_its_query(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "t")
    await store(bus, sessions, *(turn(n) for n in range(5)))
    for n in range(5):
        assert await sessions.turn("s", "A", turn(n).query_id) == turn(n)
    for nothing in ("1000-9", "999-0", "2000-0"):
        assert await sessions.turn("s", "A", nothing) is None
    assert await sessions.turn("s", "B", turn(1).query_id) is None
    with pytest.raises(ValueError, match="invalid literal"):
        await sessions.turn("s", "A", "none")


async def test_turns_are_taken_out_with_all_that_is_told_of_them_and_others_brought_in(
    bus: Bus, raw: redis.Redis
) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "t")
    turns = [turn(n) for n in range(4)]
    for respondent in "AB":
        await store(bus, sessions, *turns, respondent=respondent)
    gone, stays = turns[1].query_id, turns[2].query_id
    kinds = ("", " unanswered", " critique", " pairwise", " reward")
    raw.hset(steps_key("s"), mapping={f"{one}{kind}": "told" for one in (gone, stays) for kind in kinds})
    raw.hset(session_key("s"), "tip", gone)
    added = [Turn("2000-0", "q", "new", 9), turn(3, "is there already"), Turn("2000-1", "q", "newer", 9)]
    for _ in range(2):
        await sessions.bring("s", [gone, "77-0"], added)
        assert await sessions.every_turn("s") == [turns[0], turns[2], turns[3], added[0], added[2]]
        assert await sessions.every_turn("s", "B") == [turns[0], turns[2], turns[3]]
        assert set(raw.hkeys(steps_key("s"))) == {f"{stays}{kind}".encode() for kind in kinds}
        assert not raw.hexists(session_key("s"), "tip")
    await sessions.bring("s", [], [])
    assert (await sessions.page("s", "A")).total == 5
    # of a session that is gone nothing is kept
    await sessions.bring("never", [], added)
    assert not raw.exists(turns_key("never", "A"))


async def test_what_was_said_last_is_shown_and_is_when_a_session_was_used(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "t", "5000-0")
    raw.hset(session_key("s"), "tip", "1-0")
    await store(bus, sessions, turn(1), turn(2))
    info = await sessions.info("s")
    assert info is not None
    assert info.tip == ""
    assert abs(now_ms() - info.updated) < 60_000
    updated = info.updated
    # neither a second respondent's answer nor the same one once more takes back what is chosen then, or is a use
    await sessions.change(info, tip=turn(1).query_id)
    raw.hset(session_key("s"), "updated", updated := updated - 1_000)
    await store(bus, sessions, turn(1), turn(2), respondent="B")
    await store(bus, sessions, turn(2))
    info = await sessions.info("s")
    assert info is not None
    assert (info.tip, info.updated) == (turn(1).query_id, updated)


async def test_a_session_is_named_after_a_turn_that_is_there_and_once(bus: Bus) -> None:
    sessions = Sessions(bus)
    assert not await sessions.name("s", turn(0).query_id, "of nothing")
    await sessions.open("s", "u", "t")
    await store(bus, sessions, turn(0))
    assert not await sessions.name("s", turn(1).query_id, "of what has left")
    assert await sessions.name("s", turn(0).query_id, "first")
    assert not await sessions.name("s", turn(0).query_id, "second")
    info = await sessions.info("s")
    assert info is not None
    assert (info.title, info.named) == ("first", True)


async def test_what_left_before_takes_back_nothing_that_was_chosen_since(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "t")
    await store(bus, sessions, *(turn(n) for n in range(3)))
    await store(bus, sessions, turn(1), respondent="B")
    gone = turn(1).query_id
    await sessions.bring("s", [gone], [])
    raw.hset(session_key("s"), "tip", turn(0).query_id)
    raw.hset(summary_key("s"), "until", turn(2).query_id)
    # a second respondent finds late that its query was taken back, with its answer or without one
    for _ in range(2):
        await sessions.bring("s", [gone], [turn(2)])
        await store(bus, sessions, turn(1), respondent="B")
    assert raw.hget(session_key("s"), "tip") == turn(0).query_id.encode()
    assert raw.exists(summary_key("s"))
    await sessions.bring("s", [turn(2).query_id], [])
    assert not raw.hexists(session_key("s"), "tip")
    assert not raw.exists(summary_key("s"))


async def test_whoever_comes_to_a_query_later_does_not_use_its_session_then(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("one", "u", "t", "2000-0")
    await sessions.open("two", "u", "t", "3000-0")
    await sessions.open("one", "u", "t", "2000-0")
    found = await sessions.of_user("u", 9)
    assert [(info.session_id, info.created, info.updated) for info in found] == [
        ("two", 3_000, 3_000), ("one", 2_000, 2_000),
    ]  # fmt: skip


async def test_a_session_is_closed_up_to_the_newest_query_there_is_and_for_a_week(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    # nobody has asked anything yet, or what is asked is kept in nothing that could be one
    await sessions.close("s")
    raw.set(QUERY_RECEIVED.stream, "no stream")
    await sessions.close("s")
    raw.delete(QUERY_RECEIVED.stream)
    assert not raw.exists(deleted_key("s"))
    raw.xadd(QUERY_RECEIVED.stream, {"payload": "{}"}, id="1000-5")
    await sessions.close("s")
    assert raw.get(deleted_key("s")) == b"1000-5"
    assert 6.9 * 86_400 < raw.ttl(deleted_key("s")) <= 7 * 86_400
    told = {one: await sessions.deleted("s", one) for one in ("1000-4", "1000-5", "1000-6", "999-9", "1001-0", "none")}
    assert told == {"1000-4": True, "1000-5": True, "1000-6": False, "999-9": True, "1001-0": False, "none": False}
    assert not await sessions.deleted("other", "1000-4")
    raw.set(deleted_key("s"), "never")
    assert not await sessions.deleted("s", "1000-4")


async def test_of_a_deleted_session_nothing_is_left_but_until_when(bus: Bus, raw: redis.Redis) -> None:
    raw.xadd(QUERY_RECEIVED.stream, {"payload": "{}"}, id="1000-5")
    sessions = Sessions(bus)
    for name in ("s", "t"):
        await sessions.open(name, "u", "t")
        for respondent in "AB":
            await bus.link.pipe(sessions.appending(name, respondent, Turn("2000-0", "q", "a", 1)))
        raw.hset(steps_key(name), "1-0", "told")
        raw.hset(summary_key(name), "until", "1-0")
    info = await sessions.info("s")
    assert info is not None
    await sessions.delete(info)
    assert {key.decode() for key in raw.scan_iter("local2:session:{s}*")} == {deleted_key("s")}
    assert raw.zrange(user_sessions_key("u"), 0, -1) == [b"t"]
    assert len(list(raw.scan_iter("local2:session:{t}*"))) == 5
    # what its queries still write, up to the mark, comes to nothing
    await sessions.open("s", "u", "t")
    for late, there in (("1000-4", 0), ("1000-5", 0), ("999-9", 0), ("1000-6", 1)):
        await bus.link.pipe(sessions.appending("s", "A", Turn(late, "q", "a", 1)))
        assert raw.zcard(turns_key("s", "A")) == there
