"""Redis away, asleep, full or odd: healthy replicas keep their work, and nothing runs twice because of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM, consuming
from support.loopback import listening
from support.services import announced, running
from support.slots import uncounted
from support.waiting import always, eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus, BusFull, Consumer, Delivery, Route
from shared.bus.claims import Claims
from shared.bus.endpoint import Server
from shared.bus.scripts import PUBLISH_ONCE
from shared.bus.slots import Slots
from shared.bus.wire import open_wire

HEARTBEAT = 0.2


def probing(url: str, folder: Path, **more: Any) -> ProbeSettings:
    return ProbeSettings(redis_url=url, data_dir=folder, heartbeat=HEARTBEAT, drain=1.0, concurrency=8, **more)


class Sleepers:
    """Replicas of a group, of which each holds two entries, and a time that passes when it is told to: entries grow
    older and the server's clock goes on, in seconds, which are heartbeats."""

    def __init__(self, bus: Bus, raw: redis.Redis, names: Sequence[str]) -> None:
        self._raw = raw
        self._bus = bus
        self._skew = 0
        raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        seen = SimpleNamespace(link=bus.link, pulse=SimpleNamespace(call=self._call, pipe_raw=bus.pulse.pipe_raw))
        self.replicas: dict[str, tuple[Claims, Slots]] = {}
        self.taken: list[tuple[str, str]] = []
        for name in names:
            slots = Slots(10, {STREAM: None}, 5, self._unblock, uncounted)
            for _ in range(2):
                entry_id = raw.xadd(STREAM, {"payload": name}).decode()
                raw.xreadgroup(GROUP, name, {STREAM: ">"})
                slots.take(Delivery(STREAM, entry_id, [], 1, slots))
            self.replicas[name] = Claims(seen, GROUP, name, [STREAM], 1.0), slots  # type: ignore[arg-type]

    async def _unblock(self) -> bool:
        return False

    async def _call(self, *command: Any) -> Any:
        reply = await self._bus.pulse.call(*command)
        return [reply[0] + self._skew, *reply[1:]]

    def passes(self, seconds: int) -> None:
        self._skew += seconds * 1000
        for row in self._raw.xpending_range(STREAM, GROUP, "-", "+", 100):
            idle = row["time_since_delivered"] + seconds * 1000
            self._raw.xclaim(STREAM, GROUP, row["consumer"], 0, [row["message_id"]], idle=idle, justid=True)

    async def adopts(self, name: str, *, watched: bool) -> None:
        claims, slots = self.replicas[name]
        for found in await claims.orphans(STREAM, watched, 10, slots):
            slots.take(Delivery(STREAM, found.entry[0], [], found.deliveries, slots))
            self.taken.append((name, found.entry[1][1].decode()))

    async def beats(self, awake: Iterable[str]) -> None:
        """Everybody who is awake lives through a second."""
        for name in awake:
            claims, slots = self.replicas[name]
            assert await claims.beat(slots) == []
            for watched in list(claims.orphaned.values()):
                claims.orphaned.clear()
                await self.adopts(name, watched=watched)
        self.passes(1)


@pytest.mark.parametrize(
    ("away", "delays"),
    [
        # Redis wakes up last: everybody else is there when it does
        (36_000, (0, 0, 0)),
        # or one after the other, in any order; nobody knows who is still to come
        (36_000, (0, 1, 25)),
        (36_000, (30, 0, 12)),
        (600, (7, 29, 0)),
        (20, (4, 19, 0)),
        (5, (0, 6, 3)),
        (3, (4, 0, 5)),
    ],
)
async def test_whoever_wakes_up_later_than_others_keeps_his_work_and_who_is_dead_does_not(
    bus: Bus, raw: redis.Redis, away: int, delays: tuple[int, int, int]
) -> None:
    sleepers = Sleepers(bus, raw, ["a", "b", "c", "dead"])
    for _ in range(2):
        await sleepers.beats("abc")
    sleepers.passes(away)
    for second in range(max(delays) + 1):
        await sleepers.beats(name for name, delay in zip("abc", delays, strict=True) if delay <= second)
    # a machine that is very busy is a pause of its own, so that it may take longer
    seconds = max(delays)
    while not sleepers.taken and seconds < 130:
        await sleepers.beats("abc")
        seconds += 1
    assert len(sleepers.taken) == 2
    assert {owner for _, owner in sleepers.taken} == {"dead"}
    assert seconds >= min(away, 30)
    for _ in range(5):
        await sleepers.beats("abc")
    assert len(sleepers.taken) == 2


async def test_what_was_found_silent_before_everybody_slept_proves_nothing_afterwards(
    bus: Bus, raw: redis.Redis
) -> None:
    """It is seen that there is something to take over, and everybody sleeps before it is taken."""
    sleepers = Sleepers(bus, raw, ["a", "b"])
    for _ in range(5):
        await sleepers.beats("ab")
    sleepers.passes(600)
    await sleepers.adopts("a", watched=True)
    assert sleepers.taken == []
    await sleepers.beats("ab")
    for _ in range(2):
        await sleepers.beats("ab")
    assert sleepers.taken == []


async def test_a_replica_that_was_away_takes_nothing_over_before_it_has_watched(
    redis_url: str, raw: redis.Redis
) -> None:
    """Somebody's claims are old when it comes; they may be there all the same."""
    seen: list[str] = []

    async def handler(delivery: Delivery) -> list[Any]:
        seen.append(delivery.entry_id)
        return []

    raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    entry_id = raw.xadd(STREAM, {"payload": "x"})
    raw.xreadgroup(GROUP, "other", {STREAM: ">"})
    raw.xclaim(STREAM, GROUP, "other", 0, [entry_id], idle=3_600_000)
    async with consuming(redis_url, handler, heartbeat=1.0) as consumer:
        begun = await eventually(lambda: consumer._claims.certain_until)
        await eventually(lambda: consumer._claims.certain_until > begun)
        await always(lambda: not seen, 0.5)
        # the other one renews; its claim is as good as ever
        raw.xclaim(STREAM, GROUP, "other", 0, [entry_id], justid=True)
    assert not seen


# ── full ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_disk_that_is_full_is_like_a_memory_that_is_full(
    redis_server: EmbeddedRedis, spoil: Callable[[bool], None]
) -> None:
    """It refuses more: no claim can be renewed or taken over either. What was done is kept, however long that lasts."""
    tried = 0

    async def handler(_delivery: Delivery) -> list[Any]:
        nonlocal tried
        tried += 1
        spoil(True)
        return [("RPUSH", "effects", "x")]

    with redis.Redis.from_url(redis_server.url) as raw:
        async with Bus(redis_server.url, "test/1") as bus, consuming(redis_server.url, handler, heartbeat=HEARTBEAT):
            raw.xadd(STREAM, {"payload": "x"})
            await eventually(lambda: tried)
            with pytest.raises(BusFull, match="MISCONF"):
                await bus.link.call("SET", "a", "b")
            assert await bus.link.call("GET", "a") is None
            await always(lambda: raw.xpending(STREAM, GROUP)["pending"] == 1, 10 * HEARTBEAT)
            spoil(False)
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
        assert tried == 1
        assert raw.lrange("effects", 0, -1) == [b"x"]
        assert raw.xlen("local2:dead.letter") == 0


async def test_who_cannot_renew_his_claim_on_a_full_disk_keeps_it_when_there_is_room_again(
    redis_server: EmbeddedRedis, spoil: Callable[[bool], None]
) -> None:
    """Whoever holds nothing writes nothing with a heartbeat: he must not take for silence that nobody could write."""
    tried: list[str] = []
    done = asyncio.Event()

    def working(name: str) -> Callable[[Delivery], Awaitable[list[Any]]]:
        async def handler(_delivery: Delivery) -> list[Any]:
            tried.append(name)
            await done.wait()
            return [("RPUSH", "effects", "x")]

        return handler

    with redis.Redis.from_url(redis_server.url) as raw:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                consuming(redis_server.url, working("r0"), replica="r0", heartbeat=HEARTBEAT)
            )
            raw.xadd(STREAM, {"payload": "x"})
            await eventually(lambda: tried)
            for name in ("r1", "r2", "r3", "r4"):
                await stack.enter_async_context(
                    consuming(redis_server.url, working(name), replica=name, heartbeat=HEARTBEAT)
                )
            for _ in range(2):
                # they have watched for long enough
                await asyncio.sleep(6 * HEARTBEAT)
                spoil(True)
                await asyncio.sleep(6 * HEARTBEAT)
                spoil(False)
            await asyncio.sleep(6 * HEARTBEAT)
            done.set()
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
        assert tried == ["r0"]
        assert raw.lrange("effects", 0, -1) == [b"x"]


async def test_a_participant_that_starts_while_redis_is_full_waits(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    try:
        raw.config_set("maxmemory", 1)
        async with running(probe, probing(redis_url, tmp_path)) as serving:
            await always(lambda: not serving.done(), 1.0)
            raw.config_set("maxmemory", 0)
            await announced(redis_url, "probe")
    finally:
        raw.config_set("maxmemory", 0)


# ── effects and acknowledgement ──────────────────────────────────────────────────────────────────────────────


async def test_no_crash_while_redis_is_full_loses_an_entry(redis_url: str, raw: redis.Redis) -> None:
    """What is refused is refused together with its acknowledgement: whoever dies then loses nothing."""
    try:
        async with Bus(redis_url, "test/1") as bus:
            raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
            entry = raw.xadd(STREAM, {"payload": "x"})
            raw.xreadgroup(GROUP, "r1", {STREAM: ">"})
            raw.config_set("maxmemory", 1)
            with pytest.raises(BusFull):
                await bus.link.commit([("RPUSH", "effects", "x"), ("XACK", STREAM, GROUP, entry)])
            assert raw.xpending(STREAM, GROUP)["pending"] == 1
            raw.config_set("maxmemory", 0)
            assert await bus.link.commit([("RPUSH", "effects", "x"), ("XACK", STREAM, GROUP, entry)]) == [1, 1]
            assert raw.xpending(STREAM, GROUP)["pending"] == 0
    finally:
        raw.config_set("maxmemory", 0)


async def test_an_effect_on_a_key_of_another_type_ends_as_a_dead_letter_and_the_others_hold(
    redis_url: str, raw: redis.Redis
) -> None:
    raw.set("taken", "a string")

    async def handler(delivery: Delivery) -> list[Any]:
        wrong = [("RPUSH", "taken", "x")] if b"bad" in delivery.fields else []
        return [("RPUSH", "effects", delivery.entry_id), *wrong]

    async with consuming(redis_url, handler):
        ids = [raw.xadd(STREAM, {"payload": kind}) for kind in ("good", "bad", "good")]
        await eventually(lambda: raw.xlen("local2:dead.letter") == 1)
        await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    assert sorted(raw.lrange("effects", 0, -1)) == sorted(ids)
    ((_, letter),) = raw.xrange("local2:dead.letter")
    assert b"WRONGTYPE" in letter[b"payload"]
    assert ids[1] in letter[b"payload"]


async def test_a_full_redis_refuses_the_acknowledgement_of_what_a_script_was_to_write(
    redis_url: str, raw: redis.Redis
) -> None:
    async def handler(delivery: Delivery) -> list[Any]:
        raw.config_set("maxmemory", 1)
        return [PUBLISH_ONCE(("local2:effects", f"local2:once:{delivery.entry_id}"), 60, "*", "a", "b")]

    try:
        async with consuming(redis_url, handler, heartbeat=HEARTBEAT):
            raw.xadd(STREAM, {"payload": "x"})
            await eventually(lambda: raw.config_get("maxmemory")["maxmemory"] == "1")
            await always(lambda: raw.xpending(STREAM, GROUP)["pending"] == 1, 3 * HEARTBEAT)
            raw.config_set("maxmemory", 0)
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    finally:
        raw.config_set("maxmemory", 0)
    assert raw.xlen("local2:effects") == 1
    assert raw.xlen("local2:dead.letter") == 0


async def test_the_dead_letter_of_a_failed_effect_waits_for_a_full_redis(redis_url: str, raw: redis.Redis) -> None:
    """Its entry is acknowledged by then: nobody else would write it."""
    raw.set("taken", "a string")

    async def handler(_delivery: Delivery) -> list[Any]:
        # the last effect fills Redis, behind which nothing more is written
        return [("RPUSH", "taken", "x"), ("CONFIG", "SET", "maxmemory", 1)]

    try:
        async with consuming(redis_url, handler, heartbeat=HEARTBEAT):
            raw.xadd(STREAM, {"payload": "x"})
            await eventually(lambda: raw.config_get("maxmemory")["maxmemory"] == "1")
            await asyncio.sleep(3 * HEARTBEAT)
            assert raw.xlen("local2:dead.letter") == 0
            raw.config_set("maxmemory", 0)
            await eventually(lambda: raw.xlen("local2:dead.letter") == 1)
    finally:
        raw.config_set("maxmemory", 0)
    assert raw.xpending(STREAM, GROUP)["pending"] == 0


async def test_the_dead_letter_of_a_failed_effect_outlives_who_was_to_write_it(
    redis_url: str, raw: redis.Redis
) -> None:
    raw.set("taken", "a string")
    ran: list[str] = []

    async def handler(delivery: Delivery) -> list[Any]:
        ran.append(delivery.entry_id)
        return [("RPUSH", "taken", "x"), ("CONFIG", "SET", "maxmemory", 1)]

    try:
        async with Bus(redis_url, "test/dies") as bus:
            options: dict[str, Any] = {"concurrency": 1, "heartbeat": HEARTBEAT, "max_deliveries": 3, "drain": 1}
            consumer = Consumer(bus, GROUP, "dies", {STREAM: Route(handler)}, **options)
            running = asyncio.create_task(consumer.run(asyncio.Event()))
            raw.xadd(STREAM, {"payload": "x"})
            # acknowledged with its effects, and pending again
            await eventually(lambda: ran and raw.xpending_range(STREAM, GROUP, "-", "+", 1, "dies"))
            await eventually(lambda: raw.xpending_range(STREAM, GROUP, "-", "+", 1)[0]["times_delivered"] == 4)
            for task in (running, *(held.task for held in consumer.held.values() if held.task is not None)):
                task.cancel()
            await asyncio.wait({running})
        assert raw.xlen("local2:dead.letter") == 0
        raw.config_set("maxmemory", 0)
        async with consuming(redis_url, handler, heartbeat=HEARTBEAT, max_deliveries=3):
            await eventually(lambda: raw.xlen("local2:dead.letter") == 1)
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    finally:
        raw.config_set("maxmemory", 0)
    assert len(ran) == 1


async def test_of_entries_that_are_written_together_only_the_refused_one_waits(
    redis_url: str, raw: redis.Redis
) -> None:
    """One transaction for a whole loop tick must not tie its entries to each other."""
    together = asyncio.Event()

    async def handler(delivery: Delivery) -> list[Any]:
        await together.wait()
        return [("NOSUCHCOMMAND", "x")] if b"bad" in delivery.fields else [("RPUSH", "effects", "x")]

    async with consuming(redis_url, handler, concurrency=4) as consumer:
        for kind in ("good", "bad", "good"):
            raw.xadd(STREAM, {"payload": kind})
        await eventually(lambda: len(consumer.held) == 3)
        together.set()
        await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    assert raw.llen("effects") == 2
    assert raw.xlen("local2:dead.letter") == 1


# ── odd servers ──────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of something that takes connections; each is closed when it has been answered, and all at the end."""
    async with listening(answer) as port:
        yield f"redis://127.0.0.1:{port}/0"


async def test_a_server_that_closes_the_connection_is_reported_in_its_own_words(raw: redis.Redis) -> None:
    """One that wants a password bears no long command before it."""
    raw.config_set("requirepass", "secret")
    try:
        options = raw.connection_pool.connection_kwargs
        path = options.get("path")
        server = Server(options.get("host", ""), int(options.get("port", 0)), path=path)
        with pytest.raises(ConnectionError, match="NOAUTH"):
            await open_wire(server, [("CLIENT", "ID"), ("SCRIPT", "EXISTS", *["0" * 40] * 30), ("TIME",)])
    finally:
        raw.config_set("requirepass", "")
