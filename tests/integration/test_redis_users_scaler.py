"""The user of the containers' Redis that KEDA is: it counts what waits, and sees nothing of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml
from support.acl_redis import DEPLOY, PASSWORDS, start
from support.http_stack import until

from shared.contracts import QUERY_RECEIVED, TOOL_REQUEST

SCALED = DEPLOY.parent / "k8s" / "components" / "keda"
PASSWORD = "secretOfScaler3"


def _started(folder: Path, **environment: str) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start(folder, "--bind", "127.0.0.1", "--port", str(port), **environment)
    try:
        with redis.Redis(port=port, username="core", password=PASSWORDS["LOCAL2_REDIS_PASSWORD"]) as core:
            until(lambda: _answers(core), 10, "the server answers")
            for stream in (QUERY_RECEIVED.stream, TOOL_REQUEST.for_tool("web_fetch").stream, "local2:journal:1-1:A"):
                core.xgroup_create(stream, "generator", "0", mkstream=True)
                core.xadd(stream, {"payload": "a secret"})
        yield port
    finally:
        server.terminate()
        server.communicate(timeout=10)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    yield from _started(tmp_path_factory.mktemp("scaler"), LOCAL2_REDIS_SCALER_PASSWORD=PASSWORD)


@pytest.fixture
def scaler(port: int) -> Iterator[redis.Redis]:
    with redis.Redis(port=port, username="scaler", password=PASSWORD, decode_responses=True) as client:
        yield client


def test_it_can_ask_what_keda_asks_of_every_stream_that_is_scaled(scaler: redis.Redis) -> None:
    streams = {
        trigger["metadata"]["stream"]
        for file in SCALED.glob("*.yaml")
        for trigger in yaml.safe_load(file.read_text(encoding="utf-8")).get("spec", {}).get("triggers", [])
    }
    assert QUERY_RECEIVED.stream in streams
    assert len(streams) >= 3
    assert scaler.ping()
    assert scaler.info("server")["redis_version"]
    for stream in streams & {QUERY_RECEIVED.stream, TOOL_REQUEST.for_tool("web_fetch").stream}:
        assert scaler.xlen(stream) == 1
        assert scaler.xpending(stream, "generator")["pending"] == 0
        assert scaler.xinfo_groups(stream)[0]["lag"] == 1
    for stream in streams:
        assert scaler.xlen(stream) in (0, 1)


@pytest.mark.parametrize(
    "command",
    [
        ("XRANGE", QUERY_RECEIVED.stream, "-", "+"),
        ("XREAD", "STREAMS", QUERY_RECEIVED.stream, "0"),
        ("XINFO", "STREAM", QUERY_RECEIVED.stream, "FULL"),
        ("XREADGROUP", "GROUP", "generator", "x", "STREAMS", QUERY_RECEIVED.stream, ">"),
        ("XADD", QUERY_RECEIVED.stream, "*", "a", "b"),
        ("XDEL", QUERY_RECEIVED.stream, "1-1"),
        ("DEL", QUERY_RECEIVED.stream),
        ("XLEN", "local2:journal:1-1:A"),
        ("XINFO", "GROUPS", "local2:response.generation"),
        ("GET", "local2:settings:generator"),
        ("HGETALL", "local2:keys"),
        ("SCAN", "0"),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("EVAL", "return 1", "0"),
        ("PUBLISH", "x", "y"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_it_sees_no_entry_and_changes_nothing(scaler: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        scaler.execute_command(*command)


def test_without_a_password_there_is_no_such_user(tmp_path: Path) -> None:
    for number in _started(tmp_path):
        with (
            redis.Redis(port=number, username="scaler", password="SCALER_PASSWORD") as client,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            client.ping()


def test_a_password_that_would_change_the_rules_is_refused(tmp_path: Path) -> None:
    server = start(tmp_path, "--port", "0", LOCAL2_REDIS_SCALER_PASSWORD="x +@all")
    told, _ = server.communicate(timeout=10)
    assert server.returncode == 1
    assert b"LOCAL2_REDIS_SCALER_PASSWORD must be made of letters and digits" in told
