"""Which engrams answer a query best: one pure function, explained per hit.

1. Relevance comes from what was found alone: the similarity, and the share of the query's words, of the engram itself
   (0…1); and, in part, from a better one beside it in its conversation.
2. What is not relevant is left out; ratings have no say in that.
3. Ratings (critic, pairwise winner, feedback) and age change the relevance of a relevant engram by at most `bound`
   of it. So no rating lifts an engram over one whose relevance is more than (1 + bound) / (1 - bound) times as high.
4. Of near-identical engrams the best rated stands for all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

GOOD, BAD = 4, 2
# The share of a query's words, by their rarity, that an engram without a known similarity needs.
WORDS_NEEDED = 0.5
# What a better turn beside an engram adds towards the least similarity, at most, as a share of the engram's own one.
LIFTED_SHARE = 0.45
Mark = Literal["GOOD EXAMPLE", "AVOID"]


class Weights(BaseModel):
    """How engrams are weighted. The parts of ratings and age are shares of the relevance, added up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keyword: float = Field(default=0.475, ge=0, le=1, description="Share of the keyword search in the relevance")
    beside: float = Field(default=0.4, ge=0, le=1, description="Part added of what a turn lacks to the best beside it")
    critic: float = Field(default=0.04, ge=0, le=1, description="For a score of 5; a score of 1 counts as much against")
    winner: float = Field(default=0.06, ge=0, le=1, description="For the better of two answers, and against the other")
    feedback: float = Field(default=0.1, ge=0, le=1, description="For a reward of 1, and against one of -1")
    age: float = Field(default=0.04, ge=0, le=1, description="Against what is very old")
    half_life_days: float = Field(default=60.0, gt=0, description="Days after which half of `age` counts")
    bound: float = Field(default=0.15, ge=0, le=0.5, description="The most that ratings and age can change together")
    duplicate: float = Field(default=0.8, gt=0, le=1, description="Share of common words of near-identical engrams")


# A similarity of one embedding model says nothing about another model's. With all-MiniLM, one of a hundred unrelated
# engrams is more similar than this (tests/eval/memory).
_MIN_SCORES = {"nomic": 0.3, "minilm": 0.25}
_MIN_SCORE = 0.3


def min_score_for(embedding_model: str) -> float:
    """The `min_score` that suits an embedding model, by its name."""
    name = embedding_model.lower()
    return next((value for part, value in _MIN_SCORES.items() if part in name), _MIN_SCORE)


@dataclass(slots=True)
class Candidate:
    """An engram that dense or keyword search has found, and what is known of it. Not frozen: that would take four times
    as long to make, for each of some sixty."""

    id: str
    similarity: float | None = None  # cosine; None: not known
    keyword_rank: int | None = None  # from 1; None: not found by keywords
    keyword_score: float | None = None  # the share of the query's words that it has, by their rarity, 0…1
    rare_word: bool = False  # whether it has a rare word of the query itself
    lift: float = 0.0  # what a better turn beside it adds to its relevance
    score: float | None = None  # the critic's, 1…5
    won: bool | None = None  # its pairwise comparison; None: a tie, or none was made
    feedback: float | None = None  # the reward, -1…1
    age_days: float = 0.0
    question: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """`score` (0…1) is how hits are ordered; `relevance` has no upper bound; `why` has what both were made of."""

    id: str
    score: float
    relevance: float
    mark: Mark | None
    why: dict[str, Any]


def mark_of(score: float | None, won: bool | None = None) -> Mark | None:
    """Return the mark with which the model sees an engram.

    score: the critic's, 1 to 5. won: see Candidate; the loser of a comparison is no GOOD EXAMPLE.
    """
    if score is None:
        return None
    if score <= BAD:
        return "AVOID"
    return "GOOD EXAMPLE" if score >= GOOD and won is not False else None


def rank(candidates: Iterable[Candidate], weights: Weights, *, top_k: int, min_score: float) -> list[Hit]:
    """The best `top_k` of the relevant candidates, best first; equal ones by age (newest first), then id.

    min_score: the least cosine similarity of a relevant engram; it belongs to the embedding model in use. The lift from
    a better turn beside the engram counts too, up to LIFTED_SHARE of the engram's own similarity. An engram with a rare
    word of the query may be less similar: its share of the query's words (by rarity) must be as large as the missing
    share of min_score. Where no similarity is known, half of the words are needed.
    """
    judged = [_Judged.of(candidate, weights, min_score) for candidate in candidates]
    relevant = sorted((one for one in judged if one.relevance > 0), key=_Judged.place)
    kept = _without_duplicates(relevant, weights.duplicate, max(0, top_k))
    return [one.hit() for one in sorted(kept, key=_Judged.place)[: max(0, top_k)]]


def promising(candidates: Iterable[Candidate], weights: Weights, *, min_score: float) -> list[tuple[str, float]]:
    """The relevant candidates with the score that each can reach at most, best first: before their ratings are known.

    For a search that reads what is known of the most promising only.
    """
    found: list[tuple[float, str]] = []
    for one in candidates:
        relevance = _relevance(one, weights, min_score)
        if relevance > 0:
            found.append((-relevance * (1 + weights.bound), one.id))
    return [(name, -score) for score, name in sorted(found)]


def lifts(candidates: Mapping[str, Candidate], pairs: Iterable[tuple[str, str]], weights: Weights) -> dict[str, float]:
    """What better turns beside them add to candidates: what answers a question often stands near what was asked, and
    shares little with the question itself. None comes as far as the one that lifts it, and none is more than doubled:
    what fits the question in nothing is not lifted.

    pairs: of candidates that stand beside each other.
    """
    alone = {name: _alone(one, weights) for name, one in candidates.items()}
    added: dict[str, float] = {}
    for pair in pairs:
        worse, better = sorted(pair, key=alone.__getitem__)
        lift = min(weights.beside * (alone[better] - alone[worse]), alone[worse])
        added[worse] = max(lift, added.get(worse, 0.0))
    return added


def _alone(one: Candidate, weights: Weights) -> float:
    words = one.keyword_score or 0.0
    if one.similarity is None:
        return words
    return (1 - weights.keyword) * max(0.0, one.similarity) + weights.keyword * words


def _relevance(one: Candidate, weights: Weights, min_score: float) -> float:
    """Return 0 for an engram that is not relevant."""
    relevance = _alone(one, weights) + one.lift
    if one.similarity is None:
        return relevance if relevance >= WORDS_NEEDED else 0.0
    own = max(0.0, one.similarity)
    similarity = own + min(one.lift, LIFTED_SHARE * own)
    if similarity >= min_score:
        return relevance
    # The share of the words makes up for the missing part of the similarity.
    passes = weights.keyword > 0 and one.rare_word and (one.keyword_score or 0.0) >= 1 - similarity / min_score
    return relevance if passes else 0.0


@dataclass(frozen=True, slots=True)
class _Judged:
    candidate: Candidate
    relevance: float
    parts: dict[str, float]
    shift: float

    @classmethod
    def of(cls, candidate: Candidate, weights: Weights, min_score: float) -> _Judged:
        relevance = _relevance(candidate, weights, min_score)
        parts = {
            "critic": 0.0 if candidate.score is None else weights.critic * (candidate.score - 3) / 2,
            "winner": 0.0 if candidate.won is None else weights.winner if candidate.won else -weights.winner,
            "feedback": weights.feedback * (candidate.feedback or 0.0),
            "age": -weights.age * (1 - 0.5 ** (max(0.0, candidate.age_days) / weights.half_life_days)),
        }
        shift = max(-weights.bound, min(weights.bound, sum(parts.values())))
        return cls(candidate, relevance, parts, shift)

    @property
    def score(self) -> float:
        return self.relevance * (1 + self.shift)

    @property
    def rating(self) -> float:
        return self.parts["critic"] + self.parts["winner"] + self.parts["feedback"]

    def place(self) -> tuple[float, float, str]:
        return (-self.score, self.candidate.age_days, self.candidate.id)

    def hit(self) -> Hit:
        found = self.candidate
        why: dict[str, Any] = {
            "similarity": None if found.similarity is None else round(found.similarity, 4),
            "keyword_rank": found.keyword_rank,
            "keyword_score": None if found.keyword_score is None else round(found.keyword_score, 4),
            "lift": round(found.lift, 4),
            "relevance": round(self.relevance, 4),
            **{name: round(value, 4) for name, value in self.parts.items()},
            "shift": round(self.shift, 4),
        }
        return Hit(found.id, min(1.0, self.score), self.relevance, mark_of(found.score, found.won), why)


_WORD = re.compile(r"\w+")


def _without_duplicates(ordered: Sequence[_Judged], alike: float, most: int) -> list[_Judged]:
    """One of each group of near-identical engrams: the best rated, then the first in order. Those that can be among the
    first `most`, at least: to compare texts is the dearest part of ranking."""
    groups: list[tuple[frozenset[str], _Judged]] = []
    for place, one in enumerate(ordered):
        # of what is left, nothing takes the place of a copy that is rated worse
        worst = min((chosen.rating for _, chosen in groups), default=math.inf)
        if len(groups) >= most and max(left.rating for left in ordered[place:]) <= worst:
            break
        words = frozenset(_WORD.findall(f"{one.candidate.question} {one.candidate.text}".lower()))
        for at, (others, chosen) in enumerate(groups):
            if _alike(words, others, alike):
                if one.rating > chosen.rating:
                    groups[at] = (others, one)
                break
        else:
            groups.append((words, one))
    return [chosen for _, chosen in groups]


def _alike(one: frozenset[str], other: frozenset[str], least: float) -> bool:
    """Whether two texts have nearly the same words, and the same numbers: a changed number is news."""
    if not one or not other or min(len(one), len(other)) < least * max(len(one), len(other)):
        return False
    common = len(one & other)
    if common < least * (len(one) + len(other) - common):
        return False
    return not any(any(map(str.isdigit, word)) for word in one ^ other)
