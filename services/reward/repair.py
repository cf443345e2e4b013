"""Saves what can be read of a broken database of preferences: `python -m services.reward.repair`.

It prints what it did, a sentence a line; nothing when the database is whole. `local2 doctor --repair` runs it.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from services.reward.database import TABLES, key_of
from services.reward.settings import RewardSettings
from services.reward.store import Store
from shared.errors import Local2Error
from shared.participant.file_lock import FileLock
from shared.participant.store_marker import remove_marker, set_aside, sqlite_missing, sqlite_trouble, was_created


def repair(path: Path) -> list[str]:
    """Sentences that say what was done. Raises Local2Error when the database is in use."""
    if sqlite_missing(path) is not None and not was_created(path):
        return []
    if (what := sqlite_trouble(path)) is None:
        return []
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        if not lock.take():
            raise Local2Error(f"{path} is in use by another process ({lock.text or 'unknown'}): stop it first")
        rows = {table: readable(path, table) for table in TABLES} if path.exists() else {}
        # what belongs to it must not meet the new one
        aside = [set_aside(path.with_name(path.name + end)) for end in ("", "-wal", "-shm")]
        remove_marker(path)
    finally:
        lock.close()
    store = Store(path)
    try:
        counts = {table: store.load(table, rows.get(table, []), replace=True) for table in TABLES}
    finally:
        store.close()
    kept = ", ".join(f"{count} {table}" for table, count in counts.items() if count)
    return [
        f"the database of preferences was damaged ({what})",
        *[f"{path} was put aside as {one}" for one in aside[:1] if one],
        f"saved: {kept}; what is not among them is lost" if kept else "nothing could be read: it begins anew",
    ]


def readable(path: Path, table: str) -> list[dict[str, Any]]:
    """The rows of a table from both ends, each as far as the file can be read."""
    found: dict[str, dict[str, Any]] = {}
    for direction in ("ASC", "DESC"):
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as db,
        ):
            db.row_factory = sqlite3.Row
            for row in db.execute(f"SELECT * FROM {table} ORDER BY rowid {direction}"):
                found[key_of(table, dict(row))] = dict(row)
            break
    return [row for row in found.values() if all(isinstance(name, str) for name in row)]


def main() -> int:
    try:
        for said in repair(RewardSettings.load("reward").path):
            print(said, flush=True)
    except (Local2Error, OSError, sqlite3.Error) as exc:
        print(f"the database of preferences could not be repaired: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
