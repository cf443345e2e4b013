"""A server with the users of the containers' Redis: started by the same script, from the same files."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from support.http_stack import until

from services.cli.launch.embedded_redis import server_binary

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "redis"
PASSWORDS = {"LOCAL2_REDIS_PASSWORD": "secretOfCore1", "LOCAL2_REDIS_WEB_PASSWORD": "secretOfWeb2"}


@dataclass(frozen=True)
class AclRedis:
    """`core` and `web` are the URLs of the two kinds of participants, `nobody` names no user."""

    core: str
    web: str
    nobody: str
    folder: Path


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """The script that the container runs, with the server of the tests in place of the image's."""
    commands = folder / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    (commands / "redis-server").unlink(missing_ok=True)
    (commands / "redis-server").symlink_to(server_binary())
    return subprocess.Popen(
        ["/bin/sh", str(DEPLOY / "start.sh"), "--dir", str(folder), *arguments],
        env={"PATH": f"{commands}:{os.environ['PATH']}", "TMPDIR": str(folder), **PASSWORDS, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
    )


@contextlib.contextmanager
def acl_redis(folder: Path) -> Iterator[AclRedis]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"127.0.0.1:{port}/0"
    server = start(folder, "--bind", "127.0.0.1", "--port", str(port))
    urls = AclRedis(
        core=f"redis://core:{PASSWORDS['LOCAL2_REDIS_PASSWORD']}@{place}",
        web=f"redis://web:{PASSWORDS['LOCAL2_REDIS_WEB_PASSWORD']}@{place}",
        nobody=f"redis://{place}",
        folder=folder,
    )
    try:
        with redis.Redis.from_url(urls.core) as client:
            until(lambda: _answers(client, server), 10, "the server answers")
        yield urls
    finally:
        server.terminate()
        server.communicate(timeout=10)


def _answers(client: redis.Redis, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, server.communicate()[0].decode()
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False
