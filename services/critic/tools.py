"""The judge as tools: what the model, a committee or a client may ask of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints

from services.critic.judge import Judge
from services.critic.rubrics import DEFAULT, Rubric
from shared.contracts import ToolRequest
from shared.errors import ModelError, ToolError
from shared.llm.port import ContextOverflow
from shared.participant.tool import Tool, ToolResult
from shared.telemetry.logging import get_logger

log = get_logger()

UNAVAILABLE = "judge unavailable"
_TOO_LONG = "this is too long for the judge; give it less"
_UNREADABLE = "the judge's verdict cannot be read; ask again, or differently"
_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100_000)]


class _Args(BaseModel):
    model_config = ConfigDict(populate_by_name=True)


class GradeAnswer(_Args):
    """Have an independent judge grade an answer from 1 (bad) to 5 (very good). Call it only when the user asks for a
    judgement ("how good is this answer?", "grade my reply", "is that a good explanation?"), not for answers of your
    own that nobody doubts."""

    question: _Text = Field(
        validation_alias=AliasChoices("question", "query", "instruction"), description="What was asked"
    )
    answer: _Text = Field(
        validation_alias=AliasChoices("answer", "response"), description="The whole answer that is to be graded"
    )
    reference: str = Field(
        default="", max_length=100_000, description="An answer that would deserve 5, where one is known"
    )


class CompareAnswers(_Args):
    """Have an independent judge say which of two answers to a question is better. Call it when the user wants a choice
    between two texts ("which of these is better?", "A or B?")."""

    question: _Text = Field(
        validation_alias=AliasChoices("question", "query", "instruction"), description="What was asked"
    )
    answer_a: _Text = Field(
        validation_alias=AliasChoices("answer_a", "a", "first"), description="The one answer, whole"
    )
    answer_b: _Text = Field(
        validation_alias=AliasChoices("answer_b", "b", "second"), description="The other answer, whole"
    )
    reference: str = Field(
        default="", max_length=100_000, description="An answer that would deserve 5, where one is known"
    )


class JudgeTools:
    """judge: one that answers at once. rubrics: by name; the default one is used."""

    def __init__(self, judge: Judge, rubrics: dict[str, Rubric]) -> None:
        self._judge = judge
        self._rubric = rubrics[DEFAULT]

    def tools(self, grade_timeout: float) -> list[Tool[Any]]:
        """grade_timeout: seconds for one judgement; a call has time for two, which a comparison needs."""
        return [
            Tool("grade_answer", GradeAnswer, self.grade, timeout=2 * grade_timeout),
            Tool("compare_answers", CompareAnswers, self.compare, timeout=2 * grade_timeout),
        ]

    async def grade(self, args: GradeAnswer, _request: ToolRequest) -> ToolResult:
        try:
            grade = await self._judge.graded(args.question, args.answer, args.reference.strip(), self._rubric)
        except ModelError as exc:
            raise _trouble(exc) from exc
        if grade.score is None:
            raise ToolError(_UNREADABLE)
        data = {"score": grade.score, "feedback": grade.feedback, "rubric": grade.rubric}
        return ToolResult(f"Score: {grade.score}/5\n{grade.feedback}".rstrip(), data)

    async def compare(self, args: CompareAnswers, _request: ToolRequest) -> ToolResult:
        try:
            found = await self._judge.compared(
                args.question, args.answer_a, args.answer_b, args.reference.strip(), self._rubric
            )
        except ModelError as exc:
            raise _trouble(exc) from exc
        if found is None:
            raise ToolError(_UNREADABLE)
        data = {"winner": found.winner, "reason": found.reason, "forward": found.forward, "swapped": found.swapped}
        return ToolResult(f"Winner: {found.winner}\n{found.reason}".rstrip(), data)


def _trouble(exc: ModelError) -> ToolError:
    log.info("critic.tool_failed", reason=str(exc))
    return ToolError(_TOO_LONG if isinstance(exc, ContextOverflow) else UNAVAILABLE)
