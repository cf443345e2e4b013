"""Accepting, and the lane of a session: its queries run one at a time, in the order accepted, whoever reads them."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pytest
import redis
from support.lives import unending
from support.proxy import Proxy

from shared.bus import Bus, ReplyError, order
from shared.bus.keys import lane_key, once_key, queries_key, record_key, waiting_key
from shared.contracts import QUERY_RECEIVED, Outgoing, QueryReceived
from shared.records import lanes
from shared.records.lanes import Accepted

STREAM = QUERY_RECEIVED.stream


async def accept(
    bus: Bus, *, once: str | None = None, respondents: tuple[str, ...] = ("A",), limit: int = 100, session: str = "s",
    seconds: int = 600,
) -> Accepted | None:  # fmt: skip
    payload = QueryReceived(session_id=session, query="q", user_id="u")
    message = QUERY_RECEIVED.of(payload, once=once or uuid.uuid4().hex, session_id=session, user_id="u")
    record = {"user_id": "u", "query": "q", "once": message.once or ""}
    return await lanes.accept(
        bus, message, record, left=60.0, seconds=seconds, session_id=session, respondents=respondents, limit=limit
    )


async def accepted(bus: Bus, **how: Any) -> str:
    found = await accept(bus, **how)
    assert found is not None
    assert found.earlier is None
    return found.query_id


def group(raw: redis.Redis, name: str = "generator") -> None:
    raw.xgroup_create(STREAM, name, "0", mkstream=True)


def finish(raw: redis.Redis, query_id: str, name: str = "generator") -> None:
    """The group reads and acknowledges everything up to a query; nobody leaves a lane."""
    for _, entries in raw.xreadgroup(name, "c", {STREAM: ">"}):
        raw.xack(STREAM, name, *(i for i, _ in entries if order(i.decode()) <= order(query_id)))


@pytest.mark.parametrize("seed", range(100))
async def test_no_interleaving_grants_two_at_once_or_out_of_order(seed: int, bus: Bus, raw: redis.Redis) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    granted: list[str] = []
    running: set[str] = set()

    async def pause() -> None:
        for _ in range(rng.choice((0, 0, 1, 3))):
            await asyncio.sleep(rng.choice((0, 0, 0.001)))

    async def gateway() -> None:
        await pause()
        query_id = await accepted(bus)
        readers.append(asyncio.create_task(reader(query_id)))

    async def reader(query_id: str) -> None:
        await pause()
        while await lanes.turn(bus, "s", "A", query_id, "inbox") is not None:
            await pause()
            await asyncio.sleep(0)
        assert not running, "two at once"
        running.add(query_id)
        granted.append(query_id)
        await pause()
        # a second replica that took the query over asks again, and still has the turn
        assert await lanes.turn(bus, "s", "A", query_id, "inbox") is None
        running.discard(query_id)
        await lanes.leave(bus, "s", "A", query_id)

    readers: list[asyncio.Task[None]] = []
    async with asyncio.timeout(10):
        await asyncio.gather(*(gateway() for _ in range(count)))
        await asyncio.gather(*readers)
    assert granted == sorted(granted, key=order)
    assert len(granted) == count
    assert not raw.exists(lane_key("A", "s"))


async def test_all_of_an_accepted_query_is_there_at_once(bus: Bus, raw: redis.Redis) -> None:
    query_id = await accepted(bus, once="o", respondents=("A", "B"))
    ((entry_id, _),) = raw.xrange(STREAM)
    assert entry_id.decode() == query_id == raw.get(once_key(QUERY_RECEIVED.stream, "o")).decode()
    assert raw.hgetall(record_key(query_id))[b"query"] == b"q"
    assert raw.zrange(queries_key("s"), 0, -1) == [query_id.encode()]
    assert [await lanes.unfinished(bus, "s", respondent) for respondent in "AB"] == [[query_id], [query_id]]
    for key in (once_key(QUERY_RECEIVED.stream, "o"), record_key(query_id), queries_key("s"), lane_key("A", "s")):
        assert raw.ttl(key) > 500, key


async def test_the_same_once_gives_the_earlier_query_and_leaves_nothing(bus: Bus, raw: redis.Redis) -> None:
    group(raw)
    query_id = await accepted(bus, once="o")
    found = await asyncio.gather(*(accept(bus, once="o") for _ in range(5)))
    assert {one.query_id for one in found if one} == {query_id}
    assert all(one is not None and one.earlier is not None and one.earlier["query"] == "q" for one in found)
    # finished: a place taken now would stay
    finish(raw, query_id)
    await lanes.leave(bus, "s", "A", query_id)
    again = await accept(bus, once="o", limit=1)
    assert again is not None
    assert again.query_id == query_id
    assert raw.xlen(STREAM) == 1
    assert not raw.exists(lane_key("A", "s"))


async def test_lost_replies_accept_nothing_twice_and_lose_nothing(redis_url: str, raw: redis.Redis) -> None:
    async with Proxy(redis_url, drop_every=7) as proxy, Bus(proxy.url, "test/1", timeout=0.3) as through:
        found = [await accept(through, session=f"s{n}") for n in range(40)]
        assert proxy.dropped > 5
    ids = {one.query_id for one in found if one is not None}
    assert len(ids) == 40
    assert {entry_id.decode() for entry_id, _ in raw.xrange(STREAM)} == ids
    assert all(raw.exists(record_key(query_id)) for query_id in ids)
    for n in range(40):
        assert raw.zcard(lane_key("A", f"s{n}")) == 1


async def test_what_redis_refuses_is_refused_whole(bus: Bus, raw: redis.Redis) -> None:
    for key in (queries_key("s"), lane_key("B", "s")):
        raw.set(key, "no sorted set")
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            await accept(bus, once="o", respondents=("A", "B"))
        raw.delete(key)
    assert raw.keys("local2:*") == []


async def test_a_slow_shadow_refuses_nobody(bus: Bus, raw: redis.Redis) -> None:
    for _ in range(5):
        query_id = await accepted(bus, respondents=("A", "B"), limit=2)
        assert await lanes.turn(bus, "s", "A", query_id, "inbox") is None
        await lanes.leave(bus, "s", "A", query_id)
    assert raw.zcard(lane_key("B", "s")) == 5


async def test_the_limit_counts_what_is_not_answered_and_a_refusal_leaves_nothing(bus: Bus, raw: redis.Redis) -> None:
    # without a generator nothing is finished
    first, _ = await accepted(bus, limit=2), await accepted(bus, limit=2)
    before = sorted(raw.keys())
    for _ in range(3):
        assert await accept(bus, limit=2, respondents=("A", "B")) is None
    assert sorted(raw.keys()) == before
    assert raw.xlen(STREAM) == 2
    group(raw)
    raw.xreadgroup("generator", "c", {STREAM: ">"})
    assert await accept(bus, limit=2) is None
    await lanes.leave(bus, "s", "A", first)
    assert await accept(bus, limit=2) is not None


async def test_one_query_at_a_time_is_taken_where_nothing_else_is_said(bus: Bus) -> None:
    def one() -> Outgoing:
        return QUERY_RECEIVED.of(QueryReceived(session_id="s", query="q", user_id="u"), once=uuid.uuid4().hex)

    how: dict[str, Any] = {"left": 60.0, "seconds": 60, "session_id": "s", "respondents": ("A",)}
    assert await lanes.accept(bus, one(), {"query": "q"}, **how) is not None
    assert await lanes.accept(bus, one(), {"query": "q"}, **how) is None


@pytest.mark.parametrize("how", ["acknowledged", "trimmed"])
async def test_a_place_that_nobody_left_is_in_nobodys_way(how: str, bus: Bus, raw: redis.Redis) -> None:
    group(raw)
    abandoned = [await accepted(bus) for _ in range(3)]
    following = await accepted(bus)
    assert await lanes.turn(bus, "s", "A", following, "inbox") == abandoned[0]
    finish(raw, abandoned[-1])
    if how == "trimmed":
        raw.xtrim(STREAM, minid=following)
    assert await lanes.turn(bus, "s", "A", following, "inbox") is None
    assert await lanes.unfinished(bus, "s", "A") == [following]


async def test_what_is_finished_is_told_by_ids_as_numbers_and_by_what_is_still_held(bus: Bus, raw: redis.Redis) -> None:
    ids = ["900-9", "1000-1", "1000-2", "1000-30"]
    for query_id in ids:
        raw.xadd(STREAM, {"payload": "{}"}, id=query_id)
    group(raw)
    raw.xgroup_create(STREAM, "another", "$")
    raw.zadd(lane_key("A", "s"), {lanes.padded(query_id): 0 for query_id in ids} | {"no id": 0, b"\xff": 0})
    raw.xreadgroup("generator", "c", {STREAM: ">"}, count=3)
    raw.xack(STREAM, "generator", "900-9", "1000-2")
    assert await lanes.turn(bus, "s", "A", "2000-0", "inbox") == "1000-1"
    assert await lanes.unfinished(bus, "s", "A") == ["1000-1", "1000-2", "1000-30", "2000-0"]
    raw.xack(STREAM, "generator", "1000-1")
    # it was not read yet
    assert await lanes.turn(bus, "s", "A", "2000-0", "inbox") == "1000-30"
    assert await lanes.unfinished(bus, "s", "A") == ["1000-30", "2000-0"]
    raw.xreadgroup("generator", "c", {STREAM: ">"})
    assert await lanes.turn(bus, "s", "A", "2000-0", "inbox") == "1000-30"
    raw.xack(STREAM, "generator", "1000-30")
    assert await lanes.turn(bus, "s", "A", "2000-0", "inbox") is None


async def test_a_place_that_nobody_left_does_not_count_against_the_session(bus: Bus, raw: redis.Redis) -> None:
    group(raw)
    abandoned = await accepted(bus, limit=1)
    assert await accept(bus, limit=1) is None
    finish(raw, abandoned)
    following = await accepted(bus, limit=1)
    assert await lanes.unfinished(bus, "s", "A") == [following]


async def test_a_shadow_that_comes_back_after_its_queries_are_gone_goes_on(bus: Bus, raw: redis.Redis) -> None:
    group(raw, "respondent-b")
    for _ in range(3):
        await accepted(bus, respondents=("A", "B"))
    raw.xtrim(STREAM, maxlen=0)
    query_id = await accepted(bus, respondents=("A", "B"))
    assert await lanes.turn(bus, "s", "B", query_id, "inbox") is None


async def test_a_shadow_that_is_switched_on_later_answers_in_order(bus: Bus) -> None:
    first, second = await accepted(bus), await accepted(bus)
    assert await lanes.turn(bus, "s", "B", first, "inbox-1") is None
    assert await lanes.turn(bus, "s", "B", second, "inbox-2") == first
    await lanes.leave(bus, "s", "B", first)
    assert await lanes.turn(bus, "s", "B", second, "inbox-2") is None


async def test_an_entry_that_is_in_no_lane_takes_its_place(bus: Bus, raw: redis.Redis) -> None:
    """Written by redis-cli."""
    payload = b'{"session_id":"s","query":"q","user_id":"u"}'
    early = raw.xadd(STREAM, {"payload": payload}).decode()
    assert await lanes.turn(bus, "s", "A", early, "inbox") is None
    late = await accepted(bus)
    assert await lanes.turn(bus, "s", "A", late, "inbox") == early
    later = raw.xadd(STREAM, {"payload": payload}).decode()
    assert await lanes.turn(bus, "s", "A", later, "inbox") == early
    for query_id in (early, late, later):
        assert await lanes.turn(bus, "s", "A", query_id, "inbox") is None
        await lanes.leave(bus, "s", "A", query_id)
    assert not raw.exists(lane_key("A", "s"))


async def test_a_query_that_is_accepted_into_an_empty_lane_has_the_turn_and_its_entry_says_so(
    bus: Bus, raw: redis.Redis
) -> None:
    early = raw.xadd(STREAM, {"payload": "{}"}, id="1-1").decode()
    first, second = await accepted(bus), await accepted(bus, respondents=("A", "B"))
    other = await accepted(bus, session="t", respondents=("A", "B"))
    told = {entry_id.decode(): fields.get(b"turn") for entry_id, fields in raw.xrange(STREAM)}
    assert told == {early: None, first: b"A", second: b"B", other: b"AB"}
    # as if it had asked: whatever is read before it waits
    assert await lanes.running(bus, "s")
    assert await lanes.turn(bus, "s", "A", second, "inbox") == first
    assert await lanes.turn(bus, "s", "A", early, "inbox") == first
    await lanes.leave(bus, "s", "A", first)
    # nobody has the turn, and it is no newcomer's
    third = await accepted(bus)
    assert b"turn" not in raw.xrange(STREAM, third, third)[0][1]
    assert await lanes.turn(bus, "s", "A", third, "inbox") == "1-1"


async def test_whoever_runs_stays_first(bus: Bus, raw: redis.Redis) -> None:
    early = raw.xadd(STREAM, {"payload": b"{}"}).decode()
    late = await accepted(bus)
    assert await lanes.turn(bus, "s", "A", late, "inbox") is None
    assert await lanes.turn(bus, "s", "A", early, "inbox") == late
    assert await lanes.turn(bus, "s", "A", late, "inbox") is None
    assert await lanes.running(bus, "s")


async def test_leaving_wakes_the_next_and_creates_no_inbox_for_the_dead(bus: Bus, raw: redis.Redis) -> None:
    first, second, third = [await accepted(bus) for _ in range(3)]
    assert await lanes.turn(bus, "s", "A", first, "inbox-1") is None
    assert await lanes.turn(bus, "s", "A", second, "inbox-2") == first
    assert await lanes.turn(bus, "s", "A", third, "inbox-3") == first
    raw.xadd("inbox-2", {"type": "started"})
    await lanes.leave(bus, "s", "A", first)
    assert raw.xrange("inbox-2")[-1][1] == {b"type": b"wake", b"session": b"s", b"respondent": b"A"}
    await lanes.leave(bus, "s", "A", second)
    assert not raw.exists("inbox-3")
    assert await lanes.turn(bus, "s", "A", third, "inbox-3") is None


async def test_sessions_and_respondents_have_lanes_of_their_own(bus: Bus) -> None:
    first, second = await accepted(bus, respondents=("A", "B")), await accepted(bus, respondents=("A", "B"))
    other = await accepted(bus, session="t")
    assert await lanes.turn(bus, "s", "A", first, "i") is None
    assert await lanes.turn(bus, "s", "B", second, "i") == first
    assert await lanes.turn(bus, "t", "A", other, "i") is None


async def test_a_query_with_its_own_history_has_no_place_and_no_session(bus: Bus, raw: redis.Redis) -> None:
    payload = QueryReceived(session_id="s", query="q", user_id="u", messages=[])
    found = await lanes.accept(bus, QUERY_RECEIVED.of(payload, once="o"), {"user_id": "u"}, left=60.0, seconds=60)
    assert found is not None
    assert {key.decode() for key in raw.scan_iter()} == {
        STREAM,
        once_key(QUERY_RECEIVED.stream, "o"),
        record_key(found.query_id),
    }


async def test_what_waits_in_a_lane_goes_by_itself_when_nobody_comes_back(bus: Bus, raw: redis.Redis) -> None:
    first, second = [await accepted(bus) for _ in range(2)]
    raw.delete(lane_key("A", "s"), lane_key("B", "s"))
    # places that are taken late: by an entry that was in no lane, and by whoever waits behind it
    for respondent in ("A", "B"):
        assert await lanes.turn(bus, "s", respondent, first, "inbox") is None
        assert await lanes.turn(bus, "s", respondent, second, "inbox") is not None
        assert raw.hlen(waiting_key(respondent, "s")) == 1
    assert unending(raw) == []


async def test_a_sessions_queries_are_listed_for_twice_as_long_as_they_are_kept(bus: Bus, raw: redis.Redis) -> None:
    raw.zadd(queries_key("s"), {"1-0": 5})
    first = await accepted(bus)
    assert raw.zrange(queries_key("s"), 0, -1, withscores=True) == [(first.encode(), order(first)[0] + 1_200_000)]
    assert 1_100 < raw.ttl(queries_key("s")) <= 1_200
    # one that is kept for less shortens nothing
    second = await accepted(bus, seconds=60)
    assert raw.zscore(queries_key("s"), second) == order(second)[0] + 120_000
    assert raw.zcard(queries_key("s")) == 2
    assert raw.ttl(queries_key("s")) > 1_100


async def test_whoever_leaves_is_neither_waiting_nor_running(bus: Bus, raw: redis.Redis) -> None:
    first, second, third = [await accepted(bus) for _ in range(3)]
    assert await lanes.turn(bus, "s", "A", first, "inbox-1") is None
    for waiting in (second, third):
        assert await lanes.turn(bus, "s", "A", waiting, "inbox-2") == first
    await lanes.leave(bus, "s", "A", second)
    assert raw.hkeys(waiting_key("A", "s")) == [lanes.padded(third).encode()]
    assert await lanes.running(bus, "s")
    await lanes.leave(bus, "s", "A", first)
    assert not await lanes.running(bus, "s")
    assert await lanes.turn(bus, "s", "A", third, "inbox-2") is None
    assert not raw.exists(waiting_key("A", "s"))


async def test_who_waited_and_is_gone_is_cleared_with_its_place(bus: Bus, raw: redis.Redis) -> None:
    group(raw)
    first, second = await accepted(bus), await accepted(bus)
    assert await lanes.turn(bus, "s", "A", first, "inbox-1") is None
    assert await lanes.turn(bus, "s", "A", second, "inbox-2") == first
    await lanes.leave(bus, "s", "A", first)
    # the one whose turn it is never comes
    finish(raw, second)
    third = await accepted(bus)
    assert await lanes.turn(bus, "s", "A", third, "inbox-3") is None
    assert not raw.exists(waiting_key("A", "s"))


async def test_what_is_unfinished_is_told_of_several_sessions_in_its_order(bus: Bus) -> None:
    ids = [await accepted(bus, session=session, respondents=("A", "B")) for session in ("s", "t", "s", "u")]
    assert await lanes.unfinished_of(bus, ["t", "s", "nobody"], "A") == ids[:3]
    await lanes.leave(bus, "s", "A", ids[0])
    assert await lanes.unfinished_of(bus, ["s", "t"], "A") == ids[1:3]
    assert await lanes.unfinished_of(bus, ["s"], "B") == [ids[0], ids[2]]


async def test_accepting_tells_how_many_queries_are_unfinished(bus: Bus, raw: redis.Redis) -> None:
    async def told() -> int | None:
        found = await accept(bus)
        assert found is not None
        return found.unfinished

    # before any generator has come
    assert [await told(), await told()] == [1, 2]
    group(raw)
    ((_, read),) = raw.xreadgroup("generator", "c", {STREAM: ">"}, count=1)
    assert await told() == 3
    raw.xack(STREAM, "generator", *(entry_id for entry_id, _ in read))
    assert await told() == 3
    # Redis loses count of what is deleted unread
    raw.xdel(STREAM, raw.xrange(STREAM)[2][0])
    assert await told() is None
