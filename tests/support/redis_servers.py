"""Redis servers that tests kill and start again."""

from __future__ import annotations

from pathlib import Path

from services.cli.launch.embedded_redis import EmbeddedRedis

# A killed process keeps what it has written, and nobody cuts the power here. `everysec` holds writes back while a sync
# is running, so that a kill loses them; with `always` a busy disk keeps everybody waiting for seconds.
UNSYNCED = {"appendfsync": "no"}


def unsynced(folder: Path) -> EmbeddedRedis:
    """A server that loses nothing by a kill, and never waits for the disk."""
    return EmbeddedRedis(folder, extra=UNSYNCED)
