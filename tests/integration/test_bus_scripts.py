"""Scripts: loaded by those who may, waited for by the others, and ended when they do not end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.cluster import Cluster
from support.http_gateway import gateway_settings, serving
from support.services import announced, running
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus, Script
from shared.bus.scripts import RENEW_CLAIMS
from shared.contracts import DEAD_LETTER
from shared.participant import health
from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient

ENDLESS = "while true do end"
CALLER = Caller("1-1")


def set_up(server: EmbeddedRedis) -> None:
    """Makes `worker`, a user who may load no script and end none; and a script is too long after 0.1 s."""
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("busy-reply-threshold", 100)
        admin.execute_command(
            "ACL", "SETUSER", "worker", "on", "nopass", "~*", "&*", "+@all", "-script", "+script|exists"
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis", port=0) as server:
        set_up(server)
        yield server


def as_worker(server: EmbeddedRedis) -> str:
    return server.url.replace("://", "://worker:x@", 1)


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def there(admin: redis.Redis) -> bool:
    return all(admin.script_exists(*Script.known))


async def test_a_worker_that_may_load_no_scripts_waits_for_whoever_may_and_says_so(
    server: EmbeddedRedis, admin: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"data_dir": tmp_path, "heartbeat": 0.2, "drain": 1.0}
    async with running(probe, ProbeSettings(redis_url=as_worker(server), effects_url=server.url, **common)) as worker:
        said = ""

        def waiting() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "this user of Redis may not load them" in said

        await eventually(waiting, what="it says that it waits")
        assert not worker.done()
        assert not admin.exists("local2:replicas")
        async with open_context("asker", ProbeSettings(redis_url=server.url, **common)) as context:
            await announced(server.url, "probe")
            answer = await ToolClient(context).call("probe", {"text": "x"}, call_id="c", caller=CALLER, timeout=9)
    assert answer.result == "you said x"
    assert there(admin)


@pytest.mark.parametrize("lost", ["flushed", "restarted"])
async def test_lost_scripts_are_there_again_within_a_heartbeat_and_nothing_fails_meanwhile(
    server: EmbeddedRedis, tmp_path: Path, lost: str
) -> None:
    common: dict[str, Any] = {"data_dir": tmp_path, "heartbeat": 0.2, "drain": 1.0}
    with redis.Redis.from_url(server.url) as admin:
        worker = ProbeSettings(redis_url=as_worker(server), effects_url=server.url, **common)
        # nobody but the one who asks may load them, and he uses none himself
        async with (
            open_context("asker", ProbeSettings(redis_url=server.url, **common)) as context,
            running(probe, worker),
        ):
            await announced(server.url, "probe")
            client = ToolClient(context)
            asked = [
                asyncio.create_task(
                    client.call("probe", {"text": f"t{n}", "seconds": n / 4}, call_id=f"c{n}", caller=CALLER,
                                timeout=30)
                )
                for n in range(8)
            ]  # fmt: skip
            await eventually(lambda: admin.hlen("effects") == 8)
            if lost == "flushed":
                admin.script_flush()
            else:
                server.kill()
                server.start()
                set_up(server)
            await eventually(lambda: there(admin), 15, "they are there again")
            assert {answer.error for answer in await asyncio.gather(*asked)} == {None}
        assert admin.xlen(DEAD_LETTER.stream) == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def test_whoever_may_load_scripts_knows_those_of_every_tool_worker() -> None:
    def known(module: str) -> set[str]:
        code = f"import json, {module}; from shared.bus import Script; print(json.dumps(list(Script.known)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(json.loads(done.stdout))

    everybodys = known("shared.bus")
    assert RENEW_CLAIMS.sha in everybodys
    for worker in ("web_search", "web_fetch"):
        assert known(f"services.{worker}.service") == everybodys


# ── scripts that do not end ──────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def keeping_busy(server: EmbeddedRedis, script: str = ENDLESS) -> Iterator[Callable[[], str]]:
    """Until the block ends, or somebody ends the script; gives what came of it, empty while it runs."""
    told: list[str] = []

    def run() -> None:
        with redis.Redis.from_url(server.url, socket_timeout=60) as client:
            try:
                client.eval(script, 1, "x")
            except redis.exceptions.RedisError as exc:
                told.append(str(exc))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: "".join(told)
    finally:
        with contextlib.suppress(redis.exceptions.RedisError), redis.Redis.from_url(server.url) as client:
            client.execute_command("SCRIPT", "KILL")
        thread.join(30)


async def test_an_endless_script_is_ended_and_everybody_goes_on(
    server: EmbeddedRedis, admin: redis.Redis, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"data_dir": tmp_path, "heartbeat": 0.2, "drain": 1.0}
    worker = ProbeSettings(redis_url=as_worker(server), effects_url=server.url, **common)
    async with open_context("asker", ProbeSettings(redis_url=server.url, **common)) as context, running(probe, worker):
        await announced(server.url, "probe")
        client = ToolClient(context)
        with keeping_busy(server) as told:
            await eventually(told, 20, "it is ended")
            assert "killed by user" in told().lower()
            await announced(server.url, "probe")
            answer = await client.call("probe", {"text": "x"}, call_id="c", caller=CALLER, timeout=9)
    assert answer.result == "you said x"
    assert admin.xlen(DEAD_LETTER.stream) == 0


async def test_what_nobody_may_end_is_seen_by_health_checks_and_readiness(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bus(server.url, "test/1") as bus:
        # what is needed to connect; from here on nobody is there who may end a script
        await bus.link.call("PING")
    monkeypatch.setenv("LOCAL2_REDIS_URL", as_worker(server))
    async with serving(gateway_settings(as_worker(server), tmp_path, bus_wait=1.0)) as site:
        assert (await site.http.get("/ready?for=gateway")).status_code == 200
        with keeping_busy(server) as told:

            async def seen() -> str:
                bus = (await site.http.get("/ready")).json()["parts"]["bus"]
                return "" if bus["ok"] else str(bus["reason"])

            await eventually(lambda: _says(seen, "kept busy by a script"), 20, "readiness says so")
            assert (await site.http.get("/ready?for=gateway")).status_code == 503
            busy = "Redis is kept busy by a script"
            # the standard library's way, and that of every other kind of bus
            assert health.quick("probe", alive=False) == (False, busy)
            assert health.quick("probe", alive=True) == (True, busy)
            assert await health.check("probe", as_worker(server), patience=2) == (False, busy)
            assert not told()


async def _says(seen: Callable[[], Any], text: str) -> bool:
    return text in await seen()


async def test_a_script_that_has_written_cannot_be_ended_and_that_is_said(
    server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    with keeping_busy(server, f"redis.call('SET', KEYS[1], '1') {ENDLESS}"):
        try:
            async with Bus(server.url, "test/1") as bus, asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(_ask_for_ever(bus))
                said = ""

                def heard() -> bool:
                    nonlocal said
                    said += capsys.readouterr().err
                    return "bus.script_cannot_be_ended" in said

                await eventually(heard, 20, "it is said")
                asking.cancel()
        finally:
            server.kill()


async def _ask_for_ever(bus: Bus) -> None:
    while True:
        await bus.link.call("PING")
        await asyncio.sleep(0.05)
