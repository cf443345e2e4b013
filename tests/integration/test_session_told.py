"""What is kept of a session's queries beside their turns: by whom, for how long, and how it is read again."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import redis
from support.entries import WHOLE, event_of, whole

from shared.bus import Bus
from shared.bus.keys import deleted_key, journal_key, session_key, steps_key, summary_key, turns_key
from shared.contracts import QueryReceived
from shared.records.journal import EntryType, read_journal
from shared.records.sessions import Sessions, Turn
from shared.records.steps import Unanswered, keep_ended, keeping, read_steps, read_unanswered, tell_after
from shared.records.summaries import Summaries, Summary

STEPS = steps_key("s")
TURN = Turn("5-1", "q", "the answer", 1)
EVENTS: list[tuple[str, str, dict[str, Any]]] = [("1-1", "state", {"to": "B"}), ("1-2", "completed", {"model": "m"})]
WHY = Unanswered(query="q", state="failed", error={"code": "c", "message": "m"})


@pytest.fixture
async def session(bus: Bus) -> Bus:
    """A bus with a session `s` of user `u` that has one turn."""
    await Sessions(bus).open("s", "u", "t")
    await bus.link.pipe(Sessions(bus).appending("s", "A", TURN))
    return bus


async def judged(bus: Bus, kind: EntryType, place: str, response: str = "5-1:A", **data: Any) -> None:
    await tell_after(bus, "s", response, event_of(kind, data), message_id=place, once=f"{kind.value} {place}")


async def test_what_happened_in_a_query_is_kept_once_with_the_reason_where_it_has_no_answer(
    session: Bus, raw: redis.Redis
) -> None:
    for model in ("m", "zombie"):
        await session.link.call(*keeping("s", "5-1", [("1-2", "completed", {"model": model})]))
        await session.link.call(*keeping("s", "6-1", EVENTS, WHY))
        await session.link.call(*keeping("s", "6-1", EVENTS, Unanswered(query="other", state="cancelled")))
    kept = {name.decode(): orjson.loads(value) for name, value in raw.hgetall(STEPS).items()}
    assert kept == {
        "5-1": {"events": [["1-2", "completed", {"model": "m"}]]},
        "6-1": {"events": [list(event) for event in EVENTS]},
        "6-1 unanswered": WHY.model_dump(),
    }
    assert await read_unanswered(session, "s") == {"6-1": WHY}
    assert await read_unanswered(session, "other") == {}
    # of many all are found at once
    raw.hset(STEPS, mapping={f"{n}-7 unanswered": WHY.model_dump_json() for n in range(700)})
    assert len(await read_unanswered(session, "s")) == 701


async def test_nothing_is_kept_of_a_session_that_is_gone_or_of_a_query_that_is_older_than_its_deletion(
    session: Bus, raw: redis.Redis
) -> None:
    raw.set(deleted_key("s"), "6-0")
    for query_id, kept in (("5-9", 0), ("6-0", 0), ("6-1", 1)):
        await session.link.call(*keeping("s", query_id, EVENTS))
        assert raw.hlen(STEPS) == kept
    raw.delete(STEPS)
    # nor what is thought of one: its turn is from before
    await judged(session, EntryType.REWARD, "9-0", stars=5)
    assert not raw.exists(STEPS)
    raw.delete(deleted_key("s"))
    await judged(session, EntryType.REWARD, "9-1", stars=5)
    assert raw.hkeys(STEPS) == [b"5-1 reward"]
    raw.delete(STEPS, session_key("s"))
    await judged(session, EntryType.REWARD, "9-2", stars=5)
    await session.link.call(*keeping("s", "7-1", EVENTS))
    assert not raw.exists(STEPS)


async def test_what_is_thought_of_an_answer_is_kept_where_its_turn_is_and_the_newest_of_each_kind_stays(
    session: Bus, raw: redis.Redis
) -> None:
    journal = journal_key("5-1", "A")
    raw.xadd(journal, {"type": "completed", "time": 1, "data": "{}"}, id="1-1")
    raw.xadd(journal_key("5-1", "B"), {"type": "completed", "time": 1, "data": "{}"}, id="1-1")
    await judged(session, EntryType.REWARD, "9-0", stars=1)
    await judged(session, EntryType.REWARD, "9-1", stars=5)
    await judged(session, EntryType.CRITIQUE, "8-0", score=4)
    # there is no such turn, though its id begins as one does
    for response in ("5-2:A", "5-11:A", "5-0:A"):
        await judged(session, EntryType.CRITIQUE, "8-1", response, score=1)
    # the second respondent's is in its journal alone, and an answer that another program wrote in none
    await judged(session, EntryType.CRITIQUE, "8-2", "5-1:B", score=1)
    await judged(session, EntryType.CRITIQUE, "8-3", "elsewhere:A", score=1)
    await tell_after(
        session,
        "{s}",
        "5-1:A",
        event_of(EntryType.CRITIQUE, {}),
        message_id="8-4",
        once="of no session",
    )
    kept = {name.decode(): orjson.loads(value) for name, value in raw.hgetall(STEPS).items()}
    assert kept == {
        "5-1 reward": [{"stars": 5}, "9-1"],
        "5-1 critique": [{"score": 4}, "8-0"],
    }
    told = [(entry.type, entry.value()) for entry in (await read_journal(session, journal))[1:]]
    assert told == [
        (EntryType.REWARD, {"stars": 1}),
        (EntryType.REWARD, {"stars": 5}),
        (EntryType.CRITIQUE, {"score": 4}),
        (EntryType.CRITIQUE, {}),
    ]
    assert len(await read_journal(session, journal_key("5-1", "B"))) == 2


async def test_what_is_kept_is_told_with_the_turns_answer_and_what_was_thought_of_it_in_its_order(
    session: Bus, raw: redis.Redis
) -> None:
    assert await read_steps(session, "s", TURN, "5-1") is None
    await session.link.call(*keeping("s", "5-1", EVENTS))
    await judged(session, EntryType.REWARD, "9-5", stars=5)
    await judged(session, EntryType.PAIRWISE, "10-0", winner="A")
    await judged(session, EntryType.CRITIQUE, "9-5", score=4)
    told = await read_steps(session, "s", TURN, "5-1")
    assert told == [
        ("1-1", "state", {"to": "B"}),
        ("1-2", "completed", {"answer": "the answer", "model": "m"}),
        # two streams may have given the same id
        ("9-5", "critique", {"score": 4}),
        ("9-6", "reward", {"stars": 5}),
        ("10-0", "pairwise", {"winner": "A"}),
    ]
    # without its turn it says what is kept of it
    bare = await read_steps(session, "s", None, "5-1")
    assert bare is not None
    assert bare[1] == EVENTS[1]
    # an answer that differs from its turn's is its own
    await session.link.call(*keeping("s", "6-1", [("1-2", "cancelled", {"answer": "half"})]))
    other = await read_steps(session, "s", Turn("6-1", "q", "whole", 1), "6-1")
    assert other == [("1-2", "cancelled", {"answer": "half"})]


@pytest.mark.parametrize("late", [b"{", b"[1]", b"[{},[]]", b'[{},["x","later"]]', b'[5,"9-0"]', b"[{},5]", b"null"])
async def test_what_cannot_be_read_of_it_hides_nothing_else(late: bytes, session: Bus, raw: redis.Redis) -> None:
    await judged(session, EntryType.REWARD, "9-5", stars=5)
    raw.hset(STEPS, mapping={"5-1": b"{", "5-1 critique": late})
    reward = [("9-5", "reward", {"stars": 5})]
    assert await read_steps(session, "s", TURN, "5-1") == reward
    raw.hset(STEPS, mapping={
        "7-1 unanswered": "{", "x unanswered": WHY.model_dump_json(), b"\xff unanswered": "{}",
        "8-1 unanswered": WHY.model_dump_json(), "9-1 unanswered": '{"query":"q","state":"asleep"}',
        "10-1 unanswered": '{"query":"q","state":"cancelled","newer":1}',
    })  # fmt: skip
    unanswered = await read_unanswered(session, "s")
    assert unanswered == {"8-1": WHY, "10-1": Unanswered(query="q", state="cancelled")}


async def test_records_of_an_earlier_release_are_read_without_message_references(
    session: Bus, raw: redis.Redis
) -> None:
    crossed = [["query.received", "5-1"]]
    record = {"events": [["1-2", "completed", {"model": "m"}]], "crossed": crossed}
    vote = [{"stars": 5}, ["reward.event", "9-5"]]
    raw.hset(STEPS, mapping={"5-1": orjson.dumps(record), "5-1 reward": orjson.dumps(vote)})
    assert await read_steps(session, "s", TURN, "5-1") == [
        ("1-2", "completed", {"answer": "the answer", "model": "m"}), ("9-5", "reward", {"stars": 5}),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["completed", "cancelled", "failed"])
@pytest.mark.parametrize("turned", [True, False])
async def test_of_a_journal_that_has_ended_is_kept_what_it_tells(
    kind: str, turned: bool, session: Bus, raw: redis.Redis
) -> None:
    query = QueryReceived(session_id="s", query="why?", user_id="u", mode="chat")
    query_id = "5-1" if turned else "6-1"
    key = journal_key(query_id, "A")
    claimed = {"query_id": query_id, "session_id": "s", "model": "m"}
    raw.xadd(key, {"type": "claimed", "time": 1, "data": orjson.dumps(claimed)}, id="1-1")
    raw.xadd(key, {"type": "answer", "time": 1, "data": '{"text":"the answer"}'}, id="1-2")
    await keep_ended(session, query, query_id)
    # it has not ended
    assert not raw.exists(STEPS)
    data = whole(kind, {"answer": "the answer", "code": "c", "message": "m"})
    crossed = orjson.dumps([["query.received", query_id]])
    raw.xadd(key, {"type": kind, "time": 1, "data": orjson.dumps(data), "crossed": crossed}, id="1-3")
    raw.xadd(key, {"type": "reward", "time": 1, "data": "{}"}, id="9-0")
    await keep_ended(session, query, query_id)
    kept = {name.decode(): orjson.loads(value) for name, value in raw.hgetall(STEPS).items()}
    ended = {
        "completed": {name: WHOLE["completed"][name] for name in ("usage", "finish_reason", "model")},
        "cancelled": {},
        "failed": {"code": "c", "message": "m"},
    }[kind]
    if turned:
        # the answer is its turn's
        events = [["1-1", "claimed", claimed], ["1-3", kind, ended]]
    else:
        said = {"answer": "the answer"} if kind == "cancelled" else ended
        events = [["1-1", "claimed", claimed], ["1-2", "answer", {"text": "the answer"}], ["1-3", kind, said]]
    record = {query_id: {"events": events}}
    why: dict[str, Any] = {"query": "why?", "mode": "chat", "after": None, "state": kind, "error": None}
    if kind == "failed":
        why["error"] = ended
    # an answer without a turn is one that its session has lost: nothing shows it
    reason = {} if turned else {f"{query_id} unanswered": why}
    assert kept == ({} if kind == "completed" and not turned else {**record, **reason})


async def test_a_summary_says_until_where_it_reaches_and_is_read_as_it_is(session: Bus, raw: redis.Redis) -> None:
    summaries, key = Summaries(session), summary_key("s")
    later = Turn("6-1", "q", "a", 2)
    await session.link.pipe(Sessions(session).appending("s", "A", later))
    assert await summaries.read("s") is None
    assert await summaries.keep("s", "u", None, [TURN], "first")
    assert raw.hgetall(key) == {b"until": b"5-1", b"turns": b"1", b"text": b"first", b"attachments": b"[]"}
    first = await summaries.read("s")
    assert first == Summary("5-1", 1, "first")
    # another conversation's takes its place, when it is the one that is known
    assert not await summaries.keep("s", "u", None, [later], "other", instead=Summary("4-1", 1, "?"))
    assert await summaries.keep("s", "u", None, [later], "other", instead=first)
    assert await summaries.read("s") == Summary("6-1", 1, "other")
    assert await summaries.keep("s", "u", Summary("6-1", 1, "other"), [TURN, later], "both")
    assert await summaries.read("s") == Summary("6-1", 3, "both")
    # a turn that is there only by the beginning of its id is not
    raw.delete(turns_key("s", "A"))
    await session.link.pipe(Sessions(session).appending("s", "A", Turn("6-11", "q", "a", 2)))
    assert not await summaries.keep("s", "u", Summary("6-1", 3, "both"), [later], "gone")
    raw.hdel(key, "text", "turns")
    assert await summaries.read("s") == Summary("6-1", 0, "")
    raw.hset(key, "until", "")
    assert await summaries.read("s") is None
