"""The lag that Redis reports of a work stream stays a number, and the right one, whatever the bus does.

Scalers (KEDA) read it by XINFO GROUPS. Redis answers null when the entry that a group read last, or a later one, was
deleted while an earlier one is still there: a scaler then sees no work where there is some.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM, consuming
from support.consuming import SUBJECT as CONSUMED
from support.services import announced, child, running
from support.waiting import eventually

from shared.bus import Bus, Delivery
from shared.contracts import (
    QUERY_CANCEL,
    SUBJECTS,
    TOOL_REQUEST,
    QueryCancel,
    Subject,
)
from shared.errors import PermanentError, TransientError
from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient

# Of one moment: group, the lag that Redis reports, and what is really unread.
OBSERVE = """
local seen = {}
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local g = {}
  for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
  local lag = g['lag']
  local unread = #redis.call('XRANGE', KEYS[1], '(' .. g['last-delivered-id'], '+')
  seen[#seen + 1] = {g['name'], tostring(lag), unread}
end
return seen
"""


class Watch:
    """Looks at a stream's groups; each look is a claim about all of them."""

    def __init__(self, raw: redis.Redis) -> None:
        self._raw = raw
        self.looks = 0
        self.most = 0

    def look(self, stream: str) -> None:
        if not self._raw.exists(stream):
            return
        for name, lag, unread in self._raw.eval(OBSERVE, 1, stream):
            assert lag == str(unread).encode(), f"{stream}, group {name!r}: lag {lag!r}, unread {unread}"
            self.looks += 1
            self.most = max(self.most, unread)

    @contextlib.asynccontextmanager
    async def on(self, stream: str) -> AsyncIterator[None]:
        """Looks all the time."""

        async def forever() -> None:
            while True:
                self.look(stream)
                await asyncio.sleep(0.002)

        task = asyncio.create_task(forever())
        try:
            yield
            self.look(stream)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def watch(raw: redis.Redis) -> Watch:
    return Watch(raw)


WORK = [subject for subject in SUBJECTS if subject.kind == "work"] + [TOOL_REQUEST.for_tool("probe")]


def test_deleting_what_was_read_last_is_what_makes_redis_lose_count(raw: redis.Redis) -> None:
    raw.xgroup_create("s", "g", "0", mkstream=True)
    _long, short, _waiting = (raw.xadd("s", {"payload": "x"}) for _ in range(3))
    raw.xreadgroup("g", "c", {"s": ">"}, count=2)
    raw.xack("s", "g", short)
    assert raw.xinfo_groups("s")[0]["lag"] == 1
    raw.xdel("s", short)
    assert raw.xinfo_groups("s")[0]["lag"] is None


@pytest.mark.parametrize("subject", WORK, ids=lambda s: s.name)
async def test_the_lag_is_right_through_reading_acknowledging_deleting_and_trimming(
    subject: Subject[Any], bus: Bus, raw: redis.Redis, watch: Watch
) -> None:
    """All that the bus sends to a work stream, in any order; a second and a third group come late."""
    rng = random.Random(subject.name)
    stream = subject.stream
    groups = [f"g{n}" for n in range(1 if subject.single_group else 3)]
    pending: dict[str, list[bytes]] = {}
    for step in range(400):
        if step % 60 == 0 and len(pending) < len(groups):
            name = groups[len(pending)]
            raw.xgroup_create(stream, name, "0", mkstream=True)
            pending[name] = []
        name = rng.choice(list(pending))
        match rng.choice(("add", "read", "read", "ack", "ack", "claim", "trim", "leave")):
            case "add":
                for _ in range(rng.randint(1, 6)):
                    raw.xadd(stream, {"payload": "x"})
            case "read":
                reply = raw.xreadgroup(name, rng.choice("ab"), {stream: ">"}, count=rng.randint(1, 8))
                pending[name] += [entry_id for entry_id, _ in reply[0][1]] if reply else []
            case "ack" if pending[name]:
                rng.shuffle(pending[name])
                gone = [pending[name].pop() for _ in range(min(len(pending[name]), rng.randint(1, 8)))]
                raw.xack(stream, name, *gone)
            case "claim" if pending[name]:
                raw.xclaim(stream, name, rng.choice("ab"), 0, [rng.choice(pending[name])])
            case "trim":
                await bus.trim(subject)
                assert {one for held in pending.values() for one in held} <= {one for one, _ in raw.xrange(stream)}
            case "leave":
                for row in raw.xpending_range(stream, name, "-", "+", 100, consumername="b"):
                    raw.xclaim(stream, name, "a", 0, [row["message_id"]], justid=True)
                raw.xgroup_delconsumer(stream, name, "b")
        watch.look(stream)
    assert watch.looks >= 400
    assert watch.most > 10


async def test_what_a_group_that_was_made_anew_has_not_read_yet_stays(bus: Bus, raw: redis.Redis) -> None:
    stream = WORK[0].stream
    raw.xgroup_create(stream, "g", "0", mkstream=True)
    ids = [raw.xadd(stream, {"payload": "x"}).decode() for _ in range(3)]
    await bus.trim(WORK[0])
    assert [entry_id.decode() for entry_id, _ in raw.xrange(stream)] == ids


@pytest.mark.parametrize("trimmed", [True, False])
async def test_the_lag_is_right_while_replicas_come_go_fail_and_give_up(
    trimmed: bool, redis_url: str, bus: Bus, raw: redis.Redis, watch: Watch
) -> None:
    rng = random.Random(1)
    done: set[str] = set()

    async def handle(delivery: Delivery) -> list[Any]:
        await asyncio.sleep(rng.uniform(0, 0.02))
        luck = rng.random()
        if luck < 0.05:
            raise PermanentError("bad")
        if luck < 0.1:
            raise TransientError("not now")
        done.add(delivery.entry_id)
        return []

    async def trim() -> None:
        while trimmed:
            await bus.trim(CONSUMED)
            await asyncio.sleep(0.02)

    added = 0
    trimming = asyncio.create_task(trim())
    async with watch.on(STREAM):
        for n in range(6):
            # the one before hands over what it holds; every other one dies of having no time for that
            options: dict[str, Any] = {"heartbeat": 0.05, "concurrency": 8}
            async with consuming(redis_url, handle, replica=f"r{n}", drain=0.0 if n % 2 else 0.2, **options):
                for _ in range(60):
                    raw.xadd(STREAM, {"payload": "x"})
                    added += 1
                await asyncio.sleep(0.15)
        async with consuming(redis_url, handle, replica="last", **options):
            dead = "local2:dead.letter"
            await eventually(lambda: len(done) + raw.xlen(dead) >= added, 20)
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
            await eventually(lambda: (raw.xlen(STREAM) == 0) is trimmed)
    trimming.cancel()
    assert raw.xinfo_groups(STREAM)[0]["lag"] == 0
    assert watch.most > 10
    assert watch.looks > 100


async def test_the_lag_of_a_tool_is_right_through_cancelled_calls_and_a_killed_worker(
    redis_url: str, raw: redis.Redis, watch: Watch, tmp_path: Path
) -> None:
    stream = TOOL_REQUEST.for_tool("probe").stream
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=1.0)

    async with open_context("asker", settings) as context, watch.on(stream):
        client = ToolClient(context)

        async def ask(n: int) -> None:
            caller = Caller(f"1-{n % 5}", session_id="s", user_id="u")
            args = {"text": f"t{n}", "seconds": 0.2}
            await client.call("probe", args, call_id=f"c{n}", caller=caller, timeout=20)

        with child("probe", redis_url) as killed:
            await announced(redis_url, "probe")
            calls = [asyncio.create_task(ask(n)) for n in range(80)]
            await eventually(lambda: raw.xlen(stream) > 20)
            watch.look(stream)
            await context.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="1-3"), correlation_id="1-3"))
            killed.process.kill()
        async with running(probe, settings):
            await asyncio.gather(*calls)
            await eventually(lambda: raw.xlen(stream) == 0)
    (group,) = raw.xinfo_groups(stream)
    assert (group["lag"], group["pending"]) == (0, 0)
    assert watch.most > 0
