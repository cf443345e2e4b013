"""The retention of facts: a fact stays until all of its sources are removed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from services.knowledge.search import Search
from services.knowledge.statements import BY_HAND
from services.knowledge.store import Store
from shared.participant.retention import Census, Kind

# Sources that are forgotten in one transaction.
_PART = 50


def kinds(store: Store, search: Search) -> list[Kind]:
    return [Kind("facts", "keep_days_facts", partial(_census, store, search), partial(_forget, store))]


async def _census(store: Store, search: Search, before: int) -> Census:
    """Count all users' facts. A fact is due when each of its sources is due; a fact entered by hand is never due."""
    kept, due, oldest = 0, 0, list[int]()
    for user_id in await store.users():
        for fact in await search.all(user_id):
            kept += 1
            oldest = [min(*oldest, fact.said)] if oldest else [fact.said]
            due += fact.said < before and not any(claim.source.startswith(BY_HAND) for claim in fact.claims)
    return Census(kept, min(oldest, default=None), due)


async def _forget(store: Store, before: int) -> AsyncGenerator[int, None]:
    for user_id in await store.users():
        while count := await store.forget_old(user_id, before, _PART):
            yield count
