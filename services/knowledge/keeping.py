"""What knowledge keeps how long."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from services.knowledge.store import Store
from shared.participant.retention import Kind

# Sources that are forgotten in one transaction.
_PART = 50


def kinds(store: Store) -> list[Kind]:
    return [Kind("facts", "keep_days_facts", store.census, partial(_forget, store))]


async def _forget(store: Store, before: int) -> AsyncGenerator[int, None]:
    for user_id in await store.users():
        while count := await store.forget_old(user_id, before, _PART):
            yield count
