"""A comparison of two that may be looked at after every verdict: *better*, *worse*, or *not yet*.

Of the verdicts that are decided, B wins a share; the question is whether it is more or less than a half. Bets against
each share m are laid on every conversation: with x the part of its decided verdicts that B won, a bet on the share p
multiplies its stake by x·p/m + (1 − x)·(1 − p)/(1 − m), which is 1 on average where m is true. The capital of stakes
spread over all p is then a martingale, which ever grows to 1/α with a chance of α at most (Ville's inequality), however
often it is looked at. The shares whose capital is below that are a confidence sequence. With one verdict in each
conversation this is the mixture sequential probability ratio test.

Sources: Robbins 1970; Johari, Koomen, Pekelis and Walsh, "Always Valid Inference", Operations Research 2022; Howard,
Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Annals of Statistics
2021; for x between 0 and 1, Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
Journal of the Royal Statistical Society B, 2024.

Ties say nothing of which is better, and are left out, as in the sign test; they are counted. A conversation counts
once, however long: its verdicts are about the same matter. While one is still going on, its part is that of its
verdicts so far; that doubles the capital at most, for which the half of α that *worse* does not use is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Decision = Literal["better", "worse", "not yet"]
Winner = Literal["A", "B", "tie"]

LEVEL = 0.95
_PLACES = 40
_STAKES_ON = [(n + 0.5) / _PLACES for n in range(_PLACES)]
# Half of the stakes are on moderate differences (a beta distribution), half on all of them alike.
_NARROW = 8.0
_MODERATE = [(p * (1 - p)) ** (_NARROW - 1) for p in _STAKES_ON]
_STAKES = [math.log(0.5 * one / sum(_MODERATE) + 0.5 / _PLACES) for one in _MODERATE]
_STEPS = 40
_MOST_MORE = 100_000


@dataclass(frozen=True, slots=True)
class Trial:
    """What the verdicts say of B. `share`: of the decided ones those that B won, each conversation counted once;
    `low`, `high`: its confidence sequence now. `p_value`: always valid. `decided_at`: how many verdicts, ties included,
    had come when it was decided. `more`: decided conversations that would still be needed if the share stays; None when
    it is decided, when nothing is known, or when it would take more than 100,000."""

    decision: Decision
    verdicts: int
    wins: int
    ties: int
    losses: int
    conversations: int
    share: float | None
    low: float
    high: float
    p_value: float
    decided_at: int | None
    more: int | None


def trial(verdicts: Iterable[tuple[Hashable, Winner]], alpha: float = 1 - LEVEL) -> Trial:
    """`verdicts`: conversation and winner, in the order in which they came. alpha: the chance to ever decide wrongly
    where neither is better, *better* and *worse* together.

    The decision is that of the first moment at which there was one: to look on changes nothing of it.
    """
    enough = -math.log(alpha)
    count: Counter[Winner] = Counter()
    won: Counter[Hashable] = Counter()
    seen: Counter[Hashable] = Counter()
    capital = list(_STAKES)
    most, decided, decided_at = 0.0, None, None
    for conversation, winner in verdicts:
        count[winner] += 1
        if winner == "tie":
            continue
        if seen[conversation]:
            _lay(capital, won[conversation] / seen[conversation], 0.5, -1)
        seen[conversation] += 1
        won[conversation] += winner == "B"
        _lay(capital, won[conversation] / seen[conversation], 0.5, 1)
        most = max(most, now := _log_sum(capital))
        if decided is None and now >= enough:
            decided_at = sum(count.values())
            half = len(capital) // 2
            decided = "better" if _log_sum(capital[half:]) > _log_sum(capital[:half]) else "worse"
    parts = Counter(won[conversation] / times for conversation, times in seen.items())
    share = sum(part * times for part, times in parts.items()) / len(seen) if seen else None
    low, high = (0.0, 1.0) if share is None else (_bound(parts, share, 0.0, enough), _bound(parts, share, 1.0, enough))
    return Trial(
        decision=decided or "not yet",  # type: ignore[arg-type]
        verdicts=sum(count.values()),
        wins=count["B"],
        ties=count["tie"],
        losses=count["A"],
        conversations=len(seen),
        share=share,
        low=low,
        high=high,
        p_value=math.exp(-most),
        decided_at=decided_at,
        more=None if decided or share is None else _more(parts, len(seen), enough),
    )


def _lay(capital: list[float], part: float, m: float, times: float) -> None:
    """Multiplies each stake by what the bet on it made of a conversation, `times` over."""
    for n, made in enumerate(_made(part, m)):
        capital[n] += times * made


@lru_cache(4_096)
def _made(part: float, m: float) -> list[float]:
    """What the bets on each share make of a conversation, against the share m; logarithms."""
    return [math.log(part * p / m + (1 - part) * (1 - p) / (1 - m)) for p in _STAKES_ON]


def _log_sum(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def _capital(parts: Counter[float], m: float, times: float = 1.0) -> float:
    """The logarithm of what the bets against the share m have made."""
    capital = list(_STAKES)
    for part, number in parts.items():
        _lay(capital, part, m, number * times)
    return _log_sum(capital)


def _bound(parts: Counter[float], share: float, end: float, enough: float) -> float:
    """The share between the one that was seen and the end at which the capital becomes enough to refute it."""
    inside, outside = share, end
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        # at the ends no bet is defined: they are never refuted by what they would make impossible alone
        if 0 < middle < 1 and _capital(parts, middle) < enough:
            inside = middle
        else:
            outside = middle
    return (inside + outside) / 2


def _more(parts: Counter[float], conversations: int, enough: float) -> int | None:
    """Conversations like those so far that would still be needed."""
    most = 1 + _MOST_MORE / conversations
    if _capital(parts, 0.5, most) < enough:
        return None
    low, high = 1.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _capital(parts, 0.5, middle) >= enough else (middle, high)
    return max(1, math.ceil((high - 1) * conversations))
