from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.memory.engram import Engram
from services.memory.index import engrams_of, entry
from services.memory.keywords import Found, KeywordIndex, Placed
from services.memory.recall import Recall
from services.memory.settings import MemorySettings
from services.memory.store import Near
from services.memory.vectors import Vector

USER = "ann"


@dataclass
class Memory:
    """Store, index and embedder of a search: real words, and similarities as the test has them."""

    keywords: KeywordIndex
    near: dict[str, float] = field(default_factory=dict)
    engrams: dict[str, Engram] = field(default_factory=dict)
    using: str = "m"
    trouble: str | None = None
    away: bool = False

    def say(self, *turns: str, session: str = "s", respondent: str = "A", time: int = 0) -> list[str]:
        """Turns `question | answer` of a session, a second apart; their ids."""
        made = []
        for number, turn in enumerate(turns):
            query, _, answer = turn.partition(" | ")
            at, name = 1_000 * (time + number), f"{session}-{time + number}:{respondent}"
            made.append(Engram(name, USER, "turn", at, at, session, name, respondent, query, answer))
        self.keywords.add(USER, [entry(one, Vector("m", [0.15, 0.99])) for one in made])
        self.engrams |= {one.id: one for one in made}
        return [one.id for one in made]

    # as the store and the embedder

    async def query(self, *args: object) -> list[Near] | Vector | None:
        if len(args) == 1:
            return None if self.away else Vector("m", [1.0, 0.0])
        found = [Near(name, value) for name, value in self.near.items()]
        return sorted(found, key=lambda one: -one.similarity)

    async def get(self, _user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        return {name: self.engrams[name] for name in ids if name in self.engrams}

    # as the index

    async def search(self, user_id: str, query: str, limit: int) -> Found:
        return self.keywords.search(user_id, query, limit)

    async def shares(self, user_id: str, ids: Sequence[str], rarity: Mapping[str, float]) -> dict[str, float]:
        return self.keywords.shares(user_id, ids, rarity)

    async def placed(self, user_id: str, ids: Sequence[str], rarity: Mapping[str, float]) -> dict[str, Placed]:
        return self.keywords.placed(user_id, ids, rarity)

    async def read(self, user_id: str, ids: Sequence[str]) -> dict[str, Engram]:
        return engrams_of(self.keywords.data(user_id, ids), user_id)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    keywords = KeywordIndex(tmp_path / "words")
    yield Memory(keywords)
    keywords.close()


async def found(memory: Memory, query: str, **settings: object) -> list[str]:
    chosen = MemorySettings(_env_file=None, **settings)  # type: ignore[call-arg, arg-type]
    recalled = await Recall(memory, memory, memory).search(USER, query, chosen)  # type: ignore[arg-type]
    return [engram.id for _, engram in recalled.hits]


async def test_what_stands_beside_a_hit_is_found_though_neither_search_brings_it(memory: Memory) -> None:
    asked, told, after = memory.say("Which boat did you buy?", "The blue one, called Marguerite.", "Nice weather.")
    memory.near = {asked: 0.7}
    assert await found(memory, "boat") == [asked, told]
    assert after not in await found(memory, "boat", min_score=0.0)
    assert await found(memory, "boat", weights={"before": 0.0, "after": 0.0}) == [asked]


async def test_what_another_respondent_said_at_that_time_stands_beside_nothing(memory: Memory) -> None:
    asked, silent = memory.say("Which boat did you buy?", "Silence.")
    b, told = memory.say("Which boat was it?", "The blue one.", respondent="B")
    around = memory.keywords.placed(USER, [asked, silent, b, told], {})
    beside = {name: (one.before, one.after) for name, one in around.items()}
    assert beside == {asked: (None, silent), silent: (asked, None), b: (None, told), told: (b, None)}


async def test_words_count_for_what_only_the_vectors_have_found(memory: Memory) -> None:
    oldest, *_ = memory.say(*(f"coffee number {number}" for number in range(80)))
    memory.near = {oldest: 0.9}
    recalled = await Recall(memory, memory, memory).search(USER, "coffee", MemorySettings(_env_file=None))  # type: ignore[call-arg, arg-type]
    hit, engram = recalled.hits[0]
    assert (engram.id, hit.why["keyword_rank"], hit.why["keyword_score"]) == (oldest, None, 1.0)


async def test_while_the_model_is_away_words_alone_decide(memory: Memory) -> None:
    asked, *_ = memory.say("Which boat did you buy?", "The blue one.")
    memory.near, memory.away = {"s-1:A": 0.9}, True
    assert await found(memory, "boat") == [asked]
