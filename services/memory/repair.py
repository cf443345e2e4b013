"""Find damage of an embedded store and repair it: `python -m services.memory.repair`.

It reads every record through Chroma's client, and changes nothing of a store that is whole. It rebuilds a damaged
vector index from the keyword index, and puts a store aside that is damaged otherwise: a backup brings the memories
back. It prints what it did, one sentence a line. `local2 doctor --repair` runs it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing

from services.memory.keywords import KeywordIndex
from services.memory.rebuild import CopyMissing, copies
from services.memory.settings import MemorySettings
from services.memory.store import IndexDamaged, Store, StoreDamaged, VectorMissing, open_store
from shared.errors import Local2Error
from shared.participant.store_marker import remove_marker, set_aside, was_created


async def repair(settings: MemorySettings) -> list[str]:
    """Return sentences that say what was done.

    Raises StoreLocked while a memory uses the folder, StoreUnavailable when the store can be neither read nor found
    damaged, and OSError.
    """
    folder = settings.folder
    if settings.chroma_url or not (folder.exists() or was_created(folder)):
        return []
    try:
        async with open_store(settings) as store:
            return [
                line for user_id in sorted(await store.users()) for line in await _rebuilt(store, settings, user_id)
            ]
    except (StoreDamaged, CopyMissing) as exc:
        trouble = str(exc.__cause__ or exc)
    aside = [(path, set_aside(path)) for path in (folder, settings.words)]
    remove_marker(folder)
    return [
        f"the memory's store is damaged ({trouble})",
        *(f"{path} was put aside as {new}" for path, new in aside if new),
    ]


async def _rebuilt(store: Store, settings: MemorySettings, user_id: str) -> list[str]:
    """Read everything of a user, vectors too, and rebuild a damaged index. Raises StoreDamaged, CopyMissing."""
    try:
        async for _ in store.of_user(user_id):
            pass
    except (IndexDamaged, VectorMissing) as exc:
        with closing(KeywordIndex(settings.words)) as words:
            count = await store.rebuild(user_id, copies(words, user_id))
        return [
            f"the damaged vector index of {count} memories was rebuilt from the keyword index ({exc}); memory makes "
            "their vectors again"
        ]
    return []


def main() -> int:
    try:
        for line in asyncio.run(repair(MemorySettings.load("memory"))):
            print(line, flush=True)
    except (Local2Error, OSError) as exc:
        print(f"the memory's store could not be checked: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
