"""Sessions: one owner, all turns, none twice, none after deletion."""

from __future__ import annotations

import random

import orjson
import pytest
import redis

from shared.bus import Bus
from shared.bus.keys import earlier_turns_key, turns_key, user_sessions_key
from shared.contracts import QUERY_RECEIVED
from shared.records.session_records import read_sessions, session_ids
from shared.records.sessions import MAX_TURNS, Sessions, Turn


def turn(n: int, answer: str = "a") -> Turn:
    return Turn(f"{1000 + n // 3}-{n % 3}", f"q{n}", answer, n)


async def store(bus: Bus, sessions: Sessions, *turns: Turn, respondent: str = "A") -> None:
    for one in turns:
        await bus.link.pipe(sessions.appending("s", respondent, one))


def of_the_last_release(raw: redis.Redis, *turns: Turn) -> None:
    raw.hset(earlier_turns_key("s", "A"), mapping={one.query_id: one.dump() for one in turns})


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


async def test_turns_of_the_last_release_are_read_and_move_with_the_next_turn(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    of_the_last_release(raw, *(turn(n) for n in range(MAX_TURNS)))
    assert await sessions.turns("s", "A") == [turn(n) for n in range(MAX_TURNS)]
    page = await sessions.page("s", "A", 20, turn(30).query_id)
    assert (page.turns, page.earlier, page.total) == ([turn(n) for n in range(10, 30)], True, MAX_TURNS)
    await store(bus, sessions, turn(7, "another"), turn(MAX_TURNS))
    assert not raw.exists(earlier_turns_key("s", "A"))
    page = await sessions.page("s", "A", 100)
    assert (page.turns, page.total) == ([turn(n) for n in range(MAX_TURNS + 1)], MAX_TURNS + 1)
    # a replica of the last release is still at work
    of_the_last_release(raw, turn(MAX_TURNS + 1))
    assert (await sessions.turns("s", "A"))[-2:] == [turn(MAX_TURNS), turn(MAX_TURNS + 1)]


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
