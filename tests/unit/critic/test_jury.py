"""Several judges: what they come to, and who is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.critic.grading import absolute_prompt
from services.critic.judge import Judge
from services.critic.jury import Comparison, Grade, agreed_grade, agreed_verdict, majority
from services.critic.rubrics import Rubric
from services.critic.settings import CriticSettings
from shared.errors import ModelError, SettingsError
from shared.llm.port import ChatRequest, ModelFacts, ModelMissing, ModelUnavailable

RUBRIC = Rubric("clarity", "[Is it clear?]\nScore 1: no\nScore 5: yes")
AWAY = ModelUnavailable("connection refused")


@pytest.mark.parametrize(
    ("scores", "score"),
    [([1, 4, 5], 4), ([5, 1, 1], 1), ([4, 5], 4), ([2, None, 5], 2), ([None, None, 3], 3), ([None, None], None)],
)
def test_the_middle_grade_counts_with_the_words_of_who_gave_it(scores: list[int | None], score: int | None) -> None:
    said = {f"j{n}": Grade(value, f"words of j{n}", "clarity", 1) for n, value in enumerate(scores)}
    found = agreed_grade(said, "clarity")
    assert (found.score, found.rubric, found.attempts) == (score, "clarity", len(scores))
    assert [(one["model"], one["score"]) for one in found.judges] == [(f"j{n}", s) for n, s in enumerate(scores)]
    if score is None:
        assert found.feedback == "not graded: no judge gave a score. j0: words of j0; j1: words of j1"
    else:
        assert found.feedback == f"words of j{scores.index(score)}"


@pytest.mark.parametrize(
    ("named", "winner"),
    [("AAB", "A"), ("ABB", "B"), ("AAt", "A"), ("ABt", "tie"), ("AB", "tie"), ("Att", "tie"), ("A", "A"), ("tt", "tie"),
     ("AABB", "tie"), ("AAAB", "A")],
)  # fmt: skip
def test_who_most_judges_name_wins(named: str, winner: str) -> None:
    verdicts: list[Any] = ["tie" if one == "t" else one for one in named]
    assert majority(verdicts) == winner
    said: dict[str, Any] = {f"j{n}": Comparison(one, f"words {n}", one, one) for n, one in enumerate(verdicts)}
    found = agreed_verdict(said | {"gone": AWAY, "mute": None})
    assert found is not None
    assert found.winner == winner
    assert [one["winner"] for one in found.judges] == [*verdicts, None, None]
    assert [one["reason"] for one in found.judges[-2:]] == [
        "not asked: connection refused", "no verdict could be read",
    ]  # fmt: skip
    if winner in verdicts:
        assert found.reason == f"words {verdicts.index(winner)}"
    else:
        assert found.reason.startswith("Most judges name no winner: j0: A")


def test_nobodys_verdict_is_none() -> None:
    assert agreed_verdict({"gone": AWAY, "mute": None}) is None


class Bench:
    """Judges that each say one thing, or what a function of the request says, or raise it; counted."""

    def __init__(self, **said: str | Exception | Callable[[], str | Exception]) -> None:
        self.said = said
        self.asked: list[str] = []
        self.loads: list[tuple[float, float]] = []
        self.prompts: list[Any] = []

    async def facts(self, model: str) -> ModelFacts:
        return ModelFacts()

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        self.asked.append(request.model)
        self.loads.append((patience, load))
        self.prompts.append(request.messages)
        said = self.said[request.model]
        said = said() if callable(said) else said
        if isinstance(said, Exception):
            raise said
        return said


def judging(bench: Bench, *, at_once: bool = False, **values: Any) -> Judge:
    model: Any = bench
    settings = CriticSettings(**{"judges": list(bench.said), "attempts": 2, "patience": 60, **values})
    return Judge(model, lambda: settings, at_once=at_once)


async def graded(judge: Judge) -> Any:
    return await judge.grade("Why?", "Because.", "", RUBRIC)


async def compared(judge: Judge) -> Any:
    return await judge.compare("Why?", "first", "second", "", RUBRIC)


async def test_each_is_asked_for_itself_and_all_are_told() -> None:
    bench = Bench(one="Fine. [RESULT] 5", two="Poor. [RESULT] 2", three="Good. [RESULT] 4")
    grade = await graded(judging(bench))
    assert (grade.score, grade.feedback, grade.rubric) == (4, "Good.", "clarity")
    assert bench.prompts == [absolute_prompt("Why?", "Because.", RUBRIC.text)] * 3
    assert [(each["model"], each["score"], each["feedback"]) for each in grade.judges] == [
        ("one", 5, "Fine."), ("two", 2, "Poor."), ("three", 4, "Good."),
    ]  # fmt: skip
    bench = Bench(one="[RESULT] A", two="[RESULT] A", three="[RESULT] tie")
    found = await compared(judging(bench))
    # two like the first place: each is a tie in both orders, before any are counted
    assert (found.winner, found.forward, found.swapped) == ("tie", "A", "B")
    assert bench.asked == ["one", "one", "two", "two", "three", "three"]


async def test_what_each_said_of_a_pair_is_told_as_it_was_said() -> None:
    said = {
        "one": Comparison("tie", "Near.", "A", "B"),
        "two": Comparison("A", "Longer.", "A", "A"),
        "three": Comparison("tie", "So so.", "tie", "B"),
    }
    nothing = {"winner": None, "forward": None, "swapped": None}
    told = [
        {"model": "one", "winner": "tie", "forward": "A", "swapped": "B", "reason": "Near."},
        {"model": "two", "winner": "A", "forward": "A", "swapped": "A", "reason": "Longer."},
        {"model": "three", "winner": "tie", "forward": "tie", "swapped": "B", "reason": "So so."},
        {"model": "gone", **nothing, "reason": "not asked: connection refused"},
        {"model": "mute", **nothing, "reason": "no verdict could be read"},
    ]
    found = agreed_verdict({**said, "gone": AWAY, "mute": None})
    assert found == Comparison("tie", "Near.", "A", "B", told)


async def test_one_that_cannot_be_read_is_asked_again_and_one_that_is_silent_is_not() -> None:
    answers: list[str | Exception] = ["Hm.", "[RESULT] 3", TimeoutError(), "Hm.", "Hm."]
    bench = Bench(one=lambda: answers.pop(0), two="[RESULT] 5")
    judge = judging(bench, load_timeout=300)
    attempts = [(await graded(judge)).attempts for _ in range(3)]
    # one of the others each time
    assert attempts == [2 + 1, 1 + 1, 2 + 1]
    loads = [load for model, (_, load) in zip(bench.asked, bench.loads, strict=True) if model == "one"]
    assert loads == [300, 300, 300, 0, 300]
    bench = Bench(one=TimeoutError(), two="[RESULT] A")
    assert await compared(judging(bench)) is not None
    assert bench.asked == ["one", "two", "two"]
    # one who judges alone has all its attempts
    bench = Bench(one=TimeoutError())
    assert await compared(judging(bench, load_timeout=300)) is None
    assert bench.loads == [(60, 300), (60, 300)]


async def test_one_that_is_away_blocks_nobody_and_is_named() -> None:
    bench = Bench(one=AWAY, two="Poor. [RESULT] 2", three=ModelMissing("three is not there"))
    judge = judging(bench)
    grade = await graded(judge)
    assert (grade.score, bench.asked) == (2, ["one", "two", "three"])
    assert [each["feedback"] for each in grade.judges] == [
        "not asked: connection refused", "Poor.", "not asked: three is not there",
    ]  # fmt: skip
    # nobody waits for it
    assert {patience for patience, _ in bench.loads} == {0}


async def test_one_that_says_nothing_is_waited_for_once_and_not_again_until_it_speaks() -> None:
    answers: list[str | Exception] = [TimeoutError(), TimeoutError(), "[RESULT] 3", "[RESULT] 3"]
    bench = Bench(one=lambda: answers.pop(0), two="[RESULT] 5")
    judge = judging(bench, load_timeout=300)
    for _ in range(4):
        await graded(judge)
    loads = [load for model, (_, load) in zip(bench.asked, bench.loads, strict=True) if model == "one"]
    assert loads == [300, 0, 0, 300]


async def test_when_nobody_is_there_they_are_waited_for() -> None:
    comes: list[str | Exception] = [AWAY, "Good. [RESULT] 4"]
    bench = Bench(one=lambda: comes.pop(0), two=AWAY)
    assert (await graded(judging(bench))).score == 4
    assert bench.asked == ["one", "two"] * 2
    # the next one would be longer than there is patience
    bench = Bench(one=AWAY, two=AWAY)
    assert (await graded(judging(bench, patience=0.1))).score is None
    assert bench.asked == ["one", "two"]
    bench = Bench(one=ModelMissing("no one"), two=AWAY)
    grade = await graded(judging(bench, patience=0))
    assert (grade.score, grade.feedback, grade.judges) == (None, "not graded: connection refused", [])
    assert await compared(judging(bench, patience=0)) is None
    # who lacks a model will not have it soon
    bench = Bench(one=ModelMissing("no one"), two=ModelError("no two"))
    assert (await graded(judging(bench))).feedback == "not graded: no one"
    assert bench.asked == ["one", "two"]


async def test_who_asks_by_a_tool_is_answered_by_the_first() -> None:
    bench = Bench(one="Fine. [RESULT] 5", two="Poor. [RESULT] 2")
    grade = await graded(judging(bench, at_once=True))
    assert (grade.score, grade.judges, bench.asked) == (5, [], ["one"])


def test_a_judge_has_one_voice() -> None:
    with pytest.raises(SettingsError, match="one is named twice"):
        CriticSettings(judges=["one", "two", "one"])
    assert CriticSettings(model="m").jury == ["m"]
    assert CriticSettings(model="m", judges=["a", "b"]).jury == ["a", "b"]
