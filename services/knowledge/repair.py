"""Puts a graph aside that cannot be opened any more, and keeps what can be read of it where its log alone is damaged:
`python -m services.knowledge.repair`.

It prints what it did, a sentence a line; nothing when the graph is whole. `local2 doctor --repair` runs it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from services.knowledge.graph import GraphUnavailable
from services.knowledge.ladybug import GraphLocked, open_ladybug
from services.knowledge.settings import EMBEDDED, KnowledgeSettings
from services.knowledge.store import TABLES, Store
from shared.errors import Local2Error, SettingsError
from shared.participant.store_marker import remove_marker, set_aside, was_created

# What a graph consists of: the ends of its files' names.
_PARTS = ("", ".wal", ".shadow")


def repair(path: Path, buffer_bytes: int) -> list[str]:
    """Sentences that say what was done. Raises Local2Error when the graph is in use."""
    if not path.exists() and not was_created(path):
        return []
    try:
        asyncio.run(_opens(path, buffer_bytes))
    except GraphLocked:
        raise
    except (SettingsError, GraphUnavailable):
        saved = _saved(path, buffer_bytes)
        # what belongs to it must not meet the new one
        aside = [set_aside(path.with_name(path.name + end)) for end in _PARTS]
        if saved is None:
            remove_marker(path)
        else:
            for end in _PARTS:
                if (part := saved.with_name(saved.name + end)).exists():
                    part.rename(path.with_name(path.name + end))
        return [
            "the graph of knowledge was damaged or gone",
            *[f"{path} was put aside as {one}" for one in aside[:1] if one],
            "it begins anew; a backup brings back what was known"
            if saved is None
            else "its log was read up to the damage; a backup brings back what came later",
        ]
    return []


def _saved(path: Path, buffer_bytes: int) -> Path | None:
    """A copy with everything up to where the log is damaged; None when nothing can be read."""
    copy = path.with_name(f"{path.name}.saved")
    _remove(copy)
    try:
        for end in _PARTS:
            if (part := path.with_name(path.name + end)).exists():
                shutil.copyfile(part, copy.with_name(copy.name + end))
        if copy.exists() and asyncio.run(_opens(copy, buffer_bytes, whole=False)):
            return copy
    except (SettingsError, GraphUnavailable):
        pass
    finally:
        remove_marker(copy)
        copy.with_name(f"{copy.name}.lock").unlink(missing_ok=True)
    _remove(copy)
    return None


def _remove(copy: Path) -> None:
    for end in _PARTS:
        copy.with_name(copy.name + end).unlink(missing_ok=True)


async def _opens(path: Path, buffer_bytes: int, *, whole: bool = True) -> bool:
    """Whether there is somebody's knowledge in it. Raises SettingsError, GraphUnavailable."""
    async with open_ladybug(path, TABLES, buffer_bytes, whole=whole) as graph:
        store = Store(graph)
        users = await store.users()
        for user_id in users:
            # of a file that is whole in part all is read
            await store.all(user_id)
            await store.keys(user_id)
        return bool(users)


def main() -> int:
    settings = KnowledgeSettings.load("knowledge")
    if settings.store != EMBEDDED:
        return 0
    try:
        for said in repair(settings.path, settings.store_buffer):
            print(said, flush=True)
    except (Local2Error, OSError) as exc:
        print(f"the graph of knowledge could not be repaired: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
