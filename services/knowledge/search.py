"""Search for facts about people and places."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.knowledge.claims import Claim
from services.knowledge.dates import day
from services.knowledge.merging import Entity, Fact, fact_line, facts_of
from services.knowledge.name_index import Names
from services.knowledge.names import USER
from services.knowledge.relations import exclusive, symmetric
from services.knowledge.store import Store
from shared.envelope import now_ms

HEADING = "=== KNOWLEDGE GRAPH FACTS ==="
NOTHING = "No facts found in the knowledge graph."
# The newest claims that are read about a name, about a name of the second hop, and the number of those names.
_CLAIMS, _NEAR, _STARTS = 400, 20, 40
# More than a name has. Some servers reserve memory for the limit of a query.
_EVERY = 1_000_000
# Users whose names stay in memory.
_USERS = 64


@dataclass(frozen=True, slots=True)
class Hit:
    """hop: 1 for a fact about a requested name, 2 for a fact about a name that such a fact has."""

    fact: Fact
    hop: int


class Search:
    """clock: the time in ms."""

    def __init__(self, store: Store, clock: Callable[[], int] = now_ms) -> None:
        self._store = store
        self._clock = clock
        self._names: OrderedDict[str, Names] = OrderedDict()

    async def names(self, user_id: str) -> Names:
        """Return the current names of a user."""
        version = await self._store.version(user_id)
        known = self._names.get(user_id)
        if known is None or known.version != version:
            # After a write in between, the names are newer than the version, and are read again the next time.
            known = Names(version, await self._store.keys(user_id), await self._store.aliases(user_id))
            self._names[user_id] = known
        self._names.move_to_end(user_id)
        while len(self._names) > _USERS:
            self._names.popitem(last=False)
        return known

    async def find(
        self, user_id: str, people: Sequence[str], locations: Sequence[str], n_results: int, hops: int
    ) -> list[Hit]:
        """Return the best hits; without names, facts about the user. Doubted facts are left out."""
        names = await self.names(user_id)
        wanted = [names.matching(text) for text in (*people, *locations)] if people or locations else [[USER]]
        asked = {entity for entities in wanted for entity in entities}
        first = await self._around(user_id, names, asked, _CLAIMS)
        hits = [Hit(fact, 1) for fact in first]
        if hops > 1 and len(hits) < n_results:
            # Not over the user, who is connected with everything.
            near = sorted({thing.id for fact in first for thing in (fact.subject, fact.object)} - asked - {USER})
            known = {fact.id for fact in first}
            second = await self._around(user_id, names, near[:_STARTS], _NEAR)
            hits += [Hit(fact, 2) for fact in second if fact.id not in known]
        sure = [hit for hit in hits if hit.fact.state != "doubted"]
        return sorted(sure, key=lambda hit: _rank(hit, wanted))[:n_results]

    async def _around(self, user_id: str, names: Names, entities: Sequence[str] | set[str], each: int) -> list[Fact]:
        """Return the facts about entities, from the newest claims about them and from what competes with these."""
        keys = names.with_aliases(entities)
        claims = {one.id: one for one in await self._store.newest_claims(user_id, keys, each)}
        for one in await self._rivals(user_id, names, list(claims.values()), each):
            claims[one.id] = one
        return facts_of(claims.values(), names.entity, day(self._clock()), about=frozenset(entities))

    async def _rivals(self, user_id: str, names: Names, claims: Sequence[Claim], each: int) -> list[Claim]:
        """Return the claims that may end others: a person who lives in Lyon may have moved since."""
        bound = [one for one in claims if exclusive(one.relation)]
        subjects = {one.subject_key for one in bound} | {one.object_key for one in bound if symmetric(one.relation)}
        return await self._store.newest_rivals(
            user_id, names.with_aliases(subjects), {one.relation for one in bound}, each
        )

    async def of_claim(self, user_id: str, claim_id: str) -> Fact | None:
        """Return the fact that a claim supports, alone or with others; None if the user has no such claim."""
        claim = await self._store.claim(user_id, claim_id)
        if claim is None:
            return None
        names = await self.names(user_id)
        ends = [names.with_aliases([key]) for key in (claim.subject_key, claim.object_key)]
        # Its own claims and the competing ones; other claims about both names give their spellings and kinds.
        claims = [
            *await self._store.newest_claims(user_id, {*ends[0], *ends[1]}, _CLAIMS),
            *await self._store.claims_between(user_id, *ends),
            *await self._rivals(user_id, names, [claim], _EVERY),
        ]
        facts = facts_of(claims, names.entity, day(self._clock()))
        return next((fact for fact in facts if any(one.id == claim_id for one in fact.claims)), None)

    async def all(self, user_id: str) -> list[Fact]:
        """Return every fact of a user, the newest first."""
        names = await self.names(user_id)
        claims = await self._store.claims(user_id)
        facts = await asyncio.to_thread(facts_of, claims, names.entity, day(self._clock()))
        return sorted(facts, key=lambda fact: (-fact.said, fact.id))


def _rank(hit: Hit, wanted: Sequence[Sequence[str]]) -> tuple[Any, ...]:
    """Return the order of hits: more requested names first, then what IS so, higher confidence, later statements."""
    fact = hit.fact
    met = sum(any(one in (fact.subject.id, fact.object.id) for one in entities) for entities in wanted)
    return hit.hop, -met, fact.state != "is", -fact.confidence, -fact.said, fact.id


def text_of(hits: Sequence[Hit]) -> str:
    """Return the hits as a model reads them."""
    return "\n".join([HEADING, *(f"- {fact_line(hit.fact)}" for hit in hits)]) if hits else NOTHING


def entity_json(thing: Entity) -> dict[str, Any]:
    return {"id": thing.id, "name": thing.name, "kind": thing.kind}


def fact_json(fact: Fact) -> dict[str, Any]:
    """Return a fact as clients receive it."""
    return {
        "id": fact.id,
        "subject": entity_json(fact.subject),
        "relation": fact.relation,
        "object": entity_json(fact.object),
        "state": fact.state,
        "since": fact.since or None,
        "until": fact.until or None,
        "said": day(fact.said),
        "time": fact.said,
        "confidence": fact.confidence,
        "text": fact_line(fact),
        "why": fact.why(),
        "sources": [source_json(one) for one in fact.claims],
    }


def source_json(claim: Claim) -> dict[str, Any]:
    return {
        "source": claim.source,
        "session_id": claim.session_id,
        "time": claim.said,
        "speaker": claim.speaker,
        "by": claim.by,
        "quote": claim.quote,
    }
