"""A damaged database of preferences is refused with a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.reward.manage import Access
from services.reward.store import Store
from shared.errors import SettingsError, TransientError

ROWS = 400


def vote(number: int) -> dict[str, object]:
    return {
        "response_id": f"{number}-0:A", "query_id": f"{number}-0", "session_id": "s", "user_id": "ann",
        "reward": 1.0, "stars": None, "comment": "good " * 20, "cast_ms": number, "cast_no": 0,
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    database = tmp_path / "preferences.sqlite"
    store = Store(database)
    store.load("votes", [vote(number) for number in range(ROWS)], replace=True)
    store.put("consents", {"user_id": "ann", "given": 1, "time": 1})
    store.close()
    return database


def garble(database: Path, share: float) -> None:
    content = database.read_bytes()
    # in the middle a page with votes, not one of an index, which can be made anew
    start = content.index(b"good good", int(len(content) * share)) if share else 0
    with database.open("r+b") as file:
        file.seek(start // 4096 * 4096)
        file.write(os.urandom(8192 if share else 100))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "header garbled": lambda path: garble(path, 0),
    "middle garbled": lambda path: garble(path, 0.5),
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2 // 4096 * 4096),
    "emptied": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_database_is_refused_unchanged_with_a_remedy(path: Path, damage: str) -> None:
    DAMAGE[damage](path)
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(SettingsError, match=r"database: .*local2 doctor --repair.*local2 restore"):
        Store(path)
    assert (path.read_bytes() if path.exists() else None) == before


def test_empty_file_of_an_interrupted_first_start_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "new.sqlite").touch()
    Store(tmp_path / "new.sqlite").close()


async def test_a_database_that_breaks_while_it_is_used_ends_the_participant(path: Path) -> None:
    store = Store(path)
    access = Access(store)
    garble(path, 0.5)
    with pytest.raises(TransientError, match="damaged"):
        await access.with_store(lambda store: store.rows("SELECT * FROM votes"))
    with pytest.raises(SettingsError, match=r"malformed.*local2 doctor --repair"):
        await access.whole()
    store.close()
