"""The users of the containers' Redis: each participant does its whole job, and those on the web side nothing else."""

from __future__ import annotations

import asyncio
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from support.acl_redis import PASSWORDS, AclRedis, acl_redis, start
from support.entries import event_of
from support.http_gateway import Site, gateway_settings, serving
from support.loopback import listening
from support.services import announced, running
from support.stack import respondent
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.generator.settings import GeneratorSettings
from services.web_fetch.service import WebFetchSettings
from services.web_fetch.service import app as web_fetch
from services.web_search.service import WebSearchSettings
from services.web_search.service import app as web_search
from shared.bus import Bus, JournalSubscriber, open_subscriber
from shared.bus.keys import journal_key
from shared.contracts import DEAD_LETTER, QUERY_CANCEL, TOOL_REQUEST, TOOL_RESULT, QueryCancel, ToolRequest
from shared.envelope import Envelope
from shared.errors import SettingsError
from shared.participant import health
from shared.participant.service import open_context
from shared.records.journal import EntryType, JournalWriter
from shared.testing.model_server import ScriptedModelServer

RULES = [
    {
        "when": {"tool_results": 0, "offered": "web_search"},
        "respond": {"tool_calls": [{"name": "web_search", "args": {"query": "LoCAL2"}}]},
    },
    {"when": {"last_tool": "web_search"}, "respond": {"text": "I have searched."}},
    {"respond": {"text": "I have not searched."}},
]
# What no participant needs and a stolen password must not give.
DANGEROUS = [
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "dir", "/tmp"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("DEBUG", "JMAP"),
    ("SHUTDOWN", "NOSAVE"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "thief", "on", "nopass", "+@all"),
    ("EVAL", "return 1", "0"),
    ("FUNCTION", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "ID", "1"),
    ("MONITOR",),
    ("REPLICAOF", "example.com", "6379"),
    ("MODULE", "LIST"),
    ("BGREWRITEAOF",),
    ("SWAPDB", "0", "1"),
]
WORKERS = "web_search", "web_fetch"


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclRedis]:
    with acl_redis(tmp_path_factory.mktemp("acl")) as server:
        yield server


@pytest.fixture
def web(users: AclRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(users.web_search) as client:
        yield client


@pytest.fixture
def core(users: AclRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(users.core) as client:
        yield client


@pytest.fixture
async def system(users: AclRedis, tmp_path: Path) -> AsyncIterator[Site]:
    """The gateway, both respondents and both web workers, each as its own user."""
    common: dict[str, Any] = {"heartbeat": 0.5, "drain": 0.5, "data_dir": tmp_path}
    # the first heartbeat after this finds that nobody tidies up
    with redis.Redis.from_url(users.core) as client:
        client.delete("local2:janitor")
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(ScriptedModelServer(RULES))
        searching = WebSearchSettings(provider="mock", redis_url=users.web_search, **common)
        await stack.enter_async_context(running(web_search, searching))
        await stack.enter_async_context(running(web_fetch, WebFetchSettings(redis_url=users.web_fetch, **common)))
        for name in WORKERS:
            await announced(users.core, name)
        for letter in "AB":
            settings = GeneratorSettings(
                respondent_id=letter, ollama_host=model.url, redis_url=users.core, concurrency=4, yield_rest=0, **common
            )
            await stack.enter_async_context(running(respondent(settings), settings))
        await announced(users.core, "generator")
        await announced(users.core, "respondent-b")
        site = await stack.enter_async_context(serving(gateway_settings(users.core, tmp_path)))
        yield site


async def answer(site: Site, query: str) -> dict[str, Any]:
    reply = await site.http.post("/query", json={"query": query, "session_id": "s-1"})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


# ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_question_is_answered_with_a_search_by_participants_of_both_users(system: Site) -> None:
    body = await answer(system, "What is LoCAL2?")
    assert body["answer"] == "I have searched."
    assert [call["tool"] for call in body["tool_calls"]] == ["web_search"]
    assert body["tool_calls"][0]["error"] is None


async def test_every_route_of_an_operator_works_as_the_core_user(system: Site) -> None:
    query_id = (await answer(system, "Hello"))["query_id"]
    http: httpx.AsyncClient = system.http
    for path in ("/ready", "/tools", "/participants", "/bus/streams", "/dead-letters", "/sessions", "/sessions/s-1"):
        assert (await http.get(path)).status_code == 200, path
    for path in (f"/queries/{query_id}", "/metrics", "/keys"):
        assert (await http.get(path)).status_code == 200, path
    assert (await http.post("/keys", json={"name": "a", "user_id": "a"})).status_code == 201
    liked = await http.post("/feedback", json={"query_id": query_id, "sentiment": "positive"})
    assert liked.status_code < 300, liked.text
    assert (await http.delete("/sessions/s-1")).status_code < 300


async def test_a_worker_on_the_web_side_hears_new_settings(system: Site) -> None:
    changed = await system.http.patch("/participants/web_search/settings", json={"max_results": 1})
    assert changed.status_code == 200, changed.text

    async def one_hit() -> bool:
        called = await system.http.post("/tools/web_search/call", json={"args": {"query": "LoCAL2"}})
        assert called.status_code == 200, called.text
        return "[2]" not in called.json()["result"]

    await eventually(one_hit, 5, "the search gives one hit")


async def test_an_entry_that_a_worker_cannot_read_becomes_a_dead_letter(system: Site, core: redis.Redis) -> None:
    stream = TOOL_REQUEST.for_tool("web_search").stream
    entry = core.xadd(stream, {"payload": "no JSON"})

    def dead_letter_exists() -> bool:
        letters = core.xrange(DEAD_LETTER.stream)
        return any(entry.decode() in fields[b"payload"].decode() for _, fields in letters)

    await eventually(dead_letter_exists, 5, "the dead letter")
    assert core.xpending(stream, "web_search")["pending"] == 0


async def test_a_worker_hears_of_a_cancelled_query(system: Site, users: AclRedis) -> None:
    # web_fetch waits for a server that accepts and never answers; the cancel ends the call
    held: list[asyncio.StreamWriter] = []

    async def hold(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await asyncio.Event().wait()

    async with listening(hold) as port, Bus(users.core, "test/1") as bus:
        place = f"127.0.0.1:{port}"
        patched = {"allowed_private_hosts": [place]}
        assert (await system.http.patch("/participants/web_fetch/settings", json=patched)).status_code == 200
        calls: list[str] = []

        async def fetched() -> bool:
            # until the worker has heard of its new setting, it refuses the address
            calls.append(f"held-{len(calls)}")
            args = {"url": f"http://{place}/"}
            request = ToolRequest(
                query_id="7-7", call_id=calls[-1], tool="web_fetch", args=args, session_id="s-1"
            )  # fmt: skip
            await bus.publish(TOOL_REQUEST.for_tool("web_fetch").of(request))
            await eventually(lambda: held or _result(users, calls[-1]), 15, "the call is refused, or under way")
            return bool(held)

        await eventually(fetched, 15, "the page is being fetched")
        await bus.publish(QUERY_CANCEL.of(QueryCancel(query_id="7-7")))
        # it is told, and not kept: nobody asks for it again

        async def told() -> list[str]:
            results = await bus.range(TOOL_RESULT.for_tool("web_fetch").stream)
            found = [TOOL_RESULT.decode(Envelope.parse("", *entry)) for entry in results]
            return [result.error or "" for result in found if result.call_id == calls[-1]]

        (error,) = await eventually(told, 10, "the call has ended")
        assert "cancelled" in error
        assert _result(users, calls[-1]) == ""
        for writer in held:
            writer.close()


def _result(users: AclRedis, call_id: str) -> str:
    with redis.Redis.from_url(users.web_fetch, decode_responses=True) as client:
        found = client.get(f"local2:result:{{local2:tool.request.web_fetch}}:{call_id}") or ""
        return "" if found.startswith("running:") else found


async def test_the_work_streams_are_tidied_by_those_who_may(system: Site, core: redis.Redis) -> None:
    def janitor() -> str:
        return (core.get("local2:janitor") or b"").decode()

    for _ in range(3):
        name = await eventually(janitor, 5, "somebody tidies up")
        assert not name.startswith("web_")
        core.delete("local2:janitor")


@pytest.mark.parametrize("name", WORKERS)
async def test_a_workers_health_check_works_as_its_own_user(system: Site, users: AclRedis, name: str) -> None:
    healthy, sentence = await health.check(name, users.of(name))
    assert healthy, sentence


async def test_workers_leave_no_consumer_and_no_trace_of_themselves_behind(users: AclRedis, core: redis.Redis) -> None:
    settings = WebSearchSettings(provider="mock", heartbeat=0.5, drain=0.5, redis_url=users.web_search)
    async with running(web_search, settings):
        await announced(users.core, "web_search")
    assert core.xinfo_consumers(TOOL_REQUEST.for_tool("web_search").stream, "web_search") == []
    assert not list(core.scan_iter("local2:replica:web_search:*"))
    assert not list(core.scan_iter("local2:inbox:web_search:*"))


async def test_journals_ring_for_the_core_user(users: AclRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing but the ring can tell
    monkeypatch.setattr("shared.bus.subscriber.JournalSubscriber.pause", 3600)
    async with Bus(users.core, "test/1") as bus, open_subscriber(bus) as bell:
        await _followed(bus, bell, journal_key("8-1", "A"), rung=True)


async def test_a_user_who_may_neither_ring_nor_listen_follows_and_writes_all_the_same(
    users: AclRedis, tmp_path: Path
) -> None:
    with EmbeddedRedis(tmp_path / "redis", port=0) as server, redis.Redis.from_url(server.url) as admin:
        # as the core user was before journals rang
        admin.acl_setuser(
            "old", enabled=True, nopass=True, keys=["local2:*"], reset_channels=True, categories=["+@all"]
        )
        async with Bus(server.url.replace("://", "://old:x@", 1), "test/1") as bus, open_subscriber(bus) as bell:
            await _followed(bus, bell, journal_key("9-1", "A"), rung=False)


async def _followed(bus: Bus, bell: JournalSubscriber, key: str, *, rung: bool) -> None:
    follower = bell.follow(key)
    waiting = asyncio.create_task(follower.next())
    if rung:
        await eventually(lambda: bell.subscribed(key), what="the server knows who listens")
    writer, _ = await JournalWriter.claim(bus, key, event_of("claimed", {}), 60)
    assert [entry_id for entry_id, _ in await asyncio.wait_for(waiting, 10)] == ["1-1"]
    await writer.append(event_of(EntryType.COMPLETED, {}))
    assert [entry_id for entry_id, _ in await asyncio.wait_for(follower.next(), 10)] == ["1-2"]
    assert bell.subscribed(key) is rung
    follower.close()


# ── the limits ───────────────────────────────────────────────────────────────────────────────────────────────


def refused(client: redis.Redis, *command: Any) -> bool:
    """Whether the server says that this user may not. (DEBUG is closed for all, before it looks who asks.)"""
    try:
        client.execute_command(*command)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.exceptions.ResponseError as exc:
        return "DEBUG command not allowed" in str(exc)
    return False


@pytest.mark.parametrize("command", DANGEROUS, ids=lambda command: " ".join(command[:2]))
def test_nobody_may_touch_the_server_itself(core: redis.Redis, web: redis.Redis, command: tuple[str, ...]) -> None:
    assert refused(core, *command)
    assert refused(web, *command)


@pytest.mark.parametrize(
    "command",
    [
        ("HGETALL", "local2:keys"),
        ("HSET", "local2:keys", "a", "b"),
        ("GET", "local2:keys"),
        ("HGETALL", "local2:session:{s-1}"),
        ("HGETALL", "local2:session:{s-1}:turns:A"),
        ("ZRANGE", "local2:sessions:admin", "0", "-1"),
        ("XRANGE", "local2:journal:1-1:A", "-", "+"),
        ("XADD", "local2:journal:1-1:A", "9-9", "type", "answer"),
        ("XRANGE", "local2:query.received", "-", "+"),
        ("XADD", "local2:query.received", "*", "payload", "{}"),
        ("XREAD", "STREAMS", "local2:query.received", "0"),
        ("XREAD", "STREAMS", "local2:tool.schema.request", "local2:response.generation", "0", "0"),
        ("XREADGROUP", "GROUP", "generator", "thief", "STREAMS", "local2:query.received", ">"),
        ("XGROUP", "CREATE", "local2:response.generation", "thief", "0"),
        ("HGETALL", "local2:query:1-1"),
        ("XRANGE", "local2:response.generation", "-", "+"),
        ("XRANGE", "local2:dead.letter", "-", "+"),
        ("DEL", "local2:dead.letter"),
        ("XRANGE", "local2:tool.request.search_memory", "-", "+"),
        ("GET", "local2:result:{local2:tool.request.search_memory}:c1"),
        ("XRANGE", "local2:tool.result.search_memory", "-", "+"),
        ("XADD", "local2:tool.result.search_memory", "*", "payload", "{}"),
        ("XRANGE", "local2:inbox:generator:r1", "-", "+"),
        ("DEL", "local2:inbox:generator:r1"),
        ("HGETALL", "local2:settings:generator"),
        ("HSET", "local2:settings:web_search", "provider", "mock"),
        ("XADD", "local2:settings.update", "*", "payload", "{}"),
        ("XADD", "local2:query.cancel", "*", "payload", "{}"),
        ("SET", "local2:replica:generator:r1", "{}"),
        ("SET", "local2:cancel:1-1", "1"),
        ("SCAN", "0"),
        ("RANDOMKEY",),
        ("RENAME", "local2:inbox:web_search:a", "local2:keys"),
        ("INFO",),
        ("PUBLISH", "anything", "x"),
        ("SPUBLISH", "local2:journal:1-1:A", "1-2 answer 1 {}"),
        ("SSUBSCRIBE", "local2:journal:1-1:A"),
        ("PSUBSCRIBE", "*"),
        ("SET", "elsewhere", "1"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_web_side_has_no_way_to_what_is_not_its_own(web: redis.Redis, command: tuple[str, ...]) -> None:
    assert refused(web, *command)


def test_a_script_gives_the_web_side_no_way_around(core: redis.Redis, web: redis.Redis) -> None:
    assert refused(web, "SCRIPT", "LOAD", "return 1")
    sha = core.script_load("return redis.call('HGETALL', 'local2:keys')")
    with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL|can't (access|run)"):
        web.evalsha(sha, 0)
    with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL|can't (access|run)"):
        core.evalsha(core.script_load("return redis.call('FLUSHALL')"), 0)


def test_the_core_user_has_this_products_keys_only(core: redis.Redis) -> None:
    assert refused(core, "SET", "elsewhere", "1")
    assert refused(core, "PUBLISH", "anything", "x")
    assert refused(core, "SPUBLISH", "anything", "x")
    assert refused(core, "SSUBSCRIBE", "anything")
    assert refused(core, "PSUBSCRIBE", "local2:journal:*")


async def test_a_participant_that_comes_as_another_user_ends_with_a_sentence(users: AclRedis, tmp_path: Path) -> None:
    settings = GeneratorSettings(redis_url=users.web_search, data_dir=tmp_path)
    with pytest.raises(SettingsError, match=r"Redis refuses what generator needs \(NOPERM .*LOCAL2_REDIS_URL"):
        # the core's connection brings the scripts of the bus
        async with asyncio.timeout(20), Bus(users.core, "test/1"), open_context("generator", settings):
            pass


async def test_a_gateway_whose_password_was_changed_says_so_until_it_is_right_again(tmp_path: Path) -> None:
    with acl_redis(tmp_path / "redis", admin=True) as users, redis.Redis.from_url(users.admin) as admin:
        async with serving(gateway_settings(users.core, tmp_path, bus_wait=0.5)) as site:
            for password, told in (
                ("another1", "does not let this gateway in (WRONGPASS"),
                (PASSWORDS["LOCAL2_REDIS_PASSWORD"], ""),
            ):
                admin.execute_command("ACL", "SETUSER", "core", "resetpass", f">{password}")
                admin.execute_command("CLIENT", "KILL", "USER", "core")

                async def says(expected: str = told) -> bool:
                    reply = await site.http.get("/sessions")
                    assert reply.status_code in (200, 503)
                    return expected in reply.json()["error"]["message"] if expected else reply.status_code == 200

                await eventually(says, 20, f"it says {told or 'nothing'}")


async def test_a_gateway_that_was_never_let_in_says_why_from_its_start(users: AclRedis, tmp_path: Path) -> None:
    wrong = users.core.replace(PASSWORDS["LOCAL2_REDIS_PASSWORD"], "another1")
    for url, told in (
        (wrong, "does not let this gateway in (WRONGPASS"),
        ("redis://127.0.0.1:9", "the bus has not answered yet"),
    ):
        async with serving(gateway_settings(url, tmp_path), ready=False) as site:

            async def says(expected: str = told, site: Site = site) -> bool:
                part = (await site.http.get("/ready")).json()["parts"]["bus"]
                return not part["ok"] and expected in part["reason"]

            await eventually(says, 20, f"it says {told}")


def test_nobody_comes_in_without_a_name(users: AclRedis) -> None:
    with redis.Redis.from_url(users.nobody) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()
    wrong = users.web_search.replace("secretOfSearch2", "secretOfCore1")
    with redis.Redis.from_url(wrong) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()


def test_the_passwords_stand_in_no_command_line_and_in_a_private_file(users: AclRedis, core: redis.Redis) -> None:
    pid = core.info("server")["process_id"]
    assert b"secretOf" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert stat.S_IMODE((users.folder / "users.acl").stat().st_mode) == 0o600


def test_tool_workers_with_one_password_are_told_of_and_a_tool_of_ones_own_has_its_user(tmp_path: Path) -> None:
    own = {"LOCAL2_REDIS_WEB_MY_MAPS_PASSWORD": "secretOfMaps4"}
    for more, warned in ((own, False), (own | {"LOCAL2_REDIS_WEB_FETCH_PASSWORD": "secretOfSearch2"}, True)):
        # it ends with the option that it does not know
        told, _ = start(tmp_path, "--no-such-option", "1", **more).communicate(timeout=10)
        assert (b"two of these are the same" in told) is warned
        assert b"secretOf" not in told
        lines = (tmp_path / "users.acl").read_text(encoding="utf-8").splitlines()
        users = {line.split()[1]: line for line in lines if line}
        assert set(users) == {"default", "core", "mcp", "web_fetch", "web_my_maps", "web_search"}
        assert ">secretOfMaps4 " in users["web_my_maps"]
        assert "~local2:tool.request.web_my_maps)" in users["web_my_maps"]
        assert "web_fetch" not in users["web_my_maps"]


@pytest.mark.parametrize("password", ["", "with space", "with@sign", "with>more ~* +@all"])
def test_a_password_that_would_change_the_rules_is_refused(tmp_path: Path, password: str) -> None:
    server: subprocess.Popen[bytes] = start(tmp_path, "--port", "0", LOCAL2_REDIS_WEB_FETCH_PASSWORD=password)
    told, _ = server.communicate(timeout=10)
    assert server.returncode == 1
    assert b"LOCAL2_REDIS_WEB_FETCH_PASSWORD must be made of letters and digits" in told
