"""The judge as tools: what they say, and what goes wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.critic.judge import Judge
from services.critic.rubrics import load_rubrics
from services.critic.settings import CriticSettings
from services.critic.tools import CompareAnswers, GradeAnswer, JudgeTools
from shared.contracts import ToolRequest
from shared.errors import ModelError, ToolError
from shared.llm.port import ChatRequest, ContextOverflow, ModelFacts, ModelMissing, ModelUnavailable
from shared.participant.tool import ToolResult

REQUEST = ToolRequest(query_id="1-1", call_id="c", tool="grade_answer", args={}, session_id="s", user_id="u")


class Bench:
    """A model that says these things one after the other, or raises them."""

    def __init__(self, *said: str | ModelError) -> None:
        self._said = list(said)
        self.asked: list[tuple[ChatRequest, float]] = []

    async def facts(self, model: str) -> ModelFacts:
        return ModelFacts()

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        self.asked.append((request, patience))
        said = self._said.pop(0)
        if isinstance(said, ModelError):
            raise said
        return said


def tools(*said: str | ModelError) -> tuple[JudgeTools, Bench]:
    bench: Any = Bench(*said)
    return JudgeTools(Judge(bench, lambda: CriticSettings(attempts=2), at_once=True), load_rubrics(None)), bench


async def test_a_grade_is_the_score_and_the_judges_words() -> None:
    judge, bench = tools("Short, and right. [RESULT] 4")
    result = await judge.grade(GradeAnswer(question="Why?", answer="Because."), REQUEST)
    assert result.text == "Score: 4/5\nShort, and right."
    assert result.data == {"score": 4, "feedback": "Short, and right.", "rubric": "realistic"}
    ((request, patience),) = bench.asked
    # somebody waits for it
    assert (request.patience, patience) == (0.0, 0.0)
    asked = request.messages[-1]["content"]
    assert all(part in asked for part in ("Why?", "Because.", load_rubrics(None)["realistic"].question))
    assert "###Reference Answer" not in asked


async def test_a_reference_makes_the_template_that_has_one() -> None:
    judge, bench = tools("Fits. [RESULT] 5")
    await judge.grade(GradeAnswer(question="Why?", answer="Because.", reference="For this."), REQUEST)
    asked = bench.asked[0][0].messages[-1]["content"]
    assert "###Reference Answer" in asked
    assert "For this." in asked


@pytest.mark.parametrize(
    ("said", "winner"),
    [
        (("Better. [RESULT] A", "Better. [RESULT] B"), "A"),
        (("Better. [RESULT] B", "Better. [RESULT] A"), "B"),
        (("Better. [RESULT] A", "Better. [RESULT] A"), "tie"),
    ],
)
async def test_both_orders_are_judged_and_only_agreement_is_a_winner(said: tuple[str, str], winner: str) -> None:
    judge, bench = tools(*said)
    args = CompareAnswers(question="Which?", answer_a="the first", answer_b="the second")
    result = await judge.compare(args, REQUEST)
    assert result.text.startswith(f"Winner: {winner}\n")
    assert "Better." in result.text
    assert result.data["winner"] == winner
    forward, swapped = (request.messages[-1]["content"] for request, _ in bench.asked)
    assert forward.index("the first") < forward.index("the second")
    assert swapped.index("the second") < swapped.index("the first")


Ask = Callable[[JudgeTools], Awaitable[ToolResult]]


@pytest.mark.parametrize(
    "ask",
    [
        lambda judge: judge.grade(GradeAnswer(question="Why?", answer="x"), REQUEST),
        lambda judge: judge.compare(CompareAnswers(question="Why?", answer_a="x", answer_b="y"), REQUEST),
    ],
)
@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (ModelMissing("no such model"), "judge unavailable"),
        (ModelUnavailable("nobody answers"), "judge unavailable"),
        (ContextOverflow("too long"), "this is too long for the judge; give it less"),
        ("I cannot say.", "the judge's verdict cannot be read; ask again, or differently"),
    ],
)
async def test_what_goes_wrong_is_an_error_of_the_tool(trouble: str | ModelError, error: str, ask: Ask) -> None:
    judge, _ = tools(*[trouble] * 4)
    with pytest.raises(ToolError) as failed:
        await ask(judge)
    assert str(failed.value) == error
