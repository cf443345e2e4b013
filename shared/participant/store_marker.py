"""Markers of stores on disk: a store that was created once and is missing now is damaged, not new.

The marker is a file beside the store (`NAME.made`). Programs report a missing store. Only a repair, which a user
starts, removes the marker, so that the store may be created again.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

_FILLED = "filled\n"


def mark_created(store: Path) -> None:
    """Write the marker of a store that exists now. Raises OSError."""
    marker = _marker(store)
    if not marker.exists():
        marker.touch(mode=0o600)


def was_created(store: Path) -> bool:
    """Return whether the store has a marker."""
    return _marker(store).exists()


def mark_filled(store: Path) -> None:
    """Note in the marker that the store has content. Raises OSError."""
    if not was_filled(store):
        _marker(store).write_text(_FILLED)


def was_filled(store: Path) -> bool:
    """Return whether the store had content at any time: an empty store is then a loss."""
    return was_created(store) and _marker(store).read_text() == _FILLED


def remove_marker(store: Path) -> None:
    """Remove the marker, so that the store may be created again."""
    _marker(store).unlink(missing_ok=True)


def _marker(store: Path) -> Path:
    return store.with_name(f"{store.name}.made")


def sqlite_missing(path: Path) -> str | None:
    """Return what is wrong with a database file, without opening it; None if it has content."""
    if not path.exists():
        return f"{path.name} is gone"
    return None if path.stat().st_size else f"{path.name} is empty"


def sqlite_trouble(path: Path) -> str | None:
    """Return what is wrong with a database after reading all of it; None if nothing is, or if it is in use.

    A database that is marked as filled and has no row has lost its write-ahead log.
    """
    if (what := sqlite_missing(path)) is not None:
        return what
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=1.0)) as db:
            said = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            if said == "ok" and was_filled(path) and not _has_rows(db):
                return f"{path.name} has lost its content"
    except sqlite3.OperationalError as exc:
        # Locked, or unreadable for this user: no evidence of damage.
        return f"{path.name}: {exc}" if "malformed" in str(exc) else None
    except sqlite3.DatabaseError as exc:
        return f"{path.name}: {exc}"
    return None if said == "ok" else f"{path.name}: {said.splitlines()[0]}"


def _has_rows(db: sqlite3.Connection) -> bool:
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    return any(db.execute(f'SELECT 1 FROM "{table}" LIMIT 1').fetchone() for table in tables)


def sqlite_damage(exc: BaseException) -> bool:
    """Return whether an error means that the database file is damaged."""
    return type(exc) is sqlite3.DatabaseError


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder to `NAME.broken-TIME`; return the new path, None if there is none. Raises OSError."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (path.with_name(f"{path.name}.broken-{stamp}{again}") for again in ("", *(f"-{n}" for n in range(2, 100))))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside
