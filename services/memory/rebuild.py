"""Rebuild vector indexes that Chroma cannot read any more.

Chroma refuses every call for a collection whose index is damaged. The keyword index has a copy of each engram. The
copies go to a new collection, without vectors, before the damaged one is removed. `Reembedding` then makes their
vectors. Until then, searches find them by their words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from services.memory.embedding import Embedder
from services.memory.engram import Engram
from services.memory.keywords import KeywordIndex, KeywordIndexDamaged
from services.memory.reembed import LEASE_MS
from services.memory.store import StoreUnavailable
from services.memory.writer import Keeper
from shared.bus.keys import REEMBEDDING
from shared.errors import Local2Error, TransientError
from shared.participant.service import Context
from shared.telemetry.logging import get_logger

log = get_logger()

_PAGE = 500
_PAUSE = 5.0


class CopyMissing(Local2Error):
    """The keyword index does not have all engrams of the user."""


async def copies(words: KeywordIndex, user_id: str) -> AsyncIterator[list[Engram]]:
    """Yield the user's engrams from the keyword index, a page at a time. Raises CopyMissing."""
    after = 0
    try:
        if await asyncio.to_thread(words.mark) is None:
            raise CopyMissing("the keyword index is not complete")
        while (page := await asyncio.to_thread(words.page, user_id, after, _PAGE)) != []:
            if page is None:
                raise CopyMissing("the keyword index of the user is missing")
            after = page[-1][0]
            yield [Engram.from_flat(id_, orjson.loads(data)) for _, id_, data in page]
    except KeywordIndexDamaged as exc:
        raise CopyMissing(str(exc)) from exc


class Rebuilding:
    """Rebuild the indexes of users whose vectors could not be read."""

    def __init__(self, context: Context[Any], keeper: Keeper, words: KeywordIndex, embedder: Embedder) -> None:
        self._context = context
        self._keeper = keeper
        self._words = words
        self._embedder = embedder

    async def run(self) -> None:
        """Rebuild each index as its damage is found; until cancelled."""
        suspects = self._keeper.store.suspects
        while True:
            await suspects.found.wait()
            suspects.found.clear()
            for user_id, reason in list(suspects.users.items()):
                try:
                    await self._rebuild(user_id)
                except CopyMissing as exc:
                    self._keeper.store.give_up(f"{reason} ({exc})")
                except TransientError as exc:
                    log.warning("memory.rebuild_waits", reason=str(exc))
                    suspects.found.set()
                    await asyncio.sleep(_PAUSE)

    async def _rebuild(self, user_id: str) -> None:
        await self._lease()
        count = await self._keeper.rebuild(user_id, self._copies(user_id))
        if count is not None:
            log.error("memory.index_rebuilt", user_id=user_id, engrams=count)
            self._embedder.moved.set()

    async def _copies(self, user_id: str) -> AsyncIterator[Sequence[Engram]]:
        missing = set(self._keeper.index.catalog.ids(user_id))
        async for page in copies(self._words, user_id):
            missing.difference_update(engram.id for engram in page)
            yield page
            await self._lease()
        if missing:
            # They were written just now: the next attempt finds them.
            raise StoreUnavailable(f"the keyword index lacks {len(missing)} engrams of the user")

    async def _lease(self) -> None:
        """Acquire or renew the lease. Raises StoreUnavailable while another replica rebuilds or embeds."""
        if not await self._context.bus.lease(REEMBEDDING, self._context.replica, LEASE_MS):
            raise StoreUnavailable("another replica gives vectors to engrams")
