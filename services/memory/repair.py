"""Find damage of an embedded store and put the store aside: `python -m services.memory.repair`.

It reads every record through Chroma's client, and changes nothing of a store that is whole. It prints what it did, one
sentence a line. `local2 doctor --repair` runs it. A backup brings the memories back.
"""

from __future__ import annotations

import asyncio
import sys

from services.memory.chroma import VectorMissing
from services.memory.settings import MemorySettings
from services.memory.store import StoreDamaged, open_store
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
    if (trouble := await _trouble(settings)) is None:
        return []
    aside = [(path, set_aside(path)) for path in (folder, settings.words)]
    remove_marker(folder)
    return [
        f"the memory's store is damaged ({trouble})",
        *(f"{path} was put aside as {new}" for path, new in aside if new),
    ]


async def _trouble(settings: MemorySettings) -> str | None:
    """Return why not everything can be read, vectors too."""
    try:
        async with open_store(settings) as store:
            for user_id in await store.users():
                async for _ in store.of_user(user_id):
                    pass
    except (StoreDamaged, VectorMissing) as exc:
        return str(exc.__cause__ or exc)
    return None


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
