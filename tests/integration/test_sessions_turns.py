"""Sessions: one owner, at most fifty turns, none twice, none after deletion."""

from __future__ import annotations

import random

import redis

from shared.bus import Bus
from shared.records.sessions import MAX_TURNS, Sessions, Turn


def turn(n: int, answer: str = "a") -> Turn:
    return Turn(f"{1000 + n // 3}-{n % 3}", f"q{n}", answer, n)


async def store(bus: Bus, sessions: Sessions, *turns: Turn, respondent: str = "A") -> None:
    for one in turns:
        await bus.link.pipe(sessions.appending("s", respondent, one))


async def test_the_newest_fifty_turns_are_kept_in_the_order_accepted(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    turns = [turn(n) for n in range(70)]
    shuffled = turns[:60]
    random.Random(1).shuffle(shuffled)
    await store(bus, sessions, *shuffled, *turns[60:])
    assert await sessions.turns("s", "A") == turns[-MAX_TURNS:]


async def test_ids_are_ordered_as_numbers_not_as_text(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    early, late = Turn("999-10", "q", "a", 1), Turn("1000-9", "q", "a", 2)
    later = Turn("1000-10", "q", "a", 3)
    await store(bus, sessions, later, late, early)
    assert [one.query_id for one in await sessions.turns("s", "A")] == ["999-10", "1000-9", "1000-10"]
    for one in (turn(3 * n) for n in range(100, 148)):
        await store(bus, sessions, one)
    kept = [one.query_id for one in await sessions.turns("s", "A")]
    assert kept[:2] == ["1000-9", "1000-10"]
    assert len(kept) == 50


async def test_a_turn_stored_again_is_there_once(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1), turn(2), turn(1))
    assert await sessions.turns("s", "A") == [turn(1), turn(2)]


async def test_a_session_deleted_while_an_answer_is_in_flight_stays_deleted(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1))
    ticket = await sessions.reserve("s", ["A", "B"], 10)
    assert ticket is not None
    await sessions.confirm("s", ["A", "B"], ticket, "2000-0")
    info = await sessions.info("s")
    assert info is not None
    assert await sessions.delete(info) == ["2000-0"]
    await store(bus, sessions, turn(2))
    assert await sessions.info("s") is None
    assert await sessions.turns("s", "A") == []
    assert await sessions.of_user("u", 10) == []
    await sessions.release("s", "A", "2000-0")
    await sessions.release("s", "B", "2000-0")
    assert [key for key in raw.keys("local2:session*") if b"once" not in key] == []


async def test_the_first_user_owns_a_session(bus: Bus) -> None:
    sessions = Sessions(bus)
    assert await sessions.open("s", "alice", "first question") == "alice"
    assert await sessions.open("s", "mallory", "mine now") == "alice"
    info = await sessions.info("s")
    assert info is not None
    assert (info.user_id, info.title) == ("alice", "first question")
    assert await sessions.of_user("mallory", 10) == []
    assert [one.session_id for one in await sessions.of_user("alice", 10)] == ["s"]


async def test_respondents_have_histories_of_their_own(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1, "from A"))
    await store(bus, sessions, turn(1, "from B"), respondent="B")
    assert [one.answer for one in await sessions.turns("s", "A")] == ["from A"]
    assert [one.answer for one in await sessions.turns("s", "B")] == ["from B"]


async def test_a_session_and_its_lanes_share_a_hash_slot(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    await sessions.open("s", "u", "title")
    await store(bus, sessions, turn(1))
    await sessions.turn("s", "A", "1-1", None, "i")
    await sessions.turn("s", "A", "1-2", None, "i")
    keys = raw.keys("local2:session:*")
    assert len(keys) == 4
    assert all(b"{s}" in key for key in keys)
