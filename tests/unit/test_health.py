"""The health check of a worker's container."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from services.cli.embedded_redis import EmbeddedRedis
from shared import health
from shared.bus import Bus
from shared.envelope import now_ms
from shared.registry import ReplicaInfo, announcing


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """`main` sets logging up to a stream that is closed after the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


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
