"""A server with the users of the containers' Redis: started by the same script, from the same files."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
from support.guard import mark
from support.http_stack import until

from services.cli.launch.redis_servers import server_binary

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "redis"
PASSWORDS = {
    "LOCAL2_REDIS_PASSWORD": "secretOfCore1",
    "LOCAL2_REDIS_WEB_SEARCH_PASSWORD": "secretOfSearch2",
    "LOCAL2_REDIS_WEB_FETCH_PASSWORD": "secretOfFetch3",
    "LOCAL2_REDIS_MCP_PASSWORD": "secretOfMcp4",
}


@dataclass(frozen=True)
class AclRedis:
    """`core`, `web_search`, `web_fetch` and `mcp` are the URLs of the users of participants, `nobody` names no user."""

    core: str
    web_search: str
    web_fetch: str
    mcp: str
    nobody: str
    folder: Path
    port: int
    admin: str = ""

    def of(self, tool: str) -> str:
        """The URL of a tool worker's user."""
        return {"web_search": self.web_search, "web_fetch": self.web_fetch}[tool]


def start(folder: Path, *arguments: str, users: str = "", **environment: str) -> subprocess.Popen[bytes]:
    """The script that the container runs, with the server of the tests in place of the image's.

    users: further lines for its file of users.
    """
    commands = folder / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    server = commands / "redis-server"
    server.unlink(missing_ok=True)
    # how the script calls it: its settings, --aclfile, the file of users, more
    server.write_text(
        f"#!/bin/sh\nprintf '%s\\n' '{users}' >>\"$3\"\nexec {server_binary()} \"$@\" --set-proc-title no\n"
    )
    server.chmod(0o755)
    return subprocess.Popen(
        ["/bin/sh", str(DEPLOY / "start.sh"), "--dir", str(folder), *arguments],
        env={"PATH": f"{commands}:{os.environ['PATH']}", "TMPDIR": str(folder), **PASSWORDS, **mark(), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
    )


@contextlib.contextmanager
def acl_redis(folder: Path, *, admin: bool = False, arguments: Sequence[str] = ()) -> Iterator[AclRedis]:
    """admin: with a further user who may do everything. arguments: further ones of the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"127.0.0.1:{port}/0"
    users = "user admin on nopass allkeys allchannels +@all" if admin else ""
    server = start(folder, "--bind", "127.0.0.1", "--port", str(port), *arguments, users=users)
    urls = AclRedis(
        core=f"redis://core:{PASSWORDS['LOCAL2_REDIS_PASSWORD']}@{place}",
        web_search=f"redis://web_search:{PASSWORDS['LOCAL2_REDIS_WEB_SEARCH_PASSWORD']}@{place}",
        web_fetch=f"redis://web_fetch:{PASSWORDS['LOCAL2_REDIS_WEB_FETCH_PASSWORD']}@{place}",
        mcp=f"redis://mcp:{PASSWORDS['LOCAL2_REDIS_MCP_PASSWORD']}@{place}",
        nobody=f"redis://{place}",
        folder=folder,
        port=port,
        admin=f"redis://admin:x@{place}" if admin else "",
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
