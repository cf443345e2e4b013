"""Streams are bounded, but never past an entry that a group has not finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
from support.consuming import GROUP, Recorder, consuming
from support.waiting import eventually

from shared.bus import Bus, Route, StreamTailer
from shared.bus.keys import JANITOR, KNOWN_TOOLS
from shared.bus.replies import BusFull
from shared.contracts import (
    AGENT_TRANSITION,
    DEAD_LETTER,
    KNOWLEDGE_READ,
    PREFIX,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    TOOL_REQUEST,
    TOOL_RESULT,
    AgentTransition,
    Subject,
    ToolResultMessage,
)
from shared.envelope import now_ms
from shared.participant.janitor import Janitor

SUBJECT = RESPONSE_GENERATION
WORK = SUBJECT.stream


# Here, a group is absent whose consumers were inactive for this long (ms, by the clock of the server).
SILENT_MS = 300


class TimedBus(Bus):
    """A bus whose clock the test sets, and on which a consumer is soon inactive.

    step_ms: what each round of a janitor adds to the clock. full: whether one repair is refused for lack of memory.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, "test/1")
        self.now = now_ms()
        self.step_ms = 0
        self.rounds = 0
        self.denied = 0
        self.full = False

    def now_ms(self) -> int:
        return self.now

    async def learn_time(self) -> None:
        self.now += self.step_ms
        self.rounds += 1

    async def lease(self, key: str, owner: str, ttl_ms: int) -> bool:
        has_it = await super().lease(key, owner, ttl_ms)
        self.denied += not has_it
        return has_it

    async def idle_groups(self, subject: Subject[Any], silent_ms: int) -> list[str]:
        return await super().idle_groups(subject, min(silent_ms, SILENT_MS))

    async def reset_exhausted_ids(self, stream: str) -> bool:
        if self.full:
            raise BusFull("OOM command not allowed")
        return await super().reset_exhausted_ids(stream)


@pytest.fixture
async def timed(redis_url: str) -> AsyncIterator[TimedBus]:
    async with TimedBus(redis_url) as opened:
        yield opened


async def watching(janitor: Janitor, bus: TimedBus, seconds: int, pause: int = 5) -> None:
    for _ in range(seconds // pause):
        bus.now += pause * 1000
        await janitor.round()


def left_over(raw: redis.Redis) -> None:
    """Three answers of two hours ago: memory has read two of them and finished none, the critic has finished all."""
    for group in ("memory", "critic"):
        raw.xgroup_create(WORK, group, "0", mkstream=True)
    old = now_ms() - 7_200_000
    ids = [raw.xadd(WORK, {"payload": "{}"}, id=f"{old + n}-0") for n in range(3)]
    raw.xreadgroup("memory", "m1", {WORK: ">"}, count=2)
    raw.xreadgroup("critic", "c1", {WORK: ">"})
    raw.xack(WORK, "critic", *ids)


async def test_janitor_trims_nothing_unfinished_after_a_night_off(timed: TimedBus, raw: redis.Redis) -> None:
    """Every participant is silent for hours when the first one comes back, and only it can clean up."""
    left_over(raw)
    await silent(raw)
    janitor = Janitor(timed, 30)

    async def watched(seconds: int) -> None:
        for _ in range(seconds // 30):
            # the first one back, whose work is finished
            raw.xreadgroup("critic", "c1", {WORK: "0"})
            await watching(janitor, timed, 30, 30)

    await watched(600)
    assert raw.xlen(WORK) == 3
    # asleep again: what was seen before proves nothing
    timed.now += 5 * 3_600_000
    await watched(3_000)
    assert raw.xlen(WORK) == 3


async def test_group_observed_absent_for_an_hour_holds_nothing_back(timed: TimedBus, raw: redis.Redis) -> None:
    left_over(raw)
    await silent(raw)
    janitor = Janitor(timed, 60)
    for seconds, left in ((3_500, 3), (300, 0)):
        for _ in range(seconds // 60):
            # a look at what is its own: before Redis 7.2 a read that finds nothing new is no sign of life
            raw.xreadgroup("critic", "c1", {WORK: "0"})
            await watching(janitor, timed, 60, 60)
        assert raw.xlen(WORK) == left


async def test_group_whose_consumer_is_active_is_not_absent(timed: TimedBus, raw: redis.Redis) -> None:
    left_over(raw)
    janitor = Janitor(timed, 60)
    for _ in range(120):
        raw.xreadgroup("memory", "m1", {WORK: "0"})
        await watching(janitor, timed, 60, 60)
    assert raw.xlen(WORK) == 3


async def test_generator_backlog_is_kept_while_no_generator_runs(timed: TimedBus, raw: redis.Redis) -> None:
    stream = QUERY_RECEIVED.stream
    raw.xgroup_create(stream, "generator", "0", mkstream=True)
    raw.xgroup_create(stream, "respondent-b", "0", mkstream=True)
    # more than stays of a stream that nobody reads
    waiting = QUERY_RECEIVED.keep + 2_000
    await timed.link.pipe([("XADD", stream, "*", "payload", "x")] * waiting)
    await watching(Janitor(timed, 60), timed, 10_000, 60)
    assert raw.xlen(stream) == waiting


async def test_janitor_without_the_lease_forgets_its_observations(timed: TimedBus, raw: redis.Redis) -> None:
    left_over(raw)
    await silent(raw)
    timed.step_ms = 30_000

    def is_so(fact: Callable[[], bool]) -> Callable[[], bool]:
        """Check a fact, and keep one group present: else the stream has no group that it could be trimmed for."""

        def check() -> bool:
            raw.xreadgroup("critic", "c1", {WORK: "0"})
            return fact()

        return check

    running = asyncio.create_task(Janitor(timed, 0.001).run())
    await eventually(is_so(lambda: timed.rounds >= 60))
    # another janitor has the lease now: later observations may have a gap
    raw.set(JANITOR, "other/1", px=600_000)
    await eventually(is_so(lambda: timed.denied > 0))
    observed = timed.rounds
    raw.delete(JANITOR)
    await eventually(is_so(lambda: raw.xlen(WORK) == 0))
    assert timed.rounds - observed >= 120
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def silent(raw: redis.Redis) -> None:
    """Wait until no consumer is active."""

    def idle() -> bool:
        consumers = [one for group in raw.xinfo_groups(WORK) for one in raw.xinfo_consumers(WORK, group["name"])]
        return all(one["idle"] > SILENT_MS for one in consumers)

    await eventually(idle)


async def test_key_of_another_type_stops_no_janitor(timed: TimedBus, raw: redis.Redis) -> None:
    raw.xgroup_create(WORK, GROUP, "0", mkstream=True)
    ids = [raw.xadd(WORK, {"payload": "x"}) for _ in range(3)]
    raw.xreadgroup(GROUP, "c", {WORK: ">"})
    raw.xack(WORK, GROUP, *ids)
    raw.lpush(JANITOR, "x")
    raw.set(QUERY_RECEIVED.stream, "x")
    timed.now += 120_000
    running = asyncio.create_task(Janitor(timed, 0.05).run())
    await eventually(lambda: raw.xlen(WORK) == 0)
    await eventually(lambda: raw.get(JANITOR) == timed.source.encode())
    assert 0 < raw.pttl(JANITOR) <= 150
    assert raw.get(QUERY_RECEIVED.stream) == b"x"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_lease_has_one_owner_until_it_expires(redis_url: str, bus: Bus, raw: redis.Redis) -> None:
    async with Bus(redis_url, "other/1") as second:

        async def first() -> bool:
            return await bus.lease(JANITOR, bus.source, 15_000)

        async def other() -> bool:
            return await second.lease(JANITOR, second.source, 15_000)

        assert [await first(), await other(), await first()] == [True, False, True]
        raw.pexpire(JANITOR, 1_000)
        assert await first()
        assert 14_000 < raw.pttl(JANITOR) <= 15_000
        raw.delete(JANITOR)
        assert [await other(), await first()] == [True, False]
        # the clock of Redis went back by an hour after the owner's end
        raw.pexpire(JANITOR, 3_600_000)
        assert not await first()
        assert 50_000 < raw.pttl(JANITOR) <= 60_000
        raw.pexpire(JANITOR, 20_000)
        assert not await first()
        assert raw.pttl(JANITOR) <= 20_000


async def test_large_finished_entries_above_a_limit_are_not_spared(bus: Bus, raw: redis.Redis) -> None:
    """32 MB of entries that were just finished stay for observers."""
    raw.xgroup_create(WORK, "g", "0", mkstream=True)
    for count, removed in ((20, 0), (20, 40)):
        ids = [raw.xadd(WORK, {"payload": "x" * 1_000_000}) for _ in range(count)]
        raw.xreadgroup("g", "c", {WORK: ">"}, count=count)
        raw.xack(WORK, "g", *ids)
        assert await bus.trim(SUBJECT, spare_ms=60_000) == removed
    assert raw.xlen(WORK) == 0


async def test_janitor_trims_streams_of_a_full_redis(timed: TimedBus, raw: redis.Redis) -> None:
    timed.full = True
    raw.xadd(DEAD_LETTER.stream, {"payload": "{}"})
    raw.xgroup_create(WORK, "g", "0", mkstream=True)
    entry_id = raw.xadd(WORK, {"payload": "x"}, id=f"{now_ms() - 90_000}-1")
    raw.xreadgroup("g", "c", {WORK: ">"})
    raw.xack(WORK, "g", entry_id)
    await Janitor(timed, 5).round()
    assert raw.xlen(WORK) == 0


@pytest.mark.parametrize("office", ["held", "nobody's"])
async def test_a_redis_without_room_is_tidied_by_who_has_the_office_or_by_anybody(
    office: str, redis_url: str, bus: Bus, raw: redis.Redis
) -> None:
    janitor = Janitor(bus, 0.05)
    assert await bus.lease(JANITOR, bus.source, 150)
    raw.xgroup_create(WORK, "g", "0", mkstream=True)
    entry_id = raw.xadd(WORK, {"payload": "x"}, id=f"{now_ms() - 90_000}-1")
    raw.xreadgroup("g", "c", {WORK: ">"})
    raw.xack(WORK, "g", entry_id)
    raw.config_set("maxmemory", 1)
    try:
        if office == "held":
            async with Bus(redis_url, "other/1") as second:
                assert not await second.lease(JANITOR, second.source, 150)
        else:
            raw.delete(JANITOR)
        running = asyncio.create_task(janitor.run())
        await eventually(lambda: raw.xlen(WORK) == 0)
        running.cancel()
    finally:
        raw.config_set("maxmemory", 0)


async def test_a_stream_of_one_group_keeps_what_was_finished_for_a_second(
    redis_url: str, timed: TimedBus, raw: redis.Redis
) -> None:
    recorder = Recorder()
    async with consuming(redis_url, recorder, streams={KNOWLEDGE_READ.stream: Route(recorder)}):
        for _ in range(200):
            raw.xadd(KNOWLEDGE_READ.stream, {"payload": "x"})
        await eventually(lambda: len(recorder.seen) == 200)
        await eventually(lambda: raw.xpending(KNOWLEDGE_READ.stream, GROUP)["pending"] == 0)
        timed.now = now_ms()
        await Janitor(timed, 5).round()
        assert raw.xlen(KNOWLEDGE_READ.stream) > 0
        timed.now += 1_001
        await Janitor(timed, 5).round()
        assert raw.xlen(KNOWLEDGE_READ.stream) == 0


async def test_requests_that_wait_for_an_untrusted_worker_stay(bus: Bus, raw: redis.Redis) -> None:
    raw.sadd(KNOWN_TOOLS, "web_x")
    stream = TOOL_REQUEST.for_tool("web_x").stream
    raw.xgroup_create(stream, "web_x", "0", mkstream=True)
    ids = [raw.xadd(stream, {"payload": "x" * 100_000}, id=f"{now_ms() - 5_000}-{n + 1}") for n in range(300)]
    raw.xreadgroup("web_x", "w", {stream: ">"}, count=200)
    raw.xack(stream, "web_x", *ids[:100])
    # Every kind of key is far above its quota then.
    raw.config_set("maxmemory", 1)
    try:
        await Janitor(bus, 5).round()
    finally:
        raw.config_set("maxmemory", 0)
    assert raw.xlen(stream) == 200
    assert raw.xpending(stream, "web_x")["pending"] == 100


async def test_event_streams_are_bounded(bus: Bus, raw: redis.Redis) -> None:
    event = AGENT_TRANSITION.of(
        AgentTransition(agent="a", replica="r", query_id="1-1", from_state="IDLE", action="RECEIVE", to="RECEIVING")
    )
    result = TOOL_RESULT.for_tool("probe").of(
        ToolResultMessage(query_id="1-1", call_id="c", tool="probe", result="r", duration_ms=0)
    )
    for _ in range(24):
        await bus.publish(*[event] * 500, *[result] * 500)
    for subject in (AGENT_TRANSITION, TOOL_RESULT.for_tool("probe")):
        assert subject.keep <= raw.xlen(subject.stream) <= subject.keep + 200


async def test_the_backlog_is_right_when_redis_has_lost_count(bus: Bus, raw: redis.Redis) -> None:
    raw.xgroup_create(WORK, "g", "0", mkstream=True)
    ids = [raw.xadd(WORK, {"payload": "x"}) for _ in range(10)]
    raw.xreadgroup("g", "c", {WORK: ">"}, count=3)
    raw.xdel(WORK, ids[6])
    assert raw.xinfo_groups(WORK)[0]["lag"] is None
    assert await bus.backlog(WORK, "g") == 3 + 6
    assert await bus.backlog(WORK, "nobody") == 9
    assert await bus.backlog(f"{PREFIX}nothing", "g") == 0


async def test_an_entry_is_finished_when_its_group_has_read_and_acknowledged_it(bus: Bus, raw: redis.Redis) -> None:
    raw.xgroup_create(WORK, "g", "0", mkstream=True)
    first, second = (raw.xadd(WORK, {"payload": "x"}).decode() for _ in range(2))
    assert not await bus.finished(WORK, "g", first)
    raw.xreadgroup("g", "c", {WORK: ">"}, count=1)
    assert not await bus.finished(WORK, "g", first)
    raw.xack(WORK, "g", first)
    assert await bus.finished(WORK, "g", first)
    assert not await bus.finished(WORK, "g", second)


@pytest.mark.parametrize(("retention", "expected"), [(100, 100), (5, 60)])
async def test_that_a_message_was_published_is_known_as_long_as_its_query(
    redis_url: str, raw: redis.Redis, retention: int, expected: int
) -> None:
    async with Bus(redis_url, "test/short", retention=retention) as bus:
        transition = AgentTransition(agent="a", replica="r", query_id="1-0", from_state="A", action="B", to="C")
        for once, deadline in (("without", None), ("with", now_ms() + 30_000)):
            first, second = (AGENT_TRANSITION.of(transition, once=once, deadline=deadline) for _ in range(2))
            assert await bus.publish(first) == await bus.publish(second)
        ttl = {key.decode().rpartition(":")[2]: raw.ttl(key) for key in raw.scan_iter("local2:once:*")}
    assert expected - 2 <= ttl["without"] <= expected
    assert expected + 27 <= ttl["with"] <= expected + 30


@pytest.mark.parametrize(("count", "size", "pieces"), [(2_000, 5_000, 20), (300, 100_000, 3)])
async def test_large_finished_entries_are_removed_in_pieces(
    count: int, size: int, pieces: int, bus: Bus, raw: redis.Redis
) -> None:
    """Redis does nothing else while it frees them: a piece has a hundred entries at most."""
    raw.xgroup_create(WORK, GROUP, "0", mkstream=True)
    with raw.pipeline(transaction=False) as pipe:
        for _ in range(count):
            pipe.xadd(WORK, {"payload": "x" * size})
        pipe.execute()
    raw.xreadgroup(GROUP, "gone", {WORK: ">"}, noack=True)
    raw.config_resetstat()
    assert await bus.trim(SUBJECT) == count
    assert raw.xlen(WORK) == 0
    called = raw.info("commandstats")
    assert called["cmdstat_xtrim"]["calls"] >= pieces
    # to look at large entries takes longer than to free them
    assert not {"cmdstat_xrange", "cmdstat_xread"} & called.keys()


async def test_a_stream_that_was_shut_by_its_last_id_is_opened_again_and_keeps_its_entries(
    bus: Bus, raw: redis.Redis
) -> None:
    """Whoever may write to a stream may choose ids: letters of others could not be written any more."""
    kept = raw.xadd(DEAD_LETTER.stream, {"payload": "{}"})
    last = 2**64 - 1
    for entry_id in (f"{last}-{last - 1}", f"{last}-{last}"):
        raw.xadd(DEAD_LETTER.stream, {"payload": "junk"}, id=entry_id)
    with pytest.raises(redis.exceptions.ResponseError):
        raw.xadd(DEAD_LETTER.stream, {"payload": "{}"})
    await Janitor(bus, 60).round()
    added = raw.xadd(DEAD_LETTER.stream, {"payload": "{}"})
    assert [entry_id for entry_id, _ in raw.xrange(DEAD_LETTER.stream)] == [kept, added]


async def test_a_follower_goes_on_behind_an_entry_that_leaves_no_room(bus: Bus, raw: redis.Redis) -> None:
    tail = StreamTailer(bus)
    reading = asyncio.create_task(tail.run())
    follower = tail.follow(DEAD_LETTER.stream)
    raw.xadd(DEAD_LETTER.stream, {"n": "1"})
    assert len(await follower.next()) == 1
    raw.xadd(DEAD_LETTER.stream, {"n": "junk"}, id=f"{2**64 - 1}-{2**64 - 1}")
    assert await follower.next(within=0.5) == []
    assert await bus.reset_exhausted_ids(DEAD_LETTER.stream)
    # once: there is room now, and there was none to make in a stream that is not there
    assert not await bus.reset_exhausted_ids(DEAD_LETTER.stream)
    assert not await bus.reset_exhausted_ids("local2:nothing")
    raw.xadd(DEAD_LETTER.stream, {"n": "2"})
    assert [fields for _, fields in await follower.next()] == [[b"n", b"2"]]
    reading.cancel()
