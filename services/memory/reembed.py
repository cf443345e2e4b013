"""Engrams whose vectors cannot be compared with today's get new ones, in the background: those of another model or
dimension, and those that came while no model was there.

Until its turn comes, an engram is found by its words. Each is written anew where the new vectors are and then removed
where it was, by the same steps as any other write: a crash leaves it in one of the two, or for a moment in both.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.memory.embedding import Embedder
from services.memory.ingest import embedded_text
from services.memory.store import Kept
from services.memory.vectors import NO_VECTOR, Space
from services.memory.writer import Keeper
from shared.bus.keys import REEMBEDDING
from shared.errors import SettingsError, TransientError
from shared.participant.service import Context
from shared.telemetry.logging import get_logger

log = get_logger()

LEASE_MS = 30_000
_PAUSE = 5.0
# A server that stops embedding is often only being set up anew: its vectors are kept so long before the built-in
# model's take their place.
_KEPT_SECONDS = 600.0


async def refuse_other_models(keeper: Keeper, model: str) -> None:
    """Raises SettingsError when the store has engrams of another model."""
    others = sum(one.count for one in await keeper.store.collections() if one.space.model not in (model, ""))
    if others:
        raise SettingsError(
            f"the memory holds {others} engrams with vectors of another model than {model}; set "
            "LOCAL2_EMBEDDING_MODEL to that one, or LOCAL2_MEMORY_ON_MODEL_CHANGE=reembed"
        )


class Reembedding:
    """replace: also vectors of other models and dimensions; else only engrams that have none get one."""

    def __init__(self, context: Context[Any], keeper: Keeper, embedder: Embedder, *, replace: bool) -> None:
        self._context = context
        self._keeper = keeper
        self._embedder = embedder
        self._replace = replace
        self.left = 0

    async def run(self) -> None:
        """Whenever vectors are made in another space than before; until cancelled."""
        while True:
            await self._embedder.moved.wait()
            self._embedder.moved.clear()
            space = self._embedder.space
            try:
                if space is not None and not await self._all(space):
                    # something is left that others are at, or that is to be kept for a while
                    self._embedder.moved.set()
                    await asyncio.sleep(_PAUSE)
            except TransientError as exc:
                log.warning("memory.reembedding_waits", reason=str(exc))
                self._embedder.moved.set()
                await asyncio.sleep(_PAUSE)

    async def _all(self, space: Space) -> bool:
        """Whether nothing is left to be done."""
        foreign = [one for one in await self._keeper.store.collections(but=space) if self._foreign(one, space)]
        due = [one for one in foreign if not self._kept(one)]
        self.left = sum(one.count for one in due)
        if not foreign:
            return True
        if self.left and not await self._lease():
            return False
        for one in due:
            log.info("memory.reembedding", engrams=one.count, model=space.model, dimension=space.dimension)
            if not await self._collection(one, space):
                return True
        self.left = 0
        return len(due) == len(foreign)

    def _foreign(self, one: Kept, space: Space) -> bool:
        return one.space != space and (self._replace or not one.space.model)

    def _kept(self, one: Kept) -> bool:
        embedder = self._embedder
        lasted = asyncio.get_running_loop().time() - embedder.lacking_since
        return embedder.lacking is not None and one.space.model == embedder.model and lasted < _KEPT_SECONDS

    async def _lease(self) -> bool:
        """One replica of all does it; another may go on where it stopped."""
        return await self._context.bus.lease(REEMBEDDING, self._context.replica, LEASE_MS)

    async def _collection(self, one: Kept, space: Space) -> bool:
        """False: vectors are made in another space by now."""
        refused = 0
        while page := await self._keeper.store.page(one.user_id, one.name, refused):
            vectors = await self._embedder.documents([embedded_text(engram) for engram in page])
            if self._embedder.space != space:
                return False
            placed = [(engram, vector) for engram, vector in zip(page, vectors, strict=True) if vector != NO_VECTOR]
            if placed:
                await self._keeper.put(one.user_id, placed)
            # what the model does not take stays where it is, and is found by its words
            refused += len(page) - len(placed)
            self.left = max(0, self.left - len(page))
            await self._lease()
        await self._keeper.store.drop_empty(one.name)
        return True
