"""Asking the judge: retries, time limits, and what is published when it cannot be understood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from services.critic.grading import (
    JudgePrompt,
    Verdict,
    absolute_prompt,
    decide,
    feedback_of,
    parse_score,
    parse_winner,
    relative_prompt,
    unswap,
)
from services.critic.rubrics import Rubric
from services.critic.settings import CriticSettings
from shared.errors import ModelError
from shared.llm.courtesy import CourteousChatModel
from shared.llm.port import ChatRequest, EmptyAnswer, ModelMissing, StreamInterrupted
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")
# A verdict comes after a few sentences; a judge that goes on for longer repeats itself.
_LONGEST = 1024
# A judge asked again at temperature 0 would say the same again.
_WARMER = 0.3


@dataclass(frozen=True, slots=True)
class Grade:
    """`score` is None when no attempt could be read; the feedback says why."""

    score: int | None
    feedback: str
    rubric: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`forward` and `swapped`: who won when A stood first, and when B did."""

    winner: Verdict
    reason: str
    forward: Verdict
    swapped: Verdict


class Judge:
    """at_once: somebody waits for what it says: it does not come after users' queries, and one that is away is not
    waited for."""

    def __init__(
        self, model: CourteousChatModel, settings: Callable[[], CriticSettings], *, at_once: bool = False
    ) -> None:
        self._model = model
        self._settings = settings
        self._at_once = at_once
        self.unread = 0
        self._missing: str | None = None

    async def grade(self, instruction: str, answer: str, reference: str, rubric: Rubric) -> Grade | None:
        """Never raises for the judge's sake: what cannot be judged has no score. None: the judge is missing, which was
        said of an answer before."""
        try:
            grade = await self.graded(instruction, answer, reference, rubric)
        except ModelError as exc:
            said_before = isinstance(exc, ModelMissing) and self._missing == str(exc)
            self._missing = str(exc) if isinstance(exc, ModelMissing) else None
            if said_before:
                return None
            log.warning("critic.judge_failed", reason=exc.cause)
            return Grade(None, f"not graded: {exc.cause}", rubric.name, 0)
        self._missing = None
        return grade

    async def graded(self, instruction: str, answer: str, reference: str, rubric: Rubric) -> Grade:
        """Raises ModelError when there is no judge."""
        prompt = absolute_prompt(instruction, answer, rubric.text, reference)
        score, said, attempts = await self._ask(prompt, parse_score, "grade")
        if score is None:
            log.warning("critic.unreadable_grade", attempts=attempts)
            return Grade(None, f"not graded: no score could be read from what the judge said: {said[:500]}",
                         rubric.name, attempts)  # fmt: skip
        return Grade(score, feedback_of(said), rubric.name, attempts)

    async def compare(self, instruction: str, a: str, b: str, reference: str, rubric: Rubric) -> Comparison | None:
        """Both orders; None when one of the verdicts cannot be had or read."""
        try:
            return await self.compared(instruction, a, b, reference, rubric)
        except ModelError as exc:
            log.warning("critic.judge_failed", reason=str(exc))
            return None

    async def compared(self, instruction: str, a: str, b: str, reference: str, rubric: Rubric) -> Comparison | None:
        """Both orders; None when one of the verdicts cannot be read. Raises ModelError when there is no judge."""
        verdicts: list[tuple[Verdict, str]] = []
        verdict: Verdict | None
        for first, second in ((a, b), (b, a)):
            prompt = relative_prompt(instruction, first, second, rubric.question, reference)
            verdict, said, attempts = await self._ask(prompt, parse_winner, "comparison")
            if verdict is None:
                log.warning("critic.unreadable_verdict", attempts=attempts)
                return None
            verdicts.append((verdict, feedback_of(said)))
        (forward, why), (second, why_swapped) = verdicts
        swapped = unswap(second)
        winner = decide(forward, swapped)
        split = winner == "tie" and "tie" not in (forward, swapped)
        reason = f"The two orders disagree. A first: {why} B first: {why_swapped}" if split else why
        return Comparison(winner, reason, forward, swapped)

    async def _ask(
        self, prompt: JudgePrompt, read: Callable[[str], R | None], asked: Literal["grade", "comparison"]
    ) -> tuple[R | None, str, int]:
        """What was read, what was said last, and how many attempts it took. Raises ModelError."""
        settings, said = self._settings(), ""
        for attempt in range(settings.attempts):
            try:
                said = await self._say(prompt, settings, attempt)
            except TimeoutError:
                said = f"(nothing within {settings.grade_timeout:g} s)"
            except (EmptyAnswer, StreamInterrupted) as exc:
                said = f"({exc})"
            found = read(said)
            if found is not None:
                return found, said, attempt + 1
            self.unread += 1
            if (meter := metrics.meter()) is not None:
                meter.unread(asked)
        return None, said, settings.attempts

    async def _say(self, prompt: JudgePrompt, settings: CriticSettings, attempt: int) -> str:
        """Raises TimeoutError when the judge takes too long; waiting for its turn does not count, nor for a judge that
        is away."""
        # its own context length: nobody else asks the judge, and another one may not fit beside the other models
        facts = await self._model.facts(settings.model)
        temperature = settings.temperature if attempt == 0 else max(settings.temperature, _WARMER * attempt)
        # somebody who waits for a tool is told instead that it is away
        load = 0.0 if self._at_once else settings.load_timeout
        request = ChatRequest(
            model=settings.model,
            messages=prompt,
            think=False,
            num_ctx=facts.context(min(settings.num_ctx, facts.preset or settings.num_ctx)),
            options={"temperature": min(temperature, 2.0), "num_predict": _LONGEST, "seed": attempt},
            first_token_timeout=settings.grade_timeout + load,
            idle_timeout=settings.grade_timeout,
            patience=0.0 if self._at_once else None,
        )
        patience = 0.0 if self._at_once else settings.patience
        return await self._model.say(request, seconds=settings.grade_timeout, patience=patience, load=load)
