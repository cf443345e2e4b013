"""Redis servers that tests kill and start again."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from services.cli.launch.embedded_redis import EmbeddedRedis

# A killed process keeps what it has written, and nobody cuts the power here. `everysec` holds writes back while a sync
# is running, so that a kill loses them; with `always` a busy disk keeps everybody waiting for seconds.
UNSYNCED = {"appendfsync": "no"}


def unsynced(folder: Path) -> EmbeddedRedis:
    """A server that loses nothing by a kill, and never waits for the disk."""
    return EmbeddedRedis(folder, extra=UNSYNCED)


@contextlib.contextmanager
def kept_busy(url: str) -> Iterator[None]:
    """By a script that never ends, and has written: nobody may end it, and no signal but SIGKILL is heard."""
    path = unquote(url.removeprefix("unix://").partition("?")[0])
    with contextlib.ExitStack() as opened:
        keeping, asking = (opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        for each in (keeping, asking):
            each.connect(path)
        keeping.sendall(b"EVAL \"redis.call('SET', KEYS[1], '1') while true do end\" 1 key\r\n")
        asking.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            answer = b"+"
            while answer.startswith(b"+"):
                asking.sendall(b"PING\r\n")
                answer = asking.recv(100)
        yield
