"""What several judges come to: the middle one of their grades, and the winner that most of them name.

Source: Verga et al., Replacing Judges with Juries, 2024, arXiv:2404.18796 (several models of different families, asked
each for itself; voting over comparisons).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from services.critic.grading import Verdict
from shared.contracts import JudgeGrade, JudgeVerdict
from shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class Grade:
    """`score` is None when no attempt could be read; the feedback says why. `judges`: what each of several said, as
    fields of `JudgeGrade`."""

    score: int | None
    feedback: str
    rubric: str
    attempts: int
    judges: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`forward` and `swapped`: who won when A stood first, and when B did. `judges`: what each of several said, as
    fields of `JudgeVerdict`."""

    winner: Verdict
    reason: str
    forward: Verdict
    swapped: Verdict
    judges: list[dict[str, Any]] = field(default_factory=list)


def majority(named: Sequence[Verdict]) -> Verdict:
    """What more than half of them name; without that nobody wins."""
    return next((one for one in ("A", "B") if 2 * named.count(one) > len(named)), "tie")


def agreed_grade(said: Mapping[str, Grade | ModelError], rubric: str) -> Grade:
    """`said`: by judge, its grade or why it could not be asked. Who gave no score has no part in it; of an even number
    of scores the lower one of the two in the middle counts, with the words of a judge who gave it."""
    views = [
        JudgeGrade(model=model, feedback=f"not asked: {one.cause}")
        if isinstance(one, ModelError)
        else JudgeGrade(model=model, score=one.score, feedback=one.feedback)
        for model, one in said.items()
    ]
    scores = [view.score for view in views if view.score is not None]
    score = median_low(scores) if scores else None
    words = next((view.feedback for view in views if view.score == score and score is not None), None)
    if words is None:
        words = "not graded: no judge gave a score. " + "; ".join(f"{view.model}: {view.feedback}" for view in views)
    attempts = sum(one.attempts for one in said.values() if isinstance(one, Grade))
    return Grade(score, words, rubric, attempts, [view.model_dump() for view in views])


def agreed_verdict(said: Mapping[str, Comparison | ModelError | None]) -> Comparison | None:
    """`said`: by judge, its verdict in both orders, None where it cannot be read, or why it could not be asked. None
    when nobody gave one."""
    views = [_verdict_of(model, one) for model, one in said.items()]
    given = [one for one in said.values() if isinstance(one, Comparison)]
    if not given:
        return None
    winner = majority([one.winner for one in given])
    agreeing = [one for one in given if one.winner == winner]
    if agreeing:
        reason = agreeing[0].reason
    else:
        reason = "Most judges name no winner: " + ", ".join(f"{view.model}: {view.winner or '-'}" for view in views)
    forward, swapped = majority([one.forward for one in given]), majority([one.swapped for one in given])
    return Comparison(winner, reason, forward, swapped, [view.model_dump() for view in views])


def _verdict_of(model: str, one: Comparison | ModelError | None) -> JudgeVerdict:
    if isinstance(one, Comparison):
        return JudgeVerdict(model=model, winner=one.winner, forward=one.forward, swapped=one.swapped, reason=one.reason)
    why = "no verdict could be read" if one is None else f"not asked: {one.cause}"
    return JudgeVerdict(model=model, reason=why)
