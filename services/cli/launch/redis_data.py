"""The data folder of an embedded Redis: which server wrote it, and whether it is damaged.

The server itself starts empty, without an error, if its append-only files are missing or cut off. So this module notes
their sizes and compares them before each start. Files that the server cannot read are detected by its own error.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from services.cli.launch.redis_servers import EmbeddedRedisError, Version
from services.cli.words import typed
from shared.participant.store_marker import remove_marker, set_aside, was_created

FOLDER = "appendonlydir"
# The server that wrote the folder, and the sizes of its files.
_RECORD = "redis.json"
_MANIFEST = "appendonly.aof.manifest"
# The version of the server in the head of a base file.
_WROTE = re.compile(rb"\xfa.(valkey|redis)-ver.([0-9.]+)", re.DOTALL)
_HEAD = 256
# Subjects of the server's last log lines when it cannot read its files.
_UNREADABLE = re.compile(
    r"append.?only|\bAOF\b|\bRDB\b|manifest|short read|loading the DB|check-aof|check-rdb|wrong signature",
    re.IGNORECASE,
)


class DataDamaged(EmbeddedRedisError):
    """The data cannot be read, or are not what they were; nothing was changed."""

    def __init__(self, data_dir: Path, what: str) -> None:
        super().__init__(
            f"the data of the bus in {data_dir} are damaged: {what}. Nothing was changed. "
            f"`{typed('doctor', '--repair')}` puts them aside; then start the stack and restore a backup: "
            f"`{typed('restore')} FILE`"
        )
        self.what = what


def remember(data_dir: Path, version: Version | None) -> None:
    """Note which server writes the folder, and the sizes of its files, which only grow. Raises OSError."""
    sizes = {path.name: path.stat().st_size for path in (data_dir / FOLDER).glob("*.*.*.*")}
    server = {} if version is None else {"server": version.family, "version": ".".join(map(str, version.number))}
    fresh = data_dir / f"{_RECORD}.new"
    fresh.write_text(json.dumps({**server, "files": sizes}), encoding="utf-8")
    fresh.replace(data_dir / _RECORD)


def writer_of(data_dir: Path) -> Version | None:
    """Return the server that wrote the folder, by the note or by its newest base file; None if both are missing."""
    record = _record(data_dir)
    if (noted := Version.of(str(record.get("server")), str(record.get("version")))) is not None:
        return noted
    for path in sorted((data_dir / FOLDER).glob("*.base.*"), key=_modified, reverse=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if found := _WROTE.search(file.read(_HEAD)):
                return Version.of(found[1].decode().capitalize(), found[2].decode())
    return None


def check(data_dir: Path) -> None:
    """Compare the folder with the note, before a server is started on it. Raises DataDamaged."""
    folder, sizes = data_dir / FOLDER, _record(data_dir).get("files")
    noted: dict[str, Any] = sizes if isinstance(sizes, dict) else {}
    if not (folder / _MANIFEST).exists():
        # Without a manifest the server starts empty. An interrupted first start leaves no increments.
        lost = noted or was_created(data_dir) or any(path.stat().st_size for path in folder.glob("*.incr.aof"))
        if lost:
            gone = (
                "is gone" if not folder.exists() else "has lost its manifest" if any(folder.iterdir()) else "is empty"
            )
            raise DataDamaged(data_dir, f"{FOLDER} {gone}")
        return
    for name, least in noted.items():
        path = folder / name
        # The server removes files that a rewrite replaced; it reports a missing file of its manifest.
        if isinstance(least, int) and path.exists() and (size := path.stat().st_size) < least:
            raise DataDamaged(data_dir, f"{name} has {size} bytes of {least}")


def unreadable(log: list[str]) -> str | None:
    """Return what a server that ended at its start logged about its files, without its advice; None if nothing."""
    said = [line.partition(" # ")[2] or line for line in log if _UNREADABLE.search(line)]
    return said[-1].partition(": make a backup")[0].strip() if said else None


def put_aside(data_dir: Path) -> Path | None:
    """Rename the damaged files, so that the bus starts empty; return their new place. Raises OSError."""
    aside = set_aside(data_dir / FOLDER)
    (data_dir / _RECORD).unlink(missing_ok=True)
    remove_marker(data_dir)
    return aside


def _record(data_dir: Path) -> dict[str, Any]:
    try:
        read = json.loads((data_dir / _RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _modified(path: Path) -> float:
    return path.stat().st_mtime
