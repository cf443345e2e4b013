"""Another embedding model: engrams that have vectors of the old one get new ones, in the background.

Until its turn comes, an engram is found by its words. Each is written anew under the new model and then removed under
the old one, by the same steps as any other write: a crash leaves it in one of the two, or for a moment in both.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.memory.embedding import Embedder
from services.memory.ingest import embedded_text
from services.memory.keeper import Keeper
from shared.bus.keys import REEMBEDDING
from shared.errors import SettingsError, TransientError
from shared.participant.service import Context
from shared.telemetry.logging import get_logger

log = get_logger()

_LEASE_SECONDS = 30
_PAUSE = 5.0


async def refuse_other_models(keeper: Keeper, model: str) -> None:
    """Raises SettingsError when the store has engrams of another model."""
    others = [(name, count) for _, name, count in await keeper.store.foreign(model) if count]
    if others:
        raise SettingsError(
            f"the memory holds {sum(count for _, count in others)} engrams with vectors of another model than "
            f"{model}; set LOCAL2_EMBEDDING_MODEL to that one, or LOCAL2_MEMORY_ON_MODEL_CHANGE=reembed"
        )


class Reembedding:
    def __init__(self, context: Context[Any], keeper: Keeper, embedder: Embedder) -> None:
        self._context = context
        self._keeper = keeper
        self._embedder = embedder
        self.left = 0

    async def run(self) -> None:
        """Until everything has vectors of the model in use."""
        while True:
            try:
                foreign = await self._keeper.store.foreign(self._embedder.model)
                self.left = sum(count for _, _, count in foreign)
                if not foreign:
                    return
                if not self.left or await self._lease():
                    for user_id, name, count in foreign:
                        log.info("memory.reembedding", engrams=count, model=self._embedder.model)
                        await self._collection(user_id, name)
                    continue
            except TransientError as exc:
                log.warning("memory.reembedding_waits", reason=str(exc))
            await asyncio.sleep(_PAUSE)

    async def _lease(self) -> bool:
        """One replica of all does it; another may go on where it stopped."""
        me = self._context.replica
        link = self._context.bus.link
        if await link.call("SET", REEMBEDDING, me, "NX", "EX", _LEASE_SECONDS):
            return True
        if await link.call("GET", REEMBEDDING) != me.encode():
            return False
        await link.call("EXPIRE", REEMBEDDING, _LEASE_SECONDS)
        return True

    async def _collection(self, user_id: str, name: str) -> None:
        while page := await self._keeper.store.first_page(user_id, name):
            vectors = await self._embedder.documents([embedded_text(engram) for engram in page])
            await self._keeper.put(user_id, list(zip(page, vectors, strict=True)))
            self.left = max(0, self.left - len(page))
            await self._lease()
        await self._keeper.store.drop_empty(user_id, name)
