"""Work streams: shared, bounded, claimed from the dead, handed over by the leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from support.consuming import GROUP, STREAM, SUBJECT, Recorder, consuming
from support.waiting import always, eventually

from shared.bus import Bus, Consumer, Delivery, Route
from shared.contracts import DEAD_LETTER
from shared.errors import TransientError


def add(raw: redis.Redis, count: int, stream: str = STREAM) -> list[str]:
    return [raw.xadd(stream, {"payload": str(n)}).decode() for n in range(count)]


def pending(raw: redis.Redis, stream: str = STREAM) -> int:
    """Entries in flight; -1 before there is a group."""
    try:
        return raw.xpending(stream, GROUP)["pending"]
    except redis.ResponseError:
        return -1


def consumers(raw: redis.Redis, stream: str = STREAM) -> dict[str, int]:
    return {row["name"].decode(): row["pending"] for row in raw.xinfo_consumers(stream, GROUP)}


async def test_an_entry_is_acknowledged_only_after_its_effects(redis_url: str, raw: redis.Redis) -> None:
    seen_pending: list[int] = []

    async def handler(delivery: Delivery) -> list[Any]:
        seen_pending.append(pending(raw))
        return [("SET", "effect", "done")]

    async with consuming(redis_url, handler):
        add(raw, 1)
        await eventually(lambda: raw.get("effect") == b"done" and pending(raw) == 0)
    assert seen_pending == [1]


async def test_an_effect_that_redis_refuses_leaves_the_entry_unacknowledged(redis_url: str, raw: redis.Redis) -> None:
    tries = 0

    async def handler(delivery: Delivery) -> list[Any]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raw.config_set("maxmemory", 1)
        return [("XADD", "effects", "*", "by", delivery.entry_id)]

    try:
        async with consuming(redis_url, handler, heartbeat=0.1):
            add(raw, 1)
            await eventually(lambda: tries == 1)
            # also while they are offered again
            await always(lambda: pending(raw) == 1 and not raw.exists("effects"), 1.0)
            raw.config_set("maxmemory", 0)
            await eventually(lambda: raw.xlen("effects") == 1 and pending(raw) == 0)
        # what it found out is kept meanwhile
        assert tries == 1
    finally:
        raw.config_set("maxmemory", 0)


async def test_two_replicas_share_the_work_and_none_is_done_twice(redis_url: str, raw: redis.Redis) -> None:
    one, two = Recorder(0.002), Recorder(0.002)
    async with consuming(redis_url, one, replica="r1"), consuming(redis_url, two, replica="r2"):
        ids = add(raw, 300)
        await eventually(lambda: len(one.seen) + len(two.seen) >= 300)
        await eventually(lambda: pending(raw) == 0)
    assert sorted(one.seen + two.seen) == sorted(ids)
    assert len(one.seen) > 30
    assert len(two.seen) > 30


async def test_a_replica_takes_no_more_than_it_can_run(redis_url: str, raw: redis.Redis) -> None:
    add(raw, 40)
    slow = Recorder(0.01)
    async with consuming(redis_url, slow, concurrency=2) as consumer:
        while len(slow.seen) < 40:
            assert len(consumer.held) <= 2
            assert pending(raw) <= 2
            await asyncio.sleep(0)
    assert slow.most == 2


async def test_an_idle_replica_with_a_blocked_read_never_exceeds_its_slots_when_it_claims(
    redis_url: str, raw: redis.Redis
) -> None:
    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    gated = Recorder()
    gated.gate = asyncio.Event()
    add(raw, 2)
    raw.xreadgroup(GROUP, "dead", {STREAM: ">"})
    async with consuming(redis_url, gated, concurrency=2) as consumer:
        await eventually(lambda: len(consumer.held) == 2, what="two are claimed on an idle queue")
        add(raw, 5)
        await always(lambda: len(consumer.held) <= 2 and pending(raw) <= 2, 1.0)
        gated.gate.set()
        await eventually(lambda: len(gated.seen) == 7)
    assert gated.most == 2


async def test_a_full_replica_takes_over_no_more_than_it_can_run(redis_url: str, raw: redis.Redis) -> None:
    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    slow = Recorder(0.3)
    add(raw, 6)
    raw.xreadgroup(GROUP, "dead", {STREAM: ">"})
    async with consuming(redis_url, slow, concurrency=1, heartbeat=0.1) as consumer:
        while len(slow.seen) < 6:
            assert len(consumer.held) <= 1
            await asyncio.sleep(0)
    assert slow.most == 1


async def test_a_replica_of_several_streams_takes_no_more_than_it_can_run(redis_url: str, raw: redis.Redis) -> None:
    names = [f"local2:w{n}" for n in range(5)]
    slow = Recorder(0.01)
    for name in names:
        add(raw, 10, name)
    most = 0
    async with consuming(redis_url, streams={name: Route(slow) for name in names}, concurrency=2) as consumer:
        while len(slow.seen) < 50:
            most = max(most, len(consumer.held))
            await asyncio.sleep(0)
    assert most <= 2
    assert slow.most == 2


async def test_work_that_waits_gives_its_slot_to_others_and_takes_one_back(redis_url: str, raw: redis.Redis) -> None:
    gate = asyncio.Event()
    running = most = done = 0

    async def handler(delivery: Delivery) -> list[Any]:
        nonlocal running, most, done
        async with delivery.parked():
            await gate.wait()
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        done += 1
        return []

    async with consuming(redis_url, handler, concurrency=2) as consumer:
        add(raw, 10)
        await eventually(lambda: len(consumer.held) == 10, what="all ten wait without a slot")
        gate.set()
        await eventually(lambda: done == 10)
    assert most <= 2


async def test_what_waits_when_its_replica_dies_has_used_up_no_delivery(redis_url: str, raw: redis.Redis) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    async def handler(delivery: Delivery) -> list[Any]:
        async with delivery.parked():
            await gates[0].wait()
        await gates[1].wait()
        return []

    def counted() -> list[tuple[bytes, int]]:
        return [(row["consumer"], row["times_delivered"]) for row in raw.xpending_range(STREAM, GROUP, "-", "+", 9)]

    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    async with consuming(redis_url, handler) as consumer:
        add(raw, 2)
        await eventually(lambda: [number for _, number in counted()] == [0, 0], what="both wait")
        # somebody else's stays his, and its count what he made it
        (first, _) = (entry_id for _, entry_id in consumer.held)
        raw.xclaim(STREAM, GROUP, "other", 0, [first], retrycount=3, justid=True)
        gates[0].set()
        await eventually(lambda: counted()[1][1] == 1, what="the second is worked on")
        assert counted()[0] == (b"other", 3)
        gates[1].set()
        await eventually(lambda: counted() == [], what="the first is taken over and handled too")


async def test_work_comes_back_from_waiting_at_once_when_the_replica_only_waits_for_entries(
    redis_url: str, raw: redis.Redis
) -> None:
    gate, back = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> list[Any]:
        async with delivery.parked():
            await gate.wait()
        back.set()
        return []

    async with consuming(redis_url, handler, concurrency=1) as consumer:
        add(raw, 1)
        await eventually(lambda: len(consumer.held) == 1 and not consumer.slots.working)
        await asyncio.sleep(0.1)
        gate.set()
        await asyncio.wait_for(back.wait(), 1.0)


async def test_a_dead_replicas_entries_are_claimed_after_three_heartbeats_on_an_idle_queue(
    redis_url: str, raw: redis.Redis
) -> None:
    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    ids = add(raw, 3)
    raw.xreadgroup(GROUP, "dead", {STREAM: ">"})
    loop = asyncio.get_running_loop()
    started = loop.time()
    recorder = Recorder()
    async with consuming(redis_url, recorder):
        await eventually(lambda: sorted(recorder.seen) == ids and pending(raw) == 0)
    took = loop.time() - started
    assert 0.5 < took < 1.6
    assert recorder.deliveries == [2, 2, 2]


async def test_a_task_of_four_times_the_claim_time_runs_once(redis_url: str, raw: redis.Redis) -> None:
    long, other = Recorder(2.4), Recorder(2.4)
    async with consuming(redis_url, long, replica="r1"), consuming(redis_url, other, replica="r2"):
        add(raw, 1)
        await eventually(lambda: long.seen or other.seen)
        await eventually(lambda: pending(raw) == 0, timeout=6)
    assert len(long.seen) + len(other.seen) == 1


async def test_what_came_before_a_pause_is_not_begun_when_somebody_else_has_finished_it(
    redis_url: str, raw: redis.Redis
) -> None:
    def waits(client: dict[str, str]) -> bool:
        return client["cmd"] == "xreadgroup" and "b" in client["flags"]

    handler = Recorder()
    async with consuming(redis_url, handler, heartbeat=0.05):
        await eventually(lambda: any(map(waits, raw.client_list())))
        # the whole process stands still from here: what it is given lies in its socket
        (given,) = add(raw, 1)
        assert consumers(raw)["r1"] == 1
        raw.xclaim(STREAM, GROUP, "r2", 0, [given])
        raw.xack(STREAM, GROUP, given)
        raw.blpop(["nothing"], 0.2)
        (later,) = add(raw, 1)
        # and goes on
        await eventually(lambda: later in handler.seen and pending(raw) == 0)
    assert handler.seen == [later]


async def test_a_full_replica_keeps_its_claims(redis_url: str, raw: redis.Redis) -> None:
    full, other = Recorder(1.5), Recorder(1.5)
    async with consuming(redis_url, full, concurrency=8):
        ids = add(raw, 8)
        await eventually(lambda: len(full.seen) == 8)
        async with consuming(redis_url, other, replica="r2"):
            await eventually(lambda: pending(raw) == 0)
    assert sorted(full.seen) == ids
    assert other.seen == []


async def test_work_in_flight_is_finished_before_leaving(redis_url: str, raw: redis.Redis) -> None:
    slow = Recorder(0.4)
    async with consuming(redis_url, slow):
        add(raw, 3)
        await eventually(lambda: len(slow.seen) == 3)
    assert pending(raw) == 0
    assert consumers(raw) == {}


async def test_what_cannot_be_finished_is_handed_over_at_once_and_keeps_its_count(
    redis_url: str, raw: redis.Redis
) -> None:
    stuck, heir = Recorder(60), Recorder()
    loop = asyncio.get_running_loop()
    async with consuming(redis_url, heir, replica="r2", heartbeat=1.0, concurrency=1):
        # with a heartbeat of a second a silent death would be noticed after three
        heir.gate = asyncio.Event()
        add(raw, 1)
        await eventually(lambda: len(heir.seen) == 1)
        async with consuming(redis_url, stuck, replica="r1", heartbeat=1.0, drain=0.1):
            ids = add(raw, 1)
            await eventually(lambda: stuck.seen == ids)
        left = loop.time()
        assert consumers(raw) == {"r2": 1, "handover": 1}
        heir.gate.set()
        await eventually(lambda: heir.seen[1:] == ids and pending(raw) == 0)
        assert loop.time() - left < 2.0
    assert heir.deliveries == [1, 1]


async def test_leaving_ten_times_uses_up_no_delivery(redis_url: str, raw: redis.Redis) -> None:
    add(raw, 1)
    deliveries = []
    for turn in range(10):
        stuck = Recorder(60)
        async with consuming(redis_url, stuck, replica=f"r{turn}", drain=0.0, max_deliveries=2, heartbeat=0.05):
            await eventually(lambda: bool(stuck.seen))  # noqa: B023
        deliveries += stuck.deliveries
    assert deliveries == [1] * 10
    assert raw.xlen("local2:dead.letter") == 0
    assert pending(raw) == 1


async def test_leaving_with_more_than_a_page_of_entries_loses_none(redis_url: str, raw: redis.Redis) -> None:
    stuck = Recorder(60)
    async with consuming(redis_url, stuck, concurrency=1200, drain=0.0):
        ids = add(raw, 1200)
        await eventually(lambda: len(stuck.seen) == 1200)
    assert consumers(raw) == {"handover": 1200}
    recorder = Recorder()
    async with consuming(redis_url, recorder, replica="r2", concurrency=50, heartbeat=0.05):
        await eventually(lambda: pending(raw) == 0)
    assert sorted(recorder.seen) == sorted(ids)


async def test_the_world_in_the_way_is_tried_again_after_three_heartbeats(redis_url: str, raw: redis.Redis) -> None:
    tries: list[int] = []

    async def handler(delivery: Delivery) -> list[Any]:
        tries.append(delivery.deliveries)
        if len(tries) < 3:
            raise TransientError("not now")
        return []

    async with consuming(redis_url, handler, heartbeat=0.1):
        add(raw, 1)
        await eventually(lambda: pending(raw) == 0 and len(tries) == 3)
    assert tries == [1, 2, 3]


async def test_a_handler_that_swallows_its_cancellation_writes_nothing_for_a_lost_entry(
    redis_url: str, raw: redis.Redis
) -> None:
    swallowed = asyncio.Event()

    async def handler(delivery: Delivery) -> list[Any]:
        if not swallowed.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed.set()
        return [("RPUSH", "effects", delivery.deliveries)]

    async with consuming(redis_url, handler, heartbeat=0.1) as consumer:
        (entry_id,) = add(raw, 1)
        await eventually(lambda: len(consumer.held) == 1)
        raw.xclaim(STREAM, GROUP, "thief", 0, [entry_id])
        await asyncio.wait_for(swallowed.wait(), 3.0)
        # the thief is silent, and its claim runs out
        await eventually(lambda: pending(raw) == 0)
    assert raw.lrange("effects", 0, -1) == [b"3"]


async def test_a_silent_consumer_is_removed_unless_it_still_holds_entries(
    redis_url: str, raw: redis.Redis, bus: Bus
) -> None:
    async def removed(name: str) -> bool:
        await bus.absent(SUBJECT, 100)
        return name not in consumers(raw)

    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    raw.xgroup_createconsumer(STREAM, GROUP, "gone")
    (held,) = add(raw, 1)
    raw.xreadgroup(GROUP, "crashed", {STREAM: ">"})
    recorder = Recorder()
    recorder.gate = asyncio.Event()
    # who is busy takes nothing over: what the crashed one holds stays its own for now
    async with consuming(redis_url, recorder, heartbeat=0.05, concurrency=1):
        add(raw, 1)
        await eventually(lambda: removed("gone"))
        assert consumers(raw)["crashed"] == 1
        recorder.gate.set()
        await eventually(lambda: held in recorder.seen)
        await eventually(lambda: removed("crashed"))


async def test_a_process_uses_the_same_connections_however_much_it_does(redis_url: str, raw: redis.Redis) -> None:
    def connections() -> int:
        return sum(1 for row in raw.client_list() if row["name"].startswith("test/r1:"))

    recorder = Recorder(0.05)
    async with consuming(redis_url, recorder, concurrency=64):
        await eventually(lambda: connections() == 3)
        add(raw, 500)
        while len(recorder.seen) < 500:
            assert connections() == 3
            await asyncio.sleep(0.01)
    await eventually(lambda: connections() == 0)


@pytest.mark.parametrize("begun", [True, False])
async def test_stopping_ends_within_seconds_when_redis_is_away(begun: bool, redis_server: Any) -> None:
    async with Bus(redis_server.url, "test/r1") as bus:
        await eventually(lambda: bus.reader.connected.is_set())
        route = Route(Recorder())
        consumer = Consumer(
            bus, GROUP, "r1", {STREAM: route}, concurrency=2, heartbeat=0.2, max_deliveries=5, drain=0.2
        )
        stop = asyncio.Event()
        work = consumer.run(stop)
        if begun:
            task = asyncio.create_task(work)
            with redis.Redis.from_url(redis_server.url) as raw:
                await eventually(lambda: raw.exists(STREAM) and raw.xinfo_groups(STREAM))
        await asyncio.to_thread(redis_server.kill)
        await eventually(lambda: not bus.reader.connected.is_set())
        if not begun:
            task = asyncio.create_task(work)
            await asyncio.sleep(0.3)
        stop.set()
        await asyncio.wait_for(task, 30.0)


async def test_a_stream_with_a_limit_leaves_the_slots_to_the_others(redis_url: str, raw: redis.Redis) -> None:
    held: list[str] = []
    release = asyncio.Event()
    done: list[str] = []

    async def stuck(delivery: Delivery) -> list[Any]:
        held.append(delivery.entry_id)
        async with delivery.parked():
            await release.wait()
        return []

    async def quick(delivery: Delivery) -> list[Any]:
        done.append(delivery.entry_id)
        return []

    streams = {"local2:slow": Route(stuck, limit=3), "local2:quick": Route(quick)}
    async with consuming(redis_url, streams=streams, concurrency=4):
        add(raw, 20, "local2:slow")
        await eventually(lambda: len(held) == 3)
        add(raw, 20, "local2:quick")
        await eventually(lambda: len(done) == 20)
        assert len(held) == 3
        release.set()
        await eventually(lambda: len(held) == 20 and pending(raw, "local2:slow") == 0)


async def test_a_dead_replicas_entries_are_taken_over_within_the_streams_limit(
    redis_url: str, raw: redis.Redis
) -> None:
    raw.xgroup_create("local2:slow", GROUP, "0", mkstream=True)
    add(raw, 6, "local2:slow")
    raw.xreadgroup(GROUP, "dead", {"local2:slow": ">"}, count=6)
    most = now = 0
    done: list[str] = []

    async def handler(delivery: Delivery) -> list[Any]:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        done.append(delivery.entry_id)
        return []

    async with consuming(redis_url, streams={"local2:slow": Route(handler, limit=2)}, concurrency=8):
        await eventually(lambda: len(done) == 6 and pending(raw, "local2:slow") == 0, timeout=10)
    assert most <= 2


async def test_a_key_in_the_place_of_one_stream_stops_none_of_the_others(redis_url: str, raw: redis.Redis) -> None:
    other = "local2:other"
    gated, seen = Recorder(), Recorder()
    gated.gate = asyncio.Event()
    raw.set(other, "x")

    idle = [0]

    def renewed() -> bool:
        (row,) = raw.xpending_range(STREAM, GROUP, "-", "+", 1)
        idle.append(int(row["time_since_delivered"]))
        return idle[-1] < idle[-2]

    async with consuming(redis_url, streams={other: Route(seen), STREAM: Route(gated)}):
        (held,) = add(raw, 1)
        await eventually(lambda: gated.seen == [held], what="the other stream is read")
        await eventually(renewed, what="what is held of it is kept")
        gated.gate.set()
        await eventually(lambda: pending(raw) == 0)
        raw.delete(other)
        back = add(raw, 1, other)
        await eventually(lambda: seen.seen == back, what="the stream is read when it is one again")
        # and while it is read
        raw.set(other, "x")
        more = add(raw, 3)
        await eventually(lambda: gated.seen == [held, *more])
    assert raw.get(other) == b"x"


async def test_a_command_that_redis_refuses_a_handler_sets_its_entry_aside_with_the_reason(
    redis_url: str, raw: redis.Redis, bus: Bus, capfd: pytest.CaptureFixture[str]
) -> None:
    raw.set("words", "x")

    async def handler(delivery: Delivery) -> list[Any]:
        await bus.link.call("LPUSH", "words", "y")
        return []

    async with consuming(redis_url, handler, max_deliveries=2):
        add(raw, 1)
        await eventually(lambda: raw.xlen(DEAD_LETTER.stream) == 1)
    ((_, letter),) = raw.xrange(DEAD_LETTER.stream)
    assert b"gave up after 2 deliveries: WRONGTYPE" in letter[b"payload"]
    logged = capfd.readouterr().err
    assert "Redis refused a command: WRONGTYPE" in logged
    # it is no fault of the program: a sentence says it
    assert "Traceback" not in logged
