"""What is on disk must be there again: a store that has vanished, or is no store any more, is damage and no new start.

A store is noted beside itself (`NAME.made`) once it is there. Programs that find one missing say so; only a repair,
which somebody asks for, puts the rest aside and lets it begin anew.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

_FILLED = "filled\n"


def note(store: Path) -> None:
    """The store is there now. Raises OSError."""
    marker = _marker(store)
    if not marker.exists():
        marker.touch(mode=0o600)


def noted(store: Path) -> bool:
    """Whether it has been there."""
    return _marker(store).exists()


def note_filled(store: Path) -> None:
    """There is something in it from now on. Raises OSError."""
    if not noted_filled(store):
        _marker(store).write_text(_FILLED)


def noted_filled(store: Path) -> bool:
    """Whether there has been something in it: to find nothing there is a loss."""
    return noted(store) and _marker(store).read_text() == _FILLED


def forget(store: Path) -> None:
    """It may begin anew."""
    _marker(store).unlink(missing_ok=True)


def _marker(store: Path) -> Path:
    return store.with_name(f"{store.name}.made")


def sqlite_missing(path: Path) -> str | None:
    """What is wrong with a database that should be there, at one look; None when there is something in it."""
    if not path.exists():
        return f"{path.name} is gone"
    return None if path.stat().st_size else f"{path.name} is empty"


def sqlite_trouble(path: Path) -> str | None:
    """The same after reading all of it; one that is in use just now counts as whole."""
    if (what := sqlite_missing(path)) is not None:
        return what
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=1.0)) as db:
            said = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as exc:
        # locked, or not to be read by this user: that says nothing of what is in it
        return f"{path.name}: {exc}" if "malformed" in str(exc) else None
    except sqlite3.DatabaseError as exc:
        return f"{path.name}: {exc}"
    return None if said == "ok" else f"{path.name}: {said.splitlines()[0]}"


def sqlite_damage(exc: BaseException) -> bool:
    """Whether an error says that the file itself is broken; any other one passes, or is a bug."""
    return type(exc) is sqlite3.DatabaseError


def set_aside(path: Path) -> Path | None:
    """Renames what is there to a name that says so; None when nothing is. Raises OSError."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (path.with_name(f"{path.name}.broken-{stamp}{again}") for again in ("", *(f"-{n}" for n in range(2, 100))))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside
