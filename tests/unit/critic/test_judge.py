"""Asking the judge: what is tried again, what is given up, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.critic.grading import absolute_prompt, relative_prompt
from services.critic.judge import Judge
from services.critic.jury import Grade
from services.critic.rubrics import Rubric
from services.critic.settings import CriticSettings
from shared.errors import ModelError
from shared.llm.port import ChatRequest, EmptyAnswer, ModelFacts, ModelMissing, ModelUnavailable, StreamInterrupted

RUBRIC = Rubric("clarity", "[Is it clear?]\nScore 1: no\nScore 5: yes")


class Bench:
    """A model that says these things one after the other (the last one for ever), or raises them."""

    def __init__(self, *said: str | Exception, facts: ModelFacts | None = None) -> None:
        self.said = list(said)
        self.known = facts or ModelFacts()
        self.requests: list[ChatRequest] = []
        self.limits: list[tuple[float, float]] = []
        self.loads: list[float] = []

    async def facts(self, model: str) -> ModelFacts:
        return self.known

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        self.requests.append(request)
        self.limits.append((seconds, patience))
        self.loads.append(load)
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return said


def judging(*said: str | Exception, **values: Any) -> tuple[Judge, Bench]:
    bench = Bench(*said)
    settings = CriticSettings(**{"attempts": 3, "patience": 60, **values})
    model: Any = bench
    return Judge(model, lambda: settings), bench


async def graded(judge: Judge) -> Any:
    return await judge.grade("Why?", "Because.", "", RUBRIC)


async def compared(judge: Judge) -> Any:
    return await judge.compare("Why?", "first answer", "second answer", "", RUBRIC)


async def test_a_grade_has_its_score_its_words_and_its_rubric() -> None:
    judge, bench = judging("Clear. [RESULT] 4", temperature=0.0, model="j", num_ctx=4_096, grade_timeout=7)
    grade = await graded(judge)
    assert (grade.score, grade.feedback, grade.rubric, grade.attempts) == (4, "Clear.", "clarity", 1)
    assert bench.limits == [(7, 60)]
    assert bench.loads == [300]
    (request,) = bench.requests
    assert (request.model, request.num_ctx, request.idle_timeout, request.think) == ("j", 4_096, 7, False)
    assert (request.options["temperature"], request.options["seed"]) == (0.0, 0)
    # the model may have to be loaded; how long the call may be put off is not said here
    assert (request.first_token_timeout, request.patience) == (307, None)
    assert judge.unread == 0


async def test_what_the_judge_reads_has_each_thing_in_its_place() -> None:
    judge, bench = judging("Clear. [RESULT] 4")
    await judge.grade("Why?", "Because.", "The facts.", RUBRIC)
    assert bench.requests[0].messages == absolute_prompt("Why?", "Because.", RUBRIC.text, "The facts.")
    judge, bench = judging("[RESULT] A")
    await judge.compare("Why?", "one", "other", "The facts.", RUBRIC)
    assert [request.messages for request in bench.requests] == [
        relative_prompt("Why?", "one", "other", RUBRIC.question, "The facts."),
        relative_prompt("Why?", "other", "one", RUBRIC.question, "The facts."),
    ]
    assert bench.limits == [(30, 60), (30, 60)]


async def test_somebody_who_waits_is_answered_before_others_and_not_after_a_model_is_loaded() -> None:
    bench: Any = Bench("Clear. [RESULT] 4")
    judge = Judge(bench, lambda: CriticSettings(grade_timeout=7, patience=60), at_once=True)
    assert (await graded(judge)).score == 4
    (request,) = bench.requests
    assert (request.first_token_timeout, request.patience) == (7, 0.0)
    assert (bench.limits, bench.loads) == ([(7, 0.0)], [0.0])


@pytest.mark.parametrize(
    ("facts", "context"),
    [
        (ModelFacts(), 4_096),
        (ModelFacts(preset=2_048), 2_048),
        (ModelFacts(preset=8_192), 4_096),
        (ModelFacts(window=1_024), 1_024),
        (ModelFacts(window=8_192, preset=2_048), 2_048),
    ],
)
async def test_a_judge_is_asked_with_no_more_context_than_is_wanted_or_its_server_gives(
    facts: ModelFacts, context: int
) -> None:
    bench: Any = Bench("Clear. [RESULT] 4", facts=facts)
    await graded(Judge(bench, lambda: CriticSettings(num_ctx=4_096)))
    assert bench.requests[0].num_ctx == context


async def test_a_judge_that_cannot_be_read_is_asked_again_warmer_and_then_given_up() -> None:
    judge, bench = judging("No idea.", temperature=0.5)
    grade = await graded(judge)
    assert (grade.score, grade.attempts, judge.unread) == (None, 3, 3)
    assert grade.feedback == "not graded: no score could be read from what the judge said: No idea."
    assert [r.options["temperature"] for r in bench.requests] == [0.5, 0.5, 0.6]
    assert [r.options["seed"] for r in bench.requests] == [0, 1, 2]
    judge, bench = judging("No idea.", temperature=2.0, attempts=10)
    await graded(judge)
    # a backend takes no more
    assert [r.options["temperature"] for r in bench.requests] == [2.0] * 10


async def test_what_cannot_be_read_is_counted() -> None:
    judge, _ = judging("No idea.", "Clear. [RESULT] 4", "[RESULT] A", "No idea.", "No idea.", "[RESULT] B")
    assert (await graded(judge)).attempts == 2
    found = await compared(judge)
    assert (found.forward, found.swapped) == ("A", "A")
    assert judge.unread == 3


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (TimeoutError(), "(nothing within 7 s)"),
        (EmptyAnswer("said nothing"), "(said nothing)"),
        (StreamInterrupted("broke off"), "(broke off)"),
    ],
)
async def test_what_gives_no_words_uses_up_an_attempt(failure: Exception, said: str) -> None:
    judge, bench = judging(failure, "Clear. [RESULT] 4", grade_timeout=7)
    assert (await graded(judge)).attempts == 2
    judge, bench = judging(failure, grade_timeout=7)
    grade = await graded(judge)
    assert grade.score is None
    assert grade.feedback.endswith(said)
    assert len(bench.requests) == 3


async def test_a_judge_that_refuses_or_stays_away_is_not_asked_again() -> None:
    judge, bench = judging(ModelError("no such model"))
    assert await graded(judge) == Grade(None, "not graded: no such model", "clarity", 0)
    assert await compared(judge) is None
    assert len(bench.requests) == 2


def by_content(request: ChatRequest, good: str) -> str:
    """The verdict of a judge that knows which answer is good."""
    text = request.messages[-1]["content"]
    return "A" if text.index(good) < min(text.index(x) for x in ("first answer", "second answer") if x != good) else "B"


class Knowing(Bench):
    def __init__(self, verdict: Callable[[ChatRequest], str]) -> None:
        super().__init__("")
        self._verdict = verdict

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        self.said = [f"Said {len(self.requests) + 1}. [RESULT] {self._verdict(request)}"]
        return await super().say(request, seconds=seconds, patience=patience)


def knowing(verdict: Callable[[ChatRequest], str]) -> tuple[Judge, Bench]:
    model: Any = Knowing(verdict)
    return Judge(model, lambda: CriticSettings()), model


@pytest.mark.parametrize(("good", "winner"), [("first answer", "A"), ("second answer", "B")])
async def test_both_orders_are_asked_and_must_agree(good: str, winner: str) -> None:
    judge, bench = knowing(lambda request: by_content(request, good))
    found = await compared(judge)
    assert (found.winner, found.forward, found.swapped, found.reason) == (winner, winner, winner, "Said 1.")
    assert len(bench.requests) == 2


@pytest.mark.parametrize("place", ["A", "B"])
async def test_a_judge_that_likes_a_place_makes_a_tie_and_both_reasons_are_told(place: str) -> None:
    judge, _ = knowing(lambda _: place)
    found = await compared(judge)
    other = "B" if place == "A" else "A"
    assert (found.winner, found.forward, found.swapped) == ("tie", place, other)
    assert found.reason == "The two orders disagree. A first: Said 1. B first: Said 2."


@pytest.mark.parametrize(("said", "reason"), [(("tie", "tie"), "Said 1."), (("A", "tie"), "Said 1.")])
async def test_a_tie_that_the_judge_itself_sees_is_no_disagreement(said: tuple[str, str], reason: str) -> None:
    verdicts = iter(said)
    judge, _ = knowing(lambda _: next(verdicts))
    found = await compared(judge)
    assert (found.winner, found.reason) == ("tie", reason)


async def test_a_comparison_of_which_one_order_cannot_be_read_is_none() -> None:
    for unread in (1, 2):
        verdicts = ["A"] * (unread - 1) + ["hard to say"] * 9
        judge, bench = knowing(lambda _, verdicts=verdicts: verdicts.pop(0))  # type: ignore[misc]
        assert await compared(judge) is None
        assert len(bench.requests) == unread - 1 + 3


@pytest.mark.parametrize(
    "between",
    [
        "Clear. [RESULT] 4",
        ModelUnavailable("the server is away"),
        ModelMissing("no model 'other'"),
        # in the same words
        ModelUnavailable("no model 'j'"),
    ],
    ids=["there", "away", "another", "not missing"],
)
async def test_that_a_judge_is_missing_is_said_once_and_again_after_anything_else(between: str | ModelError) -> None:
    missing = ModelMissing("no model 'j'")
    judge, _ = judging(missing, missing, between, missing, missing)
    said = [await graded(judge) for _ in range(5)]
    assert [grade is None for grade in said] == [False, True, False, False, True]
    assert "no model 'j'" in said[0].feedback
    assert said[0].feedback == said[3].feedback
