"""What reward keeps how long: answers that nobody compared or rated, and everything else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from services.reward.manage import Access
from services.reward.store import FIRST, Store
from shared.participant.retention import Census, Kind


def kinds(access: Access) -> list[Kind]:
    async def unused(before: int) -> Census:
        return Census(*await access.with_store(partial(Store.unused, before=before)))

    async def everything(before: int) -> Census:
        return Census(*await access.with_store(partial(Store.census, before=before)))

    return [
        Kind("answers", "keep_days", unused, partial(_prune, access)),
        Kind("preferences", "keep_days_preferences", everything, partial(_expire, access)),
    ]


async def _prune(access: Access, before: int) -> AsyncGenerator[int, None]:
    place = FIRST
    try:
        while True:
            removed, after = await access.with_store(partial(Store.prune, before=before, after=place))
            yield removed
            if after is None:
                return
            place = after
    finally:
        await access.with_store(Store.overwrite)


async def _expire(access: Access, before: int) -> AsyncGenerator[int, None]:
    try:
        while removed := await access.with_store(partial(Store.expire, before=before)):
            yield removed
    finally:
        await access.with_store(Store.overwrite)
