"""Who is alive, what each serves, and how long that is believed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.apps import ProbeSettings, probe
from support.services import running
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.bus.keys import KNOWN_TOOLS, REPLICAS, replica_key
from shared.participant.registry import (
    RELEASE,
    Registry,
    ReplicaInfo,
    announcing,
    leaving,
    repair_index,
    still_there,
)


def tool(name: str, **values: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}, **values}


def info(participant: str = "probe", replica: str = "r1", **values: Any) -> ReplicaInfo:
    given = {"state": "ready", "started": 1, "seen": 1, "release": RELEASE, **values}
    return ReplicaInfo(participant, replica, **given)


async def announce(bus: Bus, *infos: ReplicaInfo, ttl_ms: int = 60_000) -> None:
    for one in infos:
        await bus.link.pipe(announcing(one, ttl_ms))


async def test_the_live_ones_are_told_by_participant_and_age(bus: Bus, raw: redis.Redis) -> None:
    await announce(
        bus,
        info("web", "c", started=9),
        info("probe", "b", started=5),
        info("probe", "a", started=5),
        info("probe", "z", started=2),
    )
    registry = Registry(bus, 0.0)
    assert [(one.participant, one.replica) for one in await registry.replicas()] == [
        ("probe", "z"), ("probe", "a"), ("probe", "b"), ("web", "c"),
    ]  # fmt: skip
    assert [one.replica for one in await registry.live("web")] == ["c"]
    # one leaves, of another the time runs out
    await bus.link.pipe(leaving("web", "c"))
    raw.delete(replica_key("probe", "z"))
    assert [one.replica for one in await registry.replicas()] == ["a", "b"]
    assert raw.zrange(REPLICAS, 0, -1) == [b"probe/a", b"probe/b"]


async def test_a_sign_of_life_counts_for_its_time_and_may_be_lengthened(bus: Bus, raw: redis.Redis) -> None:
    await announce(bus, info(), ttl_ms=900)
    assert 0 < raw.pttl(replica_key("probe", "r1")) <= 900
    assert (await bus.link.call(*still_there("probe", "r1", 2_400))) == 1
    assert 2_000 < raw.pttl(replica_key("probe", "r1")) <= 3_000
    # who is gone is not brought back by it
    assert (await bus.link.call(*still_there("probe", "r2", 2_400))) == 0


async def test_who_was_seen_by_a_clock_that_has_gone_back_since_is_there_when_he_says_so_again(
    bus: Bus, raw: redis.Redis
) -> None:
    seconds, _ = raw.time()
    later = seconds * 1000 + 3_600_000
    await announce(bus, info(replica="dead", seen=later), info(replica="alive", seen=later), ttl_ms=3_600_000)
    registry = Registry(bus, 0.0)
    assert await registry.replicas() == []
    # who is a little ahead lives
    await announce(bus, info(replica="alive", seen=seconds * 1000 + 5_000))
    assert [one.replica for one in await registry.replicas()] == ["alive"]


async def test_what_cannot_be_read_is_nobody_and_what_is_newer_is_passed_over(bus: Bus, raw: redis.Redis) -> None:
    await announce(bus, info(replica="plain"))
    odd = {"newer": {**orjson.loads(raw.get(replica_key("probe", "plain"))), "replica": "newer", "colour": "red"},
           "list": [], "less": {"participant": "probe"}}  # fmt: skip
    for name, value in odd.items():
        raw.set(replica_key("probe", name), orjson.dumps(value))
        raw.zadd(REPLICAS, {f"probe/{name}": 1})
    raw.set(replica_key("probe", "torn"), b"{")
    raw.lpush(replica_key("probe", "queue"), "x")
    raw.zadd(REPLICAS, {"probe/torn": 1, "probe/queue": 1, "nonsense": 1, b"\xff/\xff": 1})
    assert [one.replica for one in await Registry(bus, 0.0).replicas()] == ["newer", "plain"]


async def test_only_a_ready_workers_tools_are_served_and_internal_ones_are_not_offered(bus: Bus) -> None:
    old, new = tool("search"), tool("search")
    old["function"]["description"] = "of the older"
    await announce(
        bus,
        info(replica="new", started=5, tools=[new, tool("fetch")]),
        info(replica="old", started=1, tools=[old, tool("manage", internal=True)]),
        info(replica="going", started=0, state="stopping", tools=[tool("last")]),
    )
    registry = Registry(bus, 0.0)
    offered = await registry.tools()
    assert set(offered) == {"search", "fetch"}
    assert offered["search"] == {"type": "function", "function": old["function"]}
    served = await registry.served("manage")
    assert served is not None
    assert served["internal"] is True
    assert await registry.served("last") is None
    # that it was ever served is remembered
    assert await registry.known("manage")
    assert not await registry.known("last")
    await bus.link.pipe(leaving("probe", "old"))
    assert await registry.served("manage") is None
    assert await registry.known("manage")


ODD_TOOLS: list[Any] = [
    [{"function": "x"}, {"function": {"name": 3}}, {"function": {"name": "a b"}}, {"function": {"name": None}}, {}],
    ["search"],
    [None],
    {"function": {}},
    7,
]


@pytest.mark.parametrize("tools", ODD_TOOLS, ids=repr)
async def test_a_worker_that_announces_nonsense_spoils_nobody_elses_tools(
    tools: Any, bus: Bus, raw: redis.Redis
) -> None:
    await announce(bus, info(tools=[tool("fetch"), {"function": tool("bare")["function"]}]))
    written = asdict(info(replica="odd", started=0))
    raw.set(replica_key("probe", "odd"), orjson.dumps({**written, "tools": tools}))
    raw.zadd(REPLICAS, {"probe/odd": 1})
    offered = await Registry(bus, 0.0).tools()
    assert offered == {name: {"type": "function", "function": tool(name)["function"]} for name in ("fetch", "bare")}


@pytest.mark.parametrize(
    "wrong", [{"started": "yesterday"}, {"participant": 3}, {"facts": []}, {"seen": None}], ids=str
)
async def test_a_replica_that_says_nonsense_of_itself_is_nobody(
    wrong: dict[str, Any], bus: Bus, raw: redis.Redis
) -> None:
    await announce(bus, info())
    raw.set(replica_key("probe", "odd"), orjson.dumps({**asdict(info(replica="odd")), **wrong}))
    raw.zadd(REPLICAS, {"probe/odd": 1})
    assert [one.replica for one in await Registry(bus, 0.0).replicas()] == ["r1"]


async def test_what_is_known_is_believed_for_a_moment_and_read_once_for_all_who_ask(bus: Bus, raw: redis.Redis) -> None:
    await announce(bus, info())
    registry = Registry(bus, 3600.0)
    raw.config_resetstat()
    found = await asyncio.gather(*(registry.replicas() for _ in range(10)))
    assert all(len(one) == 1 for one in found)
    assert raw.info("commandstats")["cmdstat_zrange"]["calls"] == 1
    await announce(bus, info(replica="r2"))
    assert len(await registry.replicas()) == 1
    assert len(await registry.replicas(fresh=True)) == 2
    assert len(await registry.replicas()) == 2


async def test_it_is_kept_fresh_as_soon_as_somebody_has_asked(bus: Bus, raw: redis.Redis) -> None:
    registry = Registry(bus, 0.1)
    keeping = asyncio.create_task(registry.run())
    await asyncio.sleep(0.2)
    raw.config_resetstat()
    await asyncio.sleep(0.2)
    # nobody needs it
    assert "cmdstat_zrange" not in raw.info("commandstats")
    await registry.replicas()
    await announce(bus, info(tools=[tool("fetch")]))
    await eventually(lambda: registry.cached("fetch"))
    # a Redis that refuses stops nothing
    raw.delete(REPLICAS)
    raw.set(REPLICAS, "in the way")
    await asyncio.sleep(0.2)
    assert not keeping.done()
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping


async def test_who_could_not_say_that_he_lives_counts_for_a_while(bus: Bus, raw: redis.Redis) -> None:
    """After Redis was away, or everybody asleep, the first to look finds nobody in it: no tool is gone for that."""
    registry = Registry(bus, 0.1)
    await announce(bus, info(tools=[tool("fetch")]))
    assert await registry.served("fetch") is not None
    raw.delete(replica_key("probe", "r1"))
    await asyncio.sleep(0.3)
    assert [one.replica for one in await registry.replicas(fresh=True)] == ["r1"]
    assert await registry.served("fetch") is not None
    # who says that he lives is believed at once, who goes on saying nothing is not
    await announce(bus, info(replica="r2"))
    assert {one.replica for one in await registry.replicas(fresh=True)} == {"r1", "r2"}

    async def gone() -> bool:
        return [one.replica for one in await registry.replicas(fresh=True)] == ["r2"]

    await eventually(gone)
    assert await registry.served("fetch") is None


async def test_what_stands_in_the_place_of_an_index_is_taken_away_and_nothing_else(bus: Bus, raw: redis.Redis) -> None:
    await repair_index(bus.link)
    await announce(bus, info(tools=[tool("fetch")]))
    await repair_index(bus.link)
    await Registry(bus, 0.0).replicas()
    await repair_index(bus.link)
    assert raw.zcard(REPLICAS) == 1
    assert raw.smembers(KNOWN_TOOLS) == {b"fetch"}
    raw.set(REPLICAS, "x")
    raw.delete(KNOWN_TOOLS)
    raw.lpush(KNOWN_TOOLS, "x")
    await repair_index(bus.link)
    assert not raw.exists(REPLICAS, KNOWN_TOOLS)


async def test_a_worker_that_came_a_moment_ago_is_found(bus: Bus) -> None:
    registry = Registry(bus, 60.0)
    await announce(bus, info(tools=[tool("old")]))
    assert await registry.served("old") is not None
    await announce(bus, info(replica="r2", tools=[tool("new")]))
    assert await registry.served("new") is not None
    assert await registry.served("never") is None


async def test_what_cannot_be_understood_is_said_once_with_the_reason(
    bus: Bus, raw: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    await announce(bus, info("probe", "good"), info("web_x", "odd", tools=[tool("probe")]))
    wrong = {"probe/json": b"{", "probe/type": orjson.dumps({**asdict(info("probe", "type")), "seen": "now"}),
             "probe/other": orjson.dumps(asdict(info("web", "x")))}  # fmt: skip
    for member, value in wrong.items():
        raw.set(replica_key(*member.split("/")), value)
        raw.zadd(REPLICAS, {member: 1})
    raw.zadd(REPLICAS, {"nobody": 1})
    registry = Registry(bus, 0.0)
    for _ in range(3):
        assert [one.replica for one in await registry.replicas(fresh=True)] == ["good", "odd"]
    lines = [orjson.loads(line) for line in capsys.readouterr().err.splitlines() if "bus.not_understood" in line]
    told = {line["entry_id"]: line["reason"] for line in lines}
    assert len(told) == len(lines) == 5
    assert told["probe/type"] == "of a wrong type: seen"
    assert told["probe/other"] == "it speaks of another replica"
    assert told["probe/json"].startswith("not a replica: ")
    assert told["nobody"].startswith("not the name of a replica")
    assert told["web_x/odd"] == "a tool is not offered: of another participant"


@pytest.mark.parametrize("lacking", ["disk", "replicas"])
async def test_where_nothing_can_be_written_nobody_is_taken_for_dead(
    lacking: str, redis_server: EmbeddedRedis, raw: redis.Redis, spoil: Callable[[bool], None], tmp_path: Path
) -> None:
    """Who lives cannot say so: a key's time to live is not prolonged either."""
    settings = ProbeSettings(redis_url=redis_server.url, data_dir=tmp_path, heartbeat=0.2, drain=1.0)
    async with running(probe, settings), Bus(redis_server.url, "test/looking") as bus:
        registry = Registry(bus, settings.heartbeat)
        await eventually(lambda: registry.served("probe"))
        for broken in (True, False, True, False):
            if lacking == "disk":
                spoil(broken)
            else:
                raw.config_set("min-replicas-to-write", int(broken))
            # longer than three heartbeats
            until = asyncio.get_running_loop().time() + 1.2
            while asyncio.get_running_loop().time() < until:
                assert await registry.served("probe") is not None
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("served", [1, 2, 1_001], ids="{} served".format)
async def test_registry_remembers_a_thousand_tools_and_forgets_unserved_ones(
    served: int, bus: Bus, raw: redis.Redis
) -> None:
    raw.sadd(KNOWN_TOOLS, *(f"old{n}" for n in range(999)))
    names = [f"t{n}" for n in range(served)]
    await announce(bus, info(tools=[tool(name) for name in names]))
    registry = Registry(bus, 0.0)
    assert set(await registry.tools()) == set(names)
    assert raw.scard(KNOWN_TOOLS) == {1: 1_000, 2: 2, 1_001: 0}[served]
    assert await registry.known("t0") is (served < 1_001)


async def test_registry_schema_that_became_stale_is_read_again(bus: Bus, raw: redis.Redis) -> None:
    registry = Registry(bus, 0.2)
    await announce(bus, info(tools=[tool("fetch")]), ttl_ms=100)
    assert registry.cached("fetch") is None
    assert await registry.served("fetch") == registry.cached("fetch")
    await eventually(lambda: registry.cached("fetch") is None)

    async def gone() -> bool:
        return await registry.served("fetch") is None

    await eventually(gone)
