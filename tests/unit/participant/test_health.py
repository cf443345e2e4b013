"""The health check of a worker's container."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.acl_redis import acl_redis

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.envelope import now_ms
from shared.participant import health, health_quick
from shared.participant.registry import ReplicaInfo, announcing
from shared.telemetry.logging import configure


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """`main` sets logging up."""
    yield
    configure("warning", "json")


def replica(state: str = "ready", participant: str = "web_fetch", host: str | None = None) -> ReplicaInfo:
    name = f"{host or socket.gethostname()}-17-abcdef"
    return ReplicaInfo(participant=participant, replica=name, state=state, started=1, seen=now_ms())


@pytest.mark.parametrize(("state", "healthy"), [("ready", True), ("draining", True), ("starting", False)])
def test_a_replica_is_healthy_when_it_serves_or_leaves_in_good_order(state: str, healthy: bool) -> None:
    assert health.verdict([replica(state, host="box")], "web_fetch", "box")[0] is healthy


@pytest.mark.parametrize("other", [replica(participant="web_search", host="box"), replica(host="box2"), None])
def test_another_participant_or_another_host_does_not_make_this_one_healthy(other: ReplicaInfo | None) -> None:
    assert not health.verdict([other] if other else [], "web_fetch", "box")[0]


def test_one_serving_replica_is_enough_when_an_older_one_is_still_starting() -> None:
    assert health.verdict([replica("ready", host="box"), replica("starting", host="box")], "web_fetch", "box")[0]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


async def test_what_a_replica_announced_is_read_from_the_bus(redis: EmbeddedRedis) -> None:
    assert not (await health.check("web_fetch", redis.url))[0]
    async with Bus(redis.url, "test") as bus:
        await bus.link.pipe(announcing(replica(), 10_000))
    assert (await health.check("web_fetch", redis.url))[0]


async def test_a_replica_whose_heartbeat_stopped_is_not_healthy(redis: EmbeddedRedis) -> None:
    async with Bus(redis.url, "test") as bus:
        await bus.link.pipe(announcing(replica(), 1))
        while await bus.link.call("KEYS", "local2:replica:*"):
            pass
    assert not (await health.check("web_fetch", redis.url))[0]


async def test_without_redis_the_answer_is_no_and_comes_in_time(tmp_path: Path) -> None:
    healthy, sentence = await health.check("web_fetch", f"unix://{tmp_path / 'absent.sock'}", patience=0.3)
    assert not healthy
    assert sentence == "Redis does not answer"


async def test_without_redis_a_replica_counts_as_alive_because_a_restart_would_not_help(tmp_path: Path) -> None:
    absent = f"unix://{tmp_path / 'absent.sock'}"
    assert await health.check("web_fetch", absent, patience=0.3, alive=True) == (True, "Redis does not answer")


def test_a_replica_that_redis_does_not_know_is_not_alive(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL2_REDIS_URL", redis.url)
    assert health.main(["--alive", "web_fetch"]) == 1
    assert "no replica of web_fetch" in capsys.readouterr().out


def test_the_command_takes_one_participant(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_exit_status_says_the_verdict(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL2_REDIS_URL", redis.url)
    assert health.main(["web_fetch"]) == 1
    assert "no replica of web_fetch" in capsys.readouterr().out


# ── the short way ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["ready", "starting"])
async def test_the_short_way_gives_the_verdict_of_the_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    with acl_redis(tmp_path) as users:
        monkeypatch.setenv("LOCAL2_REDIS_URL", users.web_fetch)
        async with Bus(users.core, "test") as bus:
            # the scripts are there from here on
            await bus.link.call("PING")
        assert health.quick("web_fetch", alive=False) == await health.check("web_fetch", users.web_fetch)
        async with Bus(users.web_fetch, "test") as bus:
            await bus.link.pipe(announcing(replica(state), 10_000))
        assert health.quick("web_fetch", alive=False) == await health.check("web_fetch", users.web_fetch)
        assert health.quick("web_fetch", alive=False) == (
            state == "ready", f"web_fetch/{replica().replica} is {state}, 0 in flight",
        )  # fmt: skip
        monkeypatch.setenv("LOCAL2_REDIS_URL", users.nobody)
        assert health.quick("web_fetch", alive=False) is None


def test_without_redis_the_short_way_says_so_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("LOCAL2_REDIS_URL", f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        assert health.quick("web_fetch", alive=False, patience=0.2) == (False, "Redis does not answer")
        assert health.quick("web_fetch", alive=True, patience=0.2) == (True, "Redis does not answer")


@pytest.mark.parametrize(
    "url", ["rediss://box/0", "unix:///tmp/x.sock", "redis://a:1,b:2/0", "redis://box/0?ssl=true", "redis://box/zero"]
)
def test_what_is_no_plain_redis_is_left_to_the_long_way(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("LOCAL2_REDIS_URL", url)
    assert health.quick("web_fetch", alive=False) is None


def test_a_participants_own_url_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_REDIS_URL", "redis://box/0")
    monkeypatch.setenv("LOCAL2_RESPONDENT_B_REDIS_URL", "redis://other/0")
    assert health_quick.url_of("respondent-b") == "redis://other/0"


def test_the_short_way_imports_neither_the_bus_nor_the_settings() -> None:
    heavy = "[m for m in sys.modules if m.split('.')[0] in ('redis', 'pydantic')]"
    code = f"import sys, shared.participant.health; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
