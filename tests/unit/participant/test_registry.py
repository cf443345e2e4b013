"""Who is believed to be there, by the clocks of the bus and of the process that looks; without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from shared.bus import Bus, Command, ReplyError, create_group_command
from shared.bus.keys import KNOWN_TOOLS, REPLICAS, replica_key
from shared.contracts import TOOL_REQUEST, is_untrusted
from shared.errors import BusUnavailable
from shared.participant import registry as module
from shared.participant.registry import (
    RELEASE,
    SETTLING,
    Registry,
    ReplicaInfo,
    announcing,
    leaving,
    may_serve,
    still_there,
)

NOW = 1_780_000_000_000


def info(replica: str = "r1", participant: str = "probe", **values: Any) -> ReplicaInfo:
    return ReplicaInfo(
        participant, replica, **{"state": "ready", "started": 1, "seen": NOW, "release": RELEASE, **values}
    )


def tool(name: Any, **values: Any) -> dict[str, Any]:
    return {"function": {"name": name}, **values}


class Index:
    """A bus on which replicas are announced; `asked` are the commands that were sent."""

    def __init__(self, *infos: ReplicaInfo) -> None:
        self.now = NOW
        self.written: dict[str, Any] = {}
        self.asked: list[Command] = []
        self.known: dict[str, int] = {}
        self.announce(*infos)

    def announce(self, *infos: ReplicaInfo) -> None:
        self.written |= {f"{one.participant}/{one.replica}": orjson.dumps(asdict(one)) for one in infos}

    def says(self, command: Command) -> Any:
        match command[0]:
            case "ZRANGE":
                assert command == ("ZRANGE", REPLICAS, 0, -1)
                return [member.encode() for member in self.written]
            case "TIME":
                return [str(self.now // 1000).encode(), str(self.now % 1000 * 1000 + 999).encode()]
            case "GET":
                return {replica_key(*name.split("/", 1)): value for name, value in self.written.items() if "/" in name}[
                    command[1]
                ]
            case "SMISMEMBER":
                return [self.known.get(name, 0) for name in command[2:]]
            case "SISMEMBER":
                return self.known.get(command[2], 0)
            case _:
                return 1

    async def pipe_raw(self, commands: Sequence[Command]) -> list[Any]:
        self.asked += commands
        await asyncio.sleep(0)
        return [self.says(command) for command in commands]

    pipe = pipe_raw

    async def call(self, *command: Any) -> Any:
        return (await self.pipe_raw([command]))[0]


class Looking:
    """A registry, with the clock of its process."""

    def __init__(self, index: Index, freshness: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        self.index = index
        self.registry = Registry(cast(Bus, SimpleNamespace(link=index)), 2 * freshness)

    async def sees(self, **how: Any) -> list[str]:
        return [one.replica for one in await self.registry.replicas(**how)]

    def passes(self, ms: int) -> None:
        """On both clocks."""
        self.index.now += ms
        self.seconds = 100 + (self.index.now - NOW) / 1000


def test_what_a_replica_says_of_itself_stands_under_its_name_for_its_time() -> None:
    assert announcing(info(seen=7), 900) == [
        ("SET", replica_key("probe", "r1"), orjson.dumps(asdict(info(seen=7))), "PX", 900),
        ("ZADD", REPLICAS, 7, "probe/r1"),
    ]
    assert leaving("probe", "r1") == [("DEL", replica_key("probe", "r1")), ("ZREM", REPLICAS, "probe/r1")]
    # never for less than it says
    for ms, seconds in ((1_000, 1), (1_001, 2), (1_999, 2), (2_000, 2), (300, 1)):
        assert still_there("probe", "r1", ms) == ("EXPIRE", replica_key("probe", "r1"), seconds)


@pytest.mark.parametrize(
    ("participant", "name", "may"),
    [
        ("memory", "search_memory", True), ("memory", "web_search", True), ("web_search", "web_search", True),
        ("web_search", "web_fetch", False), ("web_search", "server__tool", False), ("mcp", "server__tool", True),
        ("mcp", "web_search", False), ("mcp", "mcp", False), ("web_x", None, False), ("mcp", None, False),
    ],
)  # fmt: skip
def test_untrusted_worker_may_announce_only_its_own_tools(participant: str, name: str | None, may: bool) -> None:
    assert may_serve(participant, name) is may
    assert is_untrusted(participant) is (participant != "memory")


async def test_what_was_read_is_believed_for_so_long_and_not_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Looking(Index(info("a")), 2.0, monkeypatch)
    assert await on.sees() == ["a"]
    on.index.announce(info("b"))
    on.passes(2_000)
    assert await on.sees() == ["a"]
    on.passes(1)
    assert await on.sees() == ["a", "b"]
    on.index.announce(info("c"))
    assert await on.sees(fresh=True) == ["a", "b", "c"]
    reads = [command[0] for command in on.index.asked].count("ZRANGE")
    # whoever asks while it is read waits for that
    on.passes(2_500)
    await asyncio.gather(*(on.sees() for _ in range(5)))
    assert [command[0] for command in on.index.asked].count("ZRANGE") == reads + 1


async def test_who_was_seen_by_a_clock_that_is_too_far_ahead_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    late, ahead = info("late", seen=NOW + 60_000), info("ahead", seen=NOW + 59_999)
    assert await Looking(Index(info("old", seen=5), late, ahead), 0.5, monkeypatch).sees() == ["ahead", "old"]


async def test_who_is_gone_leaves_the_index_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(info("a"))
    index.written |= {"probe/gone": None, "probe/list": ReplyError("WRONGTYPE it is"), "nonsense": b"{}"}
    on = Looking(index, 0.5, monkeypatch)
    assert await on.sees() == ["a"]
    assert [command for command in index.asked if command[0] == "ZREM"] == [("ZREM", REPLICAS, "probe/gone")]
    index.written = {}
    index.asked.clear()
    # nobody: nothing more is asked
    on.passes(30_000)
    await on.sees()
    assert [command[0] for command in index.asked] == ["ZADD", "ZRANGE", "TIME"]


async def test_after_a_pause_those_who_were_there_count_until_they_had_time_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = Index(info("a"), info("b", started=0))
    on = Looking(index, 1.0, monkeypatch)
    assert await on.sees() == ["b", "a"]
    for _ in range(3):
        on.passes(4_000)
        assert await on.sees() == ["b", "a"]
    # within the time between two looks nobody is away, and who is gone is gone
    del index.written["probe/b"]
    on.passes(4_000)
    assert await on.sees() == ["a"]
    # somebody was: who was there may come back as much later as it was long, and has six seconds more to say so
    index.written = {}
    on.passes(4_100)
    assert await on.sees() == ["a"]
    index.announce(info("c", started=0))
    on.passes(4_000)
    assert await on.sees() == ["c", "a"]
    on.passes(4_000)
    assert await on.sees() == ["c", "a"]
    on.passes(2_099)
    assert await on.sees() == ["c", "a"]
    on.passes(1)
    assert await on.sees(fresh=True) == ["c"]


async def test_of_tools_the_one_that_is_there_longest_speaks_and_models_are_offered_what_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = Index(
        info("old", tools=[tool("x", timeout=1), tool("hidden", internal=True)]),
        info("new", started=5, tools=[tool("x", timeout=2), tool("y" * 64), tool("z" * 65), tool("a b"), tool(None)]),
        info("starting", state="starting", tools=[tool("not yet")]),
        info("w", "web_x", tools=[tool("web_x"), tool("stolen")]),
    )
    on = Looking(index, 5.0, monkeypatch)
    assert on.registry.cached("x") is None
    offered = {name: {"type": "function", "function": {"name": name}} for name in ("x", "y" * 64, "web_x")}
    assert await on.registry.tools() == offered
    assert await on.registry.served("x") == tool("x", timeout=1)
    assert await on.registry.served("hidden") == tool("hidden", internal=True)
    # the names are noted, and who works outside has his group made for him
    names = sorted(["x", "hidden", "y" * 64, "web_x"])
    first = index.asked.index(("SMISMEMBER", KNOWN_TOOLS, *names))
    stream = TOOL_REQUEST.for_tool("web_x").stream
    assert index.asked[first + 1 : first + 5] == [
        ("SCARD", KNOWN_TOOLS), create_group_command(stream, "web_x"), ("XINFO", "GROUPS", stream),
        ("SADD", KNOWN_TOOLS, *names),
    ]  # fmt: skip
    # what is known is not read again, what is not is looked for
    index.asked.clear()
    assert await on.registry.served("x") == on.registry.cached("x") == tool("x", timeout=1)
    assert on.registry.cached("never") is None
    assert index.asked == []
    index.announce(info("late", tools=[tool("later")]))
    assert await on.registry.served("later") == tool("later")
    assert await on.registry.served("never") is None
    index.known["x"] = 1
    assert [await on.registry.known(name) for name in ("x", "never")] == [True, False]
    # what has become stale is read again though it is known
    del index.written["web_x/w"]
    on.passes(6_000)
    assert on.registry.cached("web_x") is None
    assert await on.registry.served("web_x") is None


async def test_of_one_participant_its_own_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Looking(Index(info("a"), info("w", "web_x")), 5.0, monkeypatch)
    assert [one.replica for one in await on.registry.live("web_x")] == ["w"]


async def test_it_is_read_often_while_a_stack_starts_and_then_in_time_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = Looking(Index(info("a")), 5.0, monkeypatch)
    waited: list[float] = []
    failing: list[Exception] = [BusUnavailable("away"), ReplyError("WRONGTYPE it is")]

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        on.seconds += SETTLING / 2
        if len(waited) == 4:
            raise asyncio.CancelledError

    async def replicas(*, fresh: bool = False) -> None:
        assert fresh
        if failing:
            raise failing.pop()

    event = on.registry._wanted
    keeping = asyncio.create_task(on.registry.run())
    await asyncio.sleep(0)
    assert not keeping.done()
    await on.sees()
    assert event.is_set()
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(on.registry, "replicas", replicas)
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert waited == [0.2, 0.2, 4.0, 4.0]
    assert failing == []
