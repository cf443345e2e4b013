"""Finding what fits a question, or several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from services.memory.embedding import Embedder
from services.memory.engram import Engram
from services.memory.index import Index, engrams_of, similarities
from services.memory.keywords import Found, KeywordIndex, Seen
from services.memory.periods import Period, period_of
from services.memory.ranking import Candidate, Hit, Weights, lifts, min_score_for, promising, rank
from services.memory.rerank import Reranker, RerankFailed
from services.memory.settings import MemorySettings
from services.memory.store import IndexDamaged, Near, Store, StoreUnavailable
from services.memory.vectors import Vector
from shared.envelope import now_ms
from shared.telemetry.logging import get_logger
from shared.zones import local_date

log = get_logger()

DAY_MS = 86_400_000
# Candidates that each of the two searches may bring for one place in the result.
_PER_PLACE = 4
# The turns that follow the most promising few are candidates too, whatever they share with the query.
_FOLLOWED = 5
# The most promising that are read from the store for one place, and among which ratings choose. More are read only
# where copies and echoes leave places free: reading costs more than finding.
_READ_PER_PLACE = 2
# Turns of the log before and after each hit.
_REACH = 2
# Most hits of one search.
MOST = 50


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is searched, and how. None: as the settings say.

    queries: several are merged, and each engram is told once. n_results: most hits of each. log: with the turns round
    each hit. zone: IANA name of the zone for days in the queries.
    """

    queries: tuple[str, ...]
    n_results: int | None = None
    hybrid: bool | None = None
    do_rerank: bool | None = None
    log: bool = False
    zone: str = "UTC"


@dataclass(frozen=True, slots=True)
class Reranked:
    """`of`: how many there were to choose from. `trouble`: why they are in the order in which they were found."""

    by: str
    of: int
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Recalled:
    """What was found. `degraded` says why it may be less than there is; None when nothing was in the way.

    reranked: None where it was not asked for. log: where it was asked for, conversations with a hit, each in its order.
    """

    hits: list[tuple[Hit, Engram]]
    degraded: str | None = None
    reranked: Reranked | None = None
    log: list[list[Engram]] | None = None


@dataclass(frozen=True, slots=True)
class _Query:
    """A query. words: the text without its period."""

    text: str
    words: str
    period: Period | None


@dataclass(frozen=True, slots=True)
class _Brought:
    """What both searches bring. vector: of the query; None while there is none. degraded: see Recalled."""

    near: Sequence[Near]
    vector: Vector | None
    words: Found
    degraded: str | None

    def candidates(self, near: Sequence[Seen] = ()) -> dict[str, Candidate]:
        """near: what the vectors alone have brought, as the words see it."""
        found = {one.id: Candidate(one.id, one.similarity) for one in self.near}
        for one in near:
            found[one.id].keyword_score, found[one.id].rare_word = one.score or None, one.rare
        hits = self.words.hits
        known = _similarities([one for one in hits if one.id not in found], self.vector)
        for place, hit in enumerate(hits, start=1):
            if hit.id not in found:
                found[hit.id] = Candidate(hit.id, known.get(hit.id))
            found[hit.id].keyword_rank, found[hit.id].keyword_score = place, hit.score or None
            found[hit.id].rare_word = hit.rare
        return found


class Recall:
    def __init__(
        self,
        store: Store,
        index: Index,
        embedder: Embedder,
        rerankers: Mapping[str, Reranker] | None = None,
        now: Callable[[], int] = now_ms,
    ) -> None:
        self._store = store
        self._index = index
        self._embedder = embedder
        self._rerankers = rerankers or {}
        self._now = now

    async def search(self, user_id: str, wanted: Wanted, settings: MemorySettings) -> Recalled:
        """The user's best memories, best first."""
        count = wanted.n_results or settings.top_k
        most = min(MOST, count * len(wanted.queries))
        rerank = settings.do_rerank if wanted.do_rerank is None else wanted.do_rerank
        pool = max(count, settings.rerank_pool) if rerank else count
        hybrid = settings.hybrid if wanted.hybrid is None else wanted.hybrid
        asked = [period_of(query, self._now(), wanted.zone) for query in wanted.queries]
        each = await asyncio.gather(
            *(
                self._one(user_id, _Query(query, words, period), settings, pool, hybrid)
                for query, (period, words) in zip(wanted.queries, asked, strict=True)
            )
        )
        hits = _merged([one.hits for one in each])
        reranked = None
        if rerank:
            hits = hits[: max(most, pool)]
            hits, reranked = await self._reranked(" / ".join(wanted.queries), hits, settings, wanted.zone)
        hits = hits[:most]
        log = await self._round(user_id, hits) if wanted.log else None
        return Recalled(hits, next((one.degraded for one in each if one.degraded), None), reranked, log)

    async def _reranked(
        self, query: str, hits: list[tuple[Hit, Engram]], settings: MemorySettings, zone: str
    ) -> tuple[list[tuple[Hit, Engram]], Reranked]:
        """What helps, most helpful first; as it was, where that cannot be said."""
        reranker = self._rerankers.get(settings.rerank)
        if reranker is None:
            return hits, Reranked(settings.rerank, len(hits), "not reranked: memory's setting rerank is none")
        if not hits:
            return hits, Reranked(reranker.name, 0)
        texts = ["\n".join((f"{local_date(engram.time, zone)}", *filter(None, engram.said()))) for _, engram in hits]
        try:
            order = await reranker.order(query, texts, settings)
        except RerankFailed as exc:
            log.warning("recall.not_reranked", reason=str(exc))
            return hits, Reranked(reranker.name, len(hits), str(exc))
        return [hits[place] for place in order], Reranked(reranker.name, len(hits))

    async def _round(self, user_id: str, hits: Sequence[tuple[Hit, Engram]]) -> list[list[Engram]]:
        """The conversations in which the hits stand, as far as they are near them."""
        ids = [engram.id for _, engram in hits]
        talks = await self._index.look(user_id, lambda words: words.windows(user_id, ids, _REACH)) or []
        engrams = await self._engrams(user_id, [one for talk in talks for one in talk])
        found = [[engrams[one] for one in talk if one in engrams] for talk in talks]
        return [talk for talk in found if talk]

    async def _one(self, user_id: str, query: _Query, settings: MemorySettings, count: int, hybrid: bool) -> Recalled:
        """The best `count` for one query."""
        least = min_score_for(self._embedder.using) if settings.min_score is None else settings.min_score
        weights = settings.weights if hybrid else settings.weights.model_copy(update={"keyword": 0.0})
        brought = await self._brought(user_id, query, max(20, count * _PER_PLACE), hybrid)
        step = count * _READ_PER_PLACE

        def weighed(words: KeywordIndex) -> tuple[list[Candidate], dict[str, Engram]]:
            """The relevant candidates, best first, and what is known of the first of them."""
            found, data = _weighed(words, user_id, brought, weights, least)
            order = _promising(found, weights, least)
            return order, engrams_of({one.id: data[one.id] for one in order[:step] if one.id in data}, user_id)

        # one change of threads for all of it: one costs as much as ranking does
        order, engrams = await self._index.look(user_id, weighed) or (
            # the index has to be made anew: what the vectors have found is there all the same
            _promising(brought.candidates(), weights, least),
            {},
        )
        # an answer that only repeats what was remembered stands behind what it repeats
        said: list[Candidate] = []
        echoes: list[Candidate] = []
        hits: list[Hit] = []
        now, at = self._now(), 0
        while at < len(order):
            part = order[at : at + step]
            at += step
            engrams |= await self._engrams(user_id, [one.id for one in part if one.id not in engrams])
            # what has gone meanwhile is left out
            for one in part:
                if (engram := engrams.get(one.id)) is not None and engram.shown:
                    _judge(one, engram, now)
                    (echoes if engram.echo else said).append(one)
            hits = rank(said, weights, top_k=count, min_score=least)
            if len(hits) == count:
                break
        if not hits:
            hits = rank(echoes, weights, top_k=count, min_score=least)
        return Recalled([(hit, engrams[hit.id]) for hit in hits], brought.degraded)

    async def _brought(self, user_id: str, query: _Query, limit: int, hybrid: bool) -> _Brought:
        """What both searches bring; they run at the same time."""

        def search(words: KeywordIndex) -> Found:
            return words.search(user_id, query.words, limit, query.period)

        async def words() -> Found:
            return await self._index.look(user_id, search) or Found()

        if hybrid:
            (near, vector, degraded), found = await asyncio.gather(self._dense(user_id, query.text, limit), words())
        else:
            near, vector, degraded = await self._dense(user_id, query.text, limit)
            # without a vector there is nothing else to go by
            found = await words() if vector is None else Found()
        return _Brought(near, vector, found, degraded)

    async def _engrams(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        """What is known of engrams, of those that are there."""
        if not ids:
            return {}
        engrams = await self._index.look(user_id, lambda words: engrams_of(words.data(user_id, ids), user_id)) or {}
        if missing := [one for one in ids if one not in engrams]:
            engrams |= await self._store.get(user_id, missing)
        return engrams

    async def _dense(self, user_id: str, query: str, limit: int) -> tuple[Sequence[Near], Vector | None, str | None]:
        vector = await self._embedder.query(query)
        if vector is None:
            return (), None, f"searched by words only: {self._embedder.trouble or 'the question cannot be embedded'}"
        try:
            near = await self._store.query(user_id, vector, limit, self._index.catalog.hidden(user_id))
        except IndexDamaged:
            return (), None, "searched by words only: the vectors cannot be read, and are being made again"
        except StoreUnavailable as exc:
            log.warning("recall.no_store", reason=str(exc))
            raise
        return near, vector, self._embedder.trouble


def _weighed(
    words: KeywordIndex, user_id: str, brought: _Brought, weights: Weights, least: float
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """What both searches bring, with what lifts it; and what is kept of each, by id."""
    hits, sought = brought.words.hits, brought.words.sought
    by_word = {one.id for one in hits}
    near = words.seen(user_id, [one.id for one in brought.near if one.id not in by_word], sought)
    found = brought.candidates(near)
    there = {one.id: one for one in (*hits, *near)}
    best = [one.id for one in _promising(found, weights, least)[:_FOLLOWED]]
    after = {later for one in best if one in there for later in there[one].later if later not in found}
    others = words.seen(user_id, list(after), sought)
    known = _similarities(others, brought.vector)
    for one in others:
        found[one.id] = Candidate(one.id, known.get(one.id), keyword_score=one.score or None, rare_word=one.rare)
    pairs = [(one.id, later) for one in there.values() for later in one.later if later in found]
    for name, lift in lifts(found, pairs, weights).items():
        found[name].lift = lift
    return found, {one.id: one.data for one in (*there.values(), *others)}


def _similarities(seen: Sequence[Seen], vector: Vector | None) -> dict[str, float]:
    return {} if vector is None else similarities(seen, vector)


def _promising(candidates: Mapping[str, Candidate], weights: Weights, least: float) -> list[Candidate]:
    return [candidates[one] for one, _ in promising(candidates.values(), weights, min_score=least)]


def _judge(one: Candidate, engram: Engram, now: int) -> None:
    """Adds to a candidate everything that is known of it."""
    one.question, one.text = engram.said()
    one.score, one.won, one.feedback = engram.score, engram.pairwise_winner, engram.reward
    one.age_days = max(0.0, (now - engram.time) / DAY_MS)


def _merged(each: Sequence[Sequence[tuple[Hit, Engram]]]) -> list[tuple[Hit, Engram]]:
    """The best of every query first, then the second best; each engram once, at its best place."""
    merged: dict[str, tuple[Hit, Engram]] = {}
    for row in zip_longest(*each):
        for hit, engram in sorted(filter(None, row), key=lambda one: -one[0].score):
            merged.setdefault(engram.id, (hit, engram))
    return list(merged.values())
