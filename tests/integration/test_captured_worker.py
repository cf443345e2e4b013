"""What somebody can do who has taken over a web worker, and holds the password of its user: every command of the server
on every kind of key, and the attacks that do not show in a list of rights."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from pydantic import BaseModel
from support.acl_redis import AclRedis, acl_redis
from support.waiting import eventually

import services.critic.service
import services.gateway.service
import services.generator.service
import services.memory.service  # noqa: F401 (all scripts that there are)
from shared.bus import Bus, Command, Consumer, Delivery, Route, Script
from shared.bus.dead_letters import drop, replay
from shared.bus.keys import FAMILIES
from shared.contracts import DEAD_LETTER, PREFIX, SUBJECTS, TOOL_REQUEST, TOOL_RESULT, DeadLetter, ToolRequest
from shared.errors import DecodeError
from shared.participant.janitor import Janitor
from shared.participant.quota import enforce_quota, largest_above, quota_kind
from shared.participant.registry import RELEASE, Registry, ReplicaInfo, announcing
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool import Tool, ToolResult, open_tools

PAGE = Path(__file__).resolve().parents[2] / "docs" / "containers.md"
NO_KEY = "no key"
# What fills the places of a key: of the worker itself, and of somebody else.
PLACES = {
    "query_id": ["1-1"],
    "respondent": ["A"],
    "replica": ["r1"],
    "session": ["s"],
    "said": ["1-1"],
    "user": ["ann"],
    "response_id": ["1-1:A"],
    "engram_id": ["1-1:A"],
    "call_id": ["c"],
    "sums": ["counts"],
    "participant": ["web_search", "web_fetch", "generator"],
    "tool": ["web_search", "web_fetch", "search_memory"],
    "subject": [
        *(subject.name for subject in SUBJECTS),
        *(
            f"{base.name}.{tool}"
            for base in (TOOL_REQUEST, TOOL_RESULT)
            for tool in ("web_search", "web_fetch", "search_memory")
        ),
    ],
    "stream": ["local2:dead.letter", "local2:query.received"],
    "name": [
        *(f"local2:tool.request.{tool}:{tool}:1-1" for tool in ("web_search", "web_fetch")),
        "local2:query.received:generator:1-1",
    ],
}
# Commands whose keys do not stand at fixed places.
MOVABLE = {
    **{name: ["x", "1", "KEY"] for name in ("eval", "eval_ro", "evalsha", "evalsha_ro", "fcall", "fcall_ro")},
    **{name: ["1", "KEY"] for name in ("zunion", "zinter", "zdiff", "sintercard", "zintercard", "msetex")},
    **{name: ["KEY", "1", "KEY"] for name in ("zunionstore", "zinterstore", "zdiffstore")},
    **{name: ["1", "KEY", "MIN"] for name in ("zmpop", "lmpop")},
    **{name: ["1", "1", "KEY", "MIN"] for name in ("bzmpop", "blmpop")},
    "xread": ["STREAMS", "KEY", "0"],
    "xreadgroup": ["GROUP", "g", "c", "STREAMS", "KEY", ">"],
    "migrate": ["host", "1", "KEY", "0", "1"],
}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclRedis]:
    with acl_redis(tmp_path_factory.mktemp("captured"), admin=True) as server:
        asyncio.run(_load_scripts(server.core))
        yield server


async def _load_scripts(url: str) -> None:
    """Load the bus's scripts, as a trusted participant does: the users of workers may not."""
    async with Bus(url, "core/1") as bus:
        await bus.load_scripts()


@pytest.fixture(scope="module")
def admin(users: AclRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(users.admin) as client:
        # replies as the server gives them
        client.response_callbacks.clear()
        yield client


@pytest.fixture
def web(users: AclRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(users.web_search) as client:
        yield client


@pytest.fixture
def core(users: AclRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(users.core) as client:
        yield client


def keys() -> list[str]:
    """One key of every kind there is, of the worker's own and of others', and one of somebody else's program."""
    found = ["elsewhere"]
    for family in FAMILIES:
        parts = re.findall(r"<([a-z_]+)>", family.pattern)
        for values in product(*(PLACES[part] for part in parts)):
            key = family.pattern
            for part, value in zip(parts, values, strict=True):
                key = key.replace(f"<{part}>", value, 1)
            found.append(key)
    return found


def commands(admin: redis.Redis) -> dict[str, Any]:
    """Every command of the server that does something itself, by name (`xinfo|groups`), as COMMAND INFO tells it."""
    names = admin.execute_command("COMMAND", "LIST")
    containers = {name.partition(b"|")[0] for name in names if b"|" in name}
    wanted = sorted(name for name in names if name not in containers)
    return {
        name.decode(): row for name, row in zip(wanted, admin.execute_command("COMMAND", "INFO", *wanted), strict=True)
    }


def words(name: str, row: Any, key: str) -> list[str] | None:
    """A command on a key; None when it takes none."""
    arity, first, last, step = abs(row[1]), row[3], row[4], row[5]
    if name in MOVABLE:
        said = [*name.split("|"), *(key if word == "KEY" else word for word in MOVABLE[name])]
    elif first == 0:
        assert b"movablekeys" not in row[2], f"say above where {name} has its keys"
        return None
    else:
        said = [*name.split("|"), *["1"] * (max(arity, first + 1, last + 1) - name.count("|") - 1)]
        end = last if last >= 0 else len(said) + last
        for place in range(first, max(end, first) + 1, step):
            said[place] = key
    return said + ["1"] * (arity - len(said))


def allowed(admin: redis.Redis, user: str, said: list[str]) -> bool:
    told = admin.execute_command("ACL", "DRYRUN", user, *said)
    assert told == b"OK" or b"has no permissions" in told, (said, told)
    return bool(told == b"OK")


def documented() -> dict[str, set[str]]:
    """The table of the docs: key → commands. It is written for web_search."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- what web may -->")[2].partition("<!-- until here -->")[0]
    found: dict[str, set[str]] = {}
    for line in table.strip().splitlines()[2:]:
        _, key, can, _ = re.split(r"(?<!\\)\|", line)
        found[key.strip().strip("`")] = {word.replace("\\|", "|").lower() for word in re.findall(r"`([^`]+)`", can)}
    return found


OTHER = {"web_search": "web_fetch", "web_fetch": "web_search"}


@pytest.mark.parametrize("user", OTHER)
def test_every_command_on_every_kind_of_key_is_refused_but_those_of_the_docs(admin: redis.Redis, user: str) -> None:
    rows = commands(admin)
    assert len(rows) > 200
    found: dict[str, set[str]] = defaultdict(set)
    for name, row in rows.items():
        for key in keys():
            said = words(name, row, key)
            if said is None:
                plain = [*name.split("|")]
                if allowed(admin, user, plain + ["1"] * (abs(row[1]) - len(plain))):
                    found[NO_KEY].add(name)
                break
            if allowed(admin, user, said):
                found[key.removeprefix(PREFIX)].add(name)
    # what is gone from the command list of newer servers, and what only they have, is none of them
    places = {"web_search": user, "web_fetch": OTHER[user]}
    assert dict(found) == {
        re.sub("|".join(places), lambda name: places[name[0]], key): can for key, can in documented().items()
    }


def test_no_script_of_the_bus_keeps_redis_busy_whatever_it_is_given(
    web: redis.Redis, core: redis.Redis, admin: redis.Redis
) -> None:
    """They are loaded for everybody; whoever calls them chooses keys and arguments."""
    admin.execute_command("CONFIG", "SET", "busy-reply-threshold", "300")
    stream = "local2:tool.request.web_search"
    once = "local2:once:{local2:dead.letter}:local2:tool.request.web_search:x"
    for n in range(3_000):
        core.xadd(stream, {"payload": "a" * 100 if n % 2 else str(n)})
    core.xgroup_create(stream, "web_search", "0")
    web.xreadgroup("web_search", "r1", {stream: ">"}, count=3_000)
    hostile = ["web_search", "r1", "r1", "999999999999", "-1", "1e308", "nan", "", "0-0", "+", "x" * 100_000]
    watching = core.pipeline(transaction=False)
    for script in Script.known.values():
        core.script_load(script.source)
        for keys_given in ([], [stream], [stream, once], ["local2:dead.letter", once]):
            for shift in range(len(hostile)):
                arguments = hostile[shift:] + hostile[:shift]
                with contextlib.suppress(redis.exceptions.ResponseError):
                    web.evalsha(script.sha, len(keys_given), *keys_given, *arguments)
                # BUSY would be an error here
                watching.ping().execute()


def test_the_scripts_of_others_do_nothing_for_the_web(core: redis.Redis, web: redis.Redis) -> None:
    """A script runs with the rights of whoever calls it."""
    core.hset("local2:keys", "a", "b")
    for body in ("return redis.call('HGETALL', 'local2:keys')", "return redis.call('DEL', 'local2:keys')"):
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL|can't (access|run)"):
            web.evalsha(core.script_load(body), 0)
    assert core.hgetall("local2:keys") == {b"a": b"b"}


@pytest.mark.parametrize(
    "command",
    [
        ("SCRIPT", "LOAD", "while true do end"),
        ("EVAL", "while true do end", "0"),
        ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() end)"),
        ("SET", "local2:dead.letter", "x"),
        ("XTRIM", "local2:tool.request.search_memory", "MAXLEN", "0"),
        ("XDEL", "local2:inbox:generator:r1", "1-1"),
        ("XTRIM", "local2:inbox:generator:r1", "MAXLEN", "0"),
        ("ZREM", "local2:replicas", "generator/r1"),
        ("GET", "local2:replica:generator:r1"),
        ("SADD", "local2:tools", "junk"),
        ("HINCRBY", "local2:starts", "generator", "1000"),
        ("INCR", "local2:starts:generator"),
        ("SET", "local2:result:{local2:tool.request.search_memory}:c", "forged"),
        ("SET", "local2:result:{local2:tool.request.web_fetch}:c", "forged"),
        ("XRANGE", "local2:tool.request.web_fetch", "-", "+"),
        ("XADD", "local2:tool.result.web_fetch", "*", "payload", "{}"),
        ("XREAD", "STREAMS", "local2:inbox:web_fetch:r1", "0"),
        ("DEL", "local2:inbox:web_fetch:r1"),
        ("SET", "local2:replica:web_fetch:r1", "{}"),
        ("HGETALL", "local2:settings:web_fetch"),
        ("SET", "local2:settings-schema:web_fetch", "{}"),
        ("XGROUP", "CREATE", "local2:tool.request.web_search", "x", "0", "MKSTREAM"),
        ("SET", "local2:once:{local2:dead.letter}:local2:tool.request.web_fetch:web_fetch:1-1", "1-1"),
        ("SET", "local2:letters-seen", "9-9"),
        ("XADD", "local2:tool.request.web_search", "*", "payload", "{}"),
        ("XADD", "local2:junk", "*", "a", "b"),
        ("SET", "local2:once:{local2:dead.letter}:local2:query.received:generator:1-1", "1-1"),
        ("CLIENT", "UNBLOCK", "1"),
        # another database, of which no janitor knows
        ("SELECT", "1"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_what_it_could_do_once_is_refused(web: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        web.execute_command(*command)


# How it can fill the server: each on keys of its own, which are numbered.
WAYS = [
    ("SET", "local2:result:{{local2:tool.request.web_search}}:{n}", "JUNK"),
    ("SET", "local2:replica:web_search:{n}", "JUNK"),
    ("SET", "local2:once:{{local2:dead.letter}}:local2:tool.request.web_search:{n}", "JUNK"),
    ("XADD", "local2:inbox:generator:{n}", "*", "x", "JUNK"),
    ("XADD", "local2:tool.result.web_search", "*", "x", "JUNK"),
    ("XADD", "local2:tool.schema", "*", "x", "JUNK"),
    ("XADD", "local2:dead.letter", "*", "x", "JUNK"),
    ("ZADD", "local2:replicas", "1", "{n}JUNK"),
]


def fill(web: redis.Redis, way: tuple[str, ...]) -> None:
    """Writes until the server refuses."""
    for n in range(1_000):
        web.execute_command(*(word.format(n=n).replace("JUNK", "x" * 500_000) for word in way))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way[:2]))
async def test_a_server_that_it_has_filled_has_room_again_and_has_lost_nothing_of_others(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    with (
        acl_redis(tmp_path, arguments=("--maxmemory", "32mb", "--appendonly", "no")) as users,
        redis.Redis.from_url(users.core) as core,
        redis.Redis.from_url(users.web_search) as web,
    ):
        core.hset("local2:session:{s}", "owner", "ann")
        core.xadd("local2:query.received", {"payload": "x" * 100_000})
        async with Bus(users.core, "test/1") as bus:
            await bus.link.call("PING")
            with pytest.raises(redis.exceptions.ResponseError, match=r"OOM|maxmemory"):
                fill(web, way)
            told = core.info("memory")
            assert told["used_memory"] > 0.9 * told["maxmemory"]
            janitor = Janitor(bus, 60)
            # what is kept of dead letters goes by halves
            for _ in range(10):
                await janitor.round()
            core.set("local2:session:{s}:deleted", "1")
            told = core.info("memory")
            assert told["used_memory"] < 0.75 * told["maxmemory"]
        assert core.hget("local2:session:{s}", "owner") == b"ann"
        assert core.xlen("local2:query.received") == 1


def test_keys_that_a_worker_may_write_have_a_quota() -> None:
    writing = {"set", "xadd", "zadd", "incr"}
    written = {key for key, can in documented().items() if can & writing}
    assert len(written) > 9
    assert {key for key in written if quota_kind(f"{PREFIX}{key}".encode()) is None} == set()


def test_what_one_kind_of_key_holds_above_its_share_goes_largest_first() -> None:
    sizes = [(30, b"a"), (5, b"b"), (40, b"c"), (10, b"d")]
    assert largest_above(sizes, 85) == []
    assert largest_above(sizes, 84) == [(40, b"c")]
    assert largest_above(sizes, 14) == [(40, b"c"), (30, b"a"), (10, b"d")]
    assert largest_above(sizes, 0) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("limit", ["0", "64mb"])
async def test_nobody_is_counted_while_there_is_room_enough(tmp_path: Path, limit: str) -> None:
    with (
        acl_redis(tmp_path, arguments=("--maxmemory", limit)) as users,
        redis.Redis.from_url(users.web_search) as web,
    ):
        async with Bus(users.core, "test/1") as bus:
            await bus.link.call("PING")
            web.set("local2:result:{local2:tool.request.web_search}:c", "x" * 10_000_000)
            assert await enforce_quota(bus) == 0


# ── what it says of others ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def bus(users: AclRedis, core: redis.Redis) -> AsyncIterator[Bus]:
    """Somebody of core, in a Redis with nothing in it."""
    if ours := list(core.scan_iter("local2:*")):
        core.delete(*ours)
    async with Bus(users.core, "test/1") as bus:
        yield bus


def schema(name: str, description: str = "forged") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def entry(participant: str, replica: str, **said: Any) -> bytes:
    given = {"state": "ready", "started": 0, "seen": 1, "release": RELEASE, **said}
    return orjson.dumps(asdict(ReplicaInfo(participant, replica, **given)))


async def test_of_what_it_says_of_itself_its_own_tool_counts_and_nothing_else(bus: Bus, web: redis.Redis) -> None:
    real = ReplicaInfo("memory", "m", "ready", 5, 5, tools=[schema("search_memory", "real")], release=RELEASE)
    await bus.link.pipe(announcing(real, 60_000))
    web.set(
        "local2:replica:web_search:a",
        entry("web_search", "a", tools=[schema(name) for name in ("web_search", "search_memory", "extra")], release=0),
    )
    web.set("local2:replica:web_search:b", entry("memory", "m2", tools=[schema("search_memory")]))
    web.set("local2:replica:web_search:c", entry("memory", "c", tools=[schema("search_memory")], release=0))
    web.zadd("local2:replicas", {f"web_search/{name}": 1 for name in "abc"} | {"memory/m2": 1})
    registry = Registry(bus, 60)
    assert [(one.participant, one.replica) for one in await registry.replicas()] == [
        ("memory", "m"), ("web_search", "a"),
    ]  # fmt: skip
    found = {name: tool["function"]["description"] for name, tool in (await registry.tools()).items()}
    assert found == {"web_search": "forged", "search_memory": "real"}


def letter(stream: str, group: str) -> DeadLetter:
    return DeadLetter(stream=stream, group=group, entry_id="1-1", deliveries=1, reason="r", fields={"payload": "{}"})


def forge(web: redis.Redis, stream: str, group: str) -> str:
    """As somebody may who has taken over web_search: with a note, where he may write one."""
    letter_id = web.xadd("local2:dead.letter", {"payload": letter(stream, group).model_dump_json()}).decode()
    with contextlib.suppress(redis.exceptions.NoPermissionError):
        web.set(f"local2:once:{{local2:dead.letter}}:{stream}:{group}:1-1", letter_id)
    return str(letter_id)


@pytest.mark.parametrize(
    ("stream", "group"),
    [("local2:query.received", "generator"), ("local2:tool.request.web_fetch", "web_fetch")],
    ids=["a query", "another tool's request"],
)
async def test_a_letter_that_it_has_forged_is_not_replayed_and_goes(
    bus: Bus, web: redis.Redis, core: redis.Redis, stream: str, group: str
) -> None:
    janitor = Janitor(bus, 60)
    await janitor.round()
    genuine = (await bus.publish(DEAD_LETTER.of(letter(stream, group), once=f"{stream}:{group}:1-1")))[0]
    forged = forge(web, stream, group)
    with pytest.raises(DecodeError, match="forged"):
        await replay(bus, forged)
    await janitor.round()
    assert [found for found, _ in await bus.range(DEAD_LETTER.stream)] == [genuine]
    # what was looked at stays genuine when its note has gone
    core.delete(f"local2:once:{{local2:dead.letter}}:{stream}:{group}:1-1")
    await janitor.round()
    assert await replay(bus, genuine) is not None
    assert core.xlen(stream) == 1


async def test_a_letter_about_its_own_request_is_as_good_as_before(bus: Bus, web: redis.Redis) -> None:
    stream = "local2:tool.request.web_search"
    own = forge(web, stream, "web_search")
    await Janitor(bus, 60).round()
    assert await replay(bus, own) is not None
    assert len(await bus.range(stream)) == 1


async def test_letters_of_an_earlier_release_that_have_outlived_their_notes_stay(bus: Bus, core: redis.Redis) -> None:
    old = core.xadd("local2:dead.letter", {"payload": letter("local2:user.feedback", "reward").model_dump_json()})
    janitor = Janitor(bus, 60)
    await janitor.round()
    await janitor.round()
    assert [found for found, _ in await bus.range(DEAD_LETTER.stream)] == [old.decode()]
    assert await replay(bus, old.decode()) is not None


async def test_ids_go_on_after_a_stream_was_opened_again(bus: Bus, web: redis.Redis) -> None:
    """A letter with an id as small as nobody's would pass for one that was looked at."""
    janitor = Janitor(bus, 60)
    await janitor.round()
    genuine = letter("local2:user.feedback", "reward")
    last = (await bus.publish(DEAD_LETTER.of(genuine, once="local2:user.feedback:reward:1-1")))[0]
    await janitor.round()
    await drop(bus, last)
    web.xadd("local2:dead.letter", {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
    await janitor.round()
    with pytest.raises(redis.exceptions.ResponseError, match="equal or smaller"):
        web.xadd("local2:dead.letter", {"x": "y"}, id="5-5")


async def test_on_a_redis_without_users_there_is_nobody_to_ask(redis_url: str, raw: redis.Redis) -> None:
    async with Bus(redis_url, "test/1") as bus:
        await Janitor(bus, 60).round()
        found = raw.xadd(DEAD_LETTER.stream, {"payload": letter("local2:user.feedback", "reward").model_dump_json()})
        await Janitor(bus, 60).round()
        assert await replay(bus, found.decode()) is not None


# ── groups and the names of consumers ────────────────────────────────────────────────────────────────────────────


async def test_its_group_is_made_by_whoever_reads_the_registry_and_again_when_it_has_gone(
    bus: Bus, users: AclRedis, core: redis.Redis
) -> None:
    stream = "local2:tool.request.web_search"
    core.xadd(stream, {"payload": "1"})
    handled: list[str] = []

    async def handle(delivery: Delivery) -> list[Command]:
        handled.append(delivery.entry_id)
        return []

    stop = asyncio.Event()
    async with Bus(users.web_search, "web_search/r1") as worker:
        consumer = Consumer(
            worker,
            "web_search",
            "r1",
            {stream: Route(handle)},
            concurrency=1,
            heartbeat=0.05,
            max_deliveries=3,
            drain=1,
        )
        running = asyncio.create_task(consumer.run(stop))
        await asyncio.wait({running}, timeout=0.2)
        assert not running.done()
        assert not handled
        registry = Registry(bus, 0.0)
        info = ReplicaInfo("web_search", "r1", "ready", 1, 1, tools=[schema("web_search")], release=RELEASE)
        await bus.link.pipe(announcing(info, 60_000))
        await registry.replicas()
        await eventually(lambda: len(handled) == 1)
        core.delete(stream)
        core.xadd(stream, {"payload": "2"})
        await registry.replicas()
        await eventually(lambda: len(handled) == 2)
        stop.set()
        await running


async def test_empty_request_streams_above_quota_are_removed(tmp_path: Path) -> None:
    """mcp may create groups for tools with any name, and read there as any consumer."""
    limit = ("--maxmemory", "32mb", "--appendonly", "no")
    with acl_redis(tmp_path, arguments=limit) as users, redis.Redis.from_url(users.core) as core:
        streams = [f"local2:tool.request.server__{n}" for n in range(19)]
        for stream in streams:
            core.xgroup_create(stream, "mcp", "0", mkstream=True)
            entry = core.xadd(stream, {"payload": "x"})
            core.xreadgroup("mcp", "x" * 700_000, {stream: ">"})
            if stream != streams[-1]:
                core.xdel(stream, entry)
        async with Bus(users.core, "test/1") as bus:
            await bus.link.call("PING")
            await Janitor(bus, 60).round()
        assert len([stream for stream in streams if core.exists(stream)]) < 10
        assert core.xlen(streams[-1]) == 1
        assert core.xpending(streams[-1], "mcp")["pending"] == 1


@pytest.mark.parametrize("size", [1_000_000, 20], ids=["long names", "many names"])
async def test_excess_consumers_are_removed_and_their_entries_stay(
    size: int, bus: Bus, web: redis.Redis, core: redis.Redis
) -> None:
    stream, other = "local2:tool.request.web_search", "local2:tool.request.search_memory"
    core.sadd("local2:tools", "web_search", "search_memory")
    for name in (stream, other):
        core.xgroup_create(name, name.rpartition(".")[2], "0", mkstream=True)
    count = 20 if size > 20 else 1_300
    entries = [core.xadd(stream, {"payload": "x"}) for _ in range(count)]
    core.xadd(other, {"payload": "x"})
    web.xreadgroup("web_search", "a-replica", {stream: ">"}, count=1)
    for n in range(1, count):
        web.xreadgroup("web_search", f"{n:05d}" + "x" * (size - 5), {stream: ">"}, count=1)
    core.xreadgroup("search_memory", "x" * 1_000_000, {other: ">"})
    await Janitor(bus, 60).round()
    names = [row["name"] for row in core.xinfo_consumers(stream, "web_search")]
    assert len(names) <= 1_001
    assert max(map(len, names)) < 100
    # All pending entries stay pending, and any replica may claim those of the removed consumers at once.
    pending = core.xpending_range(stream, "web_search", "-", "+", 2_000)
    assert [row["message_id"] for row in pending] == entries
    handed = [row for row in pending if row["consumer"] == b"handover"]
    assert len(handed) == (count - 1 if size > 20 else count - 1_000)
    # a trusted worker's group is left alone
    assert len(core.xinfo_consumers(other, "search_memory")) == 1


async def test_a_worker_outside_that_serves_a_tool_of_another_name_is_told(users: AclRedis, tmp_path: Path) -> None:
    class Arguments(BaseModel):
        """Does nothing."""

    async def run(_args: Arguments, _request: ToolRequest) -> ToolResult:
        return ToolResult("x")

    @contextlib.asynccontextmanager
    async def build(_settings: Settings) -> AsyncIterator[list[Tool[Arguments]]]:
        yield [Tool("web_search", Arguments, run), Tool("other", Arguments, run)]

    settings = Settings(redis_url=users.web_search, data_dir=tmp_path)
    async with open_context("web_search", settings) as context:
        with pytest.raises(TypeError, match="web_search must serve one tool, named like itself"):
            async with open_tools(context, build):
                pass
