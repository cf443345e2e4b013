"""Asking the judge: retries, time limits, and what is published when it cannot be understood."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from services.critic.jury import Comparison, Grade, agreed_grade, agreed_verdict
from services.critic.rubrics import Rubric
from services.critic.settings import CriticSettings
from shared.errors import ModelError
from shared.llm.port import (
    ChatRequest,
    EmptyAnswer,
    ModelMissing,
    ModelOverloaded,
    ModelUnavailable,
    StreamInterrupted,
)
from shared.llm.preemption import PreemptibleChatModel
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")
T = TypeVar("T")
# A verdict comes after a few sentences; a judge that goes on for longer repeats itself.
_LONGEST = 1024
# A judge asked again at temperature 0 would say the same again.
_WARMER = 0.3
# Between two looks whether one of several judges is there again.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class Judge:
    """Whoever judges by the settings: one model, or several that each say what they think (see jury.py).

    at_once: somebody waits for what it says: it does not come after users' queries, one that is away is not waited
    for, and of several the first one answers.
    """

    def __init__(
        self, model: PreemptibleChatModel, settings: Callable[[], CriticSettings], *, at_once: bool = False
    ) -> None:
        self._model = model
        self._settings = settings
        self._at_once = at_once
        self.unread = 0
        self._missing: str | None = None
        # of several those that said nothing in time when they were last asked
        self._silent: set[str] = set()

    def _jury(self) -> list[str]:
        return self._settings().jury[: 1 if self._at_once else None]

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
        jury = self._jury()
        if len(jury) == 1:
            return await self._graded_by(jury[0], prompt, rubric.name, alone=True)
        said = await self._each(jury, lambda model: self._graded_by(model, prompt, rubric.name, alone=False))
        return agreed_grade(said, rubric.name)

    async def _graded_by(self, model: str, prompt: JudgePrompt, rubric: str, *, alone: bool) -> Grade:
        score, said, attempts = await self._ask(model, prompt, parse_score, "grade", alone=alone)
        if score is None:
            log.warning("critic.unreadable_grade", attempts=attempts, model=model)
            return Grade(
                None, f"not graded: no score could be read from what the judge said: {said[:500]}", rubric, attempts
            )
        return Grade(score, feedback_of(said), rubric, attempts)

    async def _each(self, jury: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T | ModelError]:
        """What each says, or why it could not be asked: the others do not wait for one that is away. Only when nobody
        is there they are waited for, as one judge is. Raises ModelError when it stays like that."""
        clock = asyncio.get_running_loop().time
        until, pause = clock() + self._settings().patience, _FIRST_PAUSE
        while True:
            said: dict[str, T | ModelError] = {}
            for model in jury:
                try:
                    said[model] = await ask(model)
                except ModelError as exc:
                    log.warning("critic.judge_missing", model=model, reason=exc.cause)
                    said[model] = exc
            missing = [one for one in said.values() if isinstance(one, ModelError)]
            if len(missing) < len(said):
                return said
            away = [exc for exc in missing if isinstance(exc, ModelUnavailable | ModelOverloaded)]
            if not away or clock() + pause > until:
                raise (away or missing)[0]
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def compare(self, instruction: str, a: str, b: str, reference: str, rubric: Rubric) -> Comparison | None:
        """Both orders; None when one of the verdicts cannot be had or read."""
        try:
            return await self.compared(instruction, a, b, reference, rubric)
        except ModelError as exc:
            log.warning("critic.judge_failed", reason=str(exc))
            return None

    async def compared(self, instruction: str, a: str, b: str, reference: str, rubric: Rubric) -> Comparison | None:
        """Both orders; None when one of the verdicts cannot be read. Raises ModelError when there is no judge."""
        prompts = [relative_prompt(instruction, *answers, rubric.question, reference) for answers in ((a, b), (b, a))]
        jury = self._jury()
        if len(jury) == 1:
            return await self._compared_by(jury[0], prompts, alone=True)
        return agreed_verdict(await self._each(jury, lambda model: self._compared_by(model, prompts, alone=False)))

    async def _compared_by(self, model: str, prompts: Sequence[JudgePrompt], *, alone: bool) -> Comparison | None:
        verdicts: list[tuple[Verdict, str]] = []
        verdict: Verdict | None
        for prompt in prompts:
            verdict, said, attempts = await self._ask(model, prompt, parse_winner, "comparison", alone=alone)
            if verdict is None:
                log.warning("critic.unreadable_verdict", attempts=attempts, model=model)
                return None
            verdicts.append((verdict, feedback_of(said)))
        (forward, why), (second, why_swapped) = verdicts
        swapped = unswap(second)
        winner = decide(forward, swapped)
        split = winner == "tie" and "tie" not in (forward, swapped)
        reason = f"The two orders disagree. A first: {why} B first: {why_swapped}" if split else why
        return Comparison(winner, reason, forward, swapped)

    async def _ask(
        self,
        model: str,
        prompt: JudgePrompt,
        read: Callable[[str], R | None],
        asked: Literal["grade", "comparison"],
        *,
        alone: bool,
    ) -> tuple[R | None, str, int]:
        """What was read, what was said last, and how many attempts it took. Raises ModelError."""
        settings, said = self._settings(), ""
        for attempt in range(settings.attempts):
            silent = False
            try:
                said = await self._say(model, prompt, settings, attempt, alone=alone)
                self._silent.discard(model)
            except TimeoutError:
                silent = True
                said = f"(nothing within {settings.grade_timeout:g} s)"
            except (EmptyAnswer, StreamInterrupted) as exc:
                said = f"({exc})"
            found = read(said)
            if found is not None:
                return found, said, attempt + 1
            self.unread += 1
            if (meter := metrics.meter()) is not None:
                meter.unread(asked)
            if silent and not alone:
                # the others do not wait for it again
                self._silent.add(model)
                return None, said, attempt + 1
        return None, said, settings.attempts

    async def _say(
        self, model: str, prompt: JudgePrompt, settings: CriticSettings, attempt: int, *, alone: bool
    ) -> str:
        """Raises TimeoutError when the judge takes too long; waiting for its turn does not count, nor, for one that
        judges alone, waiting until it is there."""
        # its own context length: nobody else asks the judge, and another one may not fit beside the other models
        facts = await self._model.facts(model)
        temperature = max(settings.temperature, _WARMER * attempt)
        # somebody who waits for a tool is told instead that it is away
        load = 0.0 if self._at_once or model in self._silent else settings.load_timeout
        request = ChatRequest(
            model=model,
            messages=prompt,
            think=False,
            num_ctx=facts.context(min(settings.num_ctx, facts.preset or settings.num_ctx)),
            options={"temperature": min(temperature, 2.0), "num_predict": _LONGEST, "seed": attempt},
            first_token_timeout=settings.grade_timeout + load,
            idle_timeout=settings.grade_timeout,
            patience=0.0 if self._at_once else None,
        )
        patience = settings.patience if alone and not self._at_once else 0.0
        return await self._model.say(request, seconds=settings.grade_timeout, patience=patience, load=load)
