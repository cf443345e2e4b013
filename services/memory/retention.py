"""What memory keeps how long: answers, what somebody had remembered, and files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from services.memory.library import Library
from services.memory.writer import Keeper
from shared.participant.retention import Census, Kind

# Engrams that are removed in one go.
_PART = 50


def kinds(keeper: Keeper, library: Library) -> list[Kind]:

    async def counted(before: int) -> Census:
        return await asyncio.to_thread(library.census, before)

    engrams = partial(_engrams, keeper)
    return [
        Kind("engrams", "keep_days_engrams", partial(_known, keeper, False), partial(engrams, False)),
        Kind("notes", "keep_days_notes", partial(_known, keeper, True), partial(engrams, True)),
        Kind("files", "keep_days_files", counted, partial(_files, library)),
    ]


async def _known(keeper: Keeper, asked: bool, before: int) -> Census:
    await keeper.index.ready.wait()
    return Census(*keeper.index.catalog.census(asked=asked, before=before))


async def _engrams(keeper: Keeper, asked: bool, before: int) -> AsyncGenerator[int, None]:
    await keeper.index.ready.wait()
    catalog = keeper.index.catalog
    for user_id in catalog.users():
        while ids := catalog.oldest(user_id, _PART, asked=asked, before=before):
            await keeper.delete(user_id, ids)
            yield len(ids)


async def _files(library: Library, before: int) -> AsyncGenerator[int, None]:
    for user_id in await asyncio.to_thread(library.readable_users):
        for file_id in await asyncio.to_thread(library.older, user_id, before):
            yield int(await asyncio.to_thread(library.remove, user_id, file_id))
