"""Puts a graph aside that cannot be opened any more: `python -m services.knowledge.repair`.

It prints what it did, a sentence a line; nothing when the graph is whole. `local2 doctor --repair` runs it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.knowledge.graph import GraphUnavailable
from services.knowledge.ladybug import GraphLocked, open_ladybug
from services.knowledge.settings import EMBEDDED, KnowledgeSettings
from services.knowledge.store import TABLES, Store
from shared.errors import Local2Error, SettingsError
from shared.participant.kept import forget, noted, set_aside


def repair(path: Path, buffer_bytes: int) -> list[str]:
    """Sentences that say what was done. Raises Local2Error when the graph is in use."""
    if not path.exists() and not noted(path):
        return []
    try:
        asyncio.run(_opens(path, buffer_bytes))
    except GraphLocked:
        raise
    except (SettingsError, GraphUnavailable):
        # what belongs to it must not meet the new one
        aside = [set_aside(path.with_name(path.name + end)) for end in ("", ".wal", ".shadow")]
        forget(path)
        return [
            "the graph of knowledge was damaged or gone",
            *[f"{path} was put aside as {one}" for one in aside[:1] if one],
            "it begins anew; a backup brings back what was known",
        ]
    return []


async def _opens(path: Path, buffer_bytes: int) -> None:
    async with open_ladybug(path, TABLES, buffer_bytes) as graph:
        store = Store(graph)
        for user_id in await store.users():
            # of a file that is whole in part all is read
            await store.all(user_id)
            await store.keys(user_id)


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
