"""What participants wrote is there again after the server with its users was started anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import redis
from support.acl_redis import PASSWORDS, start
from support.http_stack import until


@contextlib.contextmanager
def served(folder: Path) -> Iterator[redis.Redis]:
    """The server over a unix socket, with what the folder holds; stopped in good order at the end."""
    path = folder / "bus.sock"
    server = start(folder, "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700")
    client = redis.Redis(unix_socket_path=str(path), username="core", password=PASSWORDS["LOCAL2_REDIS_PASSWORD"])

    def answers() -> bool:
        assert server.poll() is None, server.communicate()[0].decode()
        with contextlib.suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    try:
        until(answers, 10, "the server answers")
        yield client
    finally:
        client.close()
        server.terminate()
        server.communicate(timeout=10)


def write_by_script(client: redis.Redis) -> None:
    sha = client.script_load("redis.call('SET', KEYS[1], '1') return redis.call('SET', KEYS[2], '1')")
    client.evalsha(sha, 2, "local2:{x}:one", "local2:{x}:two")


def test_a_restart_loses_nothing_that_a_script_wrote(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        write_by_script(client)
    with served(tmp_path) as client:
        assert client.mget("local2:{x}:one", "local2:{x}:two") == [b"1", b"1"]


def test_the_server_itself_may_do_again_what_its_file_says_and_nobody_else_can_be_that_user(tmp_path: Path) -> None:
    # Redis (not every Valkey) reads its file as the default user; without rights it drops the writes of scripts
    with served(tmp_path):
        users = (tmp_path / "users.acl").read_text(encoding="utf-8").splitlines()
    (rules,) = (line.split()[2:] for line in users if line.startswith("user default "))
    assert {"off", "resetpass", "allkeys", "+@all"} <= set(rules)
    assert not {"on", "nopass"} & set(rules)
    assert not any(rule.startswith((">", "#", "-")) for rule in rules)
