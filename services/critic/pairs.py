"""The two answers to one query, brought together in Redis: any order of arrival, any number of critic replicas.

The replica that brings the second answer judges the pair, while it holds that answer's entry: when it dies, whoever
takes the entry over finds that this entry has the pair, and judges it. The counterpart's entry never does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from shared.bus import Bus, Script
from shared.bus.keys import PAIRS_WAITING, pair_key
from shared.envelope import now_ms

# A counterpart that is this late is not waited for; nor one that is later than journals are kept.
_SECONDS = 3600

_SCRIPTS = Path(__file__).parent / "scripts"
_OFFER = Script.read(_SCRIPTS / "offer_answer.lua")
_CLOSE = Script.read(_SCRIPTS / "close_pair.lua")


@dataclass(frozen=True, slots=True)
class Half:
    """One respondent's answer as the comparison needs it. `reference`: what it was drawn from. `score` is its grade,
    None when it has none. `instruction`: the question with the conversation that led to it; `rubric`: the name of the
    one that fits the turn."""

    response_id: str
    answer: str
    reference: str
    score: int | None
    config: dict[str, Any]
    instruction: str
    rubric: str

    def dump(self) -> bytes:
        return orjson.dumps(asdict(self))

    @staticmethod
    def parse(data: bytes) -> Half:
        value = orjson.loads(data)
        return Half(**{item.name: value[item.name] for item in fields(Half) if item.name in value})


@dataclass(frozen=True, slots=True)
class Offer:
    """`pair`: both answers, when the one who asks is to judge them. `evicted`: queries that were given up for room."""

    pair: tuple[Half, Half] | None
    evicted: list[str]


class Pairs:
    def __init__(self, bus: Bus, retention: int = _SECONDS) -> None:
        self._bus = bus
        self._seconds = min(_SECONDS, retention)

    async def offer(self, query_id: str, respondent_id: str, half: Half, limit: int) -> Offer:
        """Puts an answer beside its counterpart; at most `limit` answers wait, the oldest are given up."""
        keys = (pair_key(query_id), PAIRS_WAITING)
        args = (respondent_id, half.dump(), query_id, limit, self._seconds, now_ms(), pair_key(""))
        first, second, *evicted = await self._bus.link.call(*_OFFER(keys, *args))
        pair = (Half.parse(first), Half.parse(second)) if first and second else None
        return Offer(pair, [name.decode() for name in evicted])

    async def close(self, query_id: str) -> None:
        """The pair has been judged, or one of its answers cannot be."""
        await self._bus.link.call(*_CLOSE((pair_key(query_id), PAIRS_WAITING), query_id, self._seconds))

    async def waiting(self) -> int:
        return int(await self._bus.link.call("ZCARD", PAIRS_WAITING))
