"""What judge and people prefer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.http.shape import Shape


class RankedConfig(Shape):
    name: str
    config: dict[str, Any] | None
    strength: float
    low: float
    high: float
    win_rate: float
    win_rate_low: float
    win_rate_high: float
    comparisons: int
    wins: int
    ties: int
    losses: int
    group: int = Field(description="Only configurations of one group can be compared; from 1, the largest first")


class Ranking(Shape):
    rows: list[RankedConfig]
    comparisons: int
    bias: float | None
    bias_low: float | None
    bias_high: float | None
    disagreement: float | None
    groups: int = Field(description="Groups of configurations that are connected by comparisons")
    clusters: int = Field(description="Sessions, or users, that the comparisons come from")
    resampled: Literal["user", "session"] = Field(description="What is drawn as one for the intervals")
    note: str | None = Field(description="What cannot be compared, in a sentence; null: everything can")


class Rankings(Shape):
    judge: Ranking
    people: Ranking


class Agreement(Shape):
    cases: int
    share: float | None
    kappa: float | None


class Leaderboard(Rankings):
    agreement: Agreement
    intents: dict[str, Rankings]


class Measured(Shape):
    """A figure with its 95 % interval; null without enough cases."""

    cases: int
    value: float | None
    low: float | None
    high: float | None


class JudgeFigures(Shape):
    agreement: Measured = Field(description="With people's votes: Cohen's kappa")
    disagreement: Measured = Field(description="Share of comparisons whose two orders name different answers")
    first_wins: Measured = Field(description="Of those the share in which the answer that stood first was named")
    length: Measured = Field(description="Slope of the log-odds to win on the logarithm of how much longer it is")
    own_model: Measured = Field(description="Share of decided verdicts that the judge's own model won")
    unread: Measured = Field(description="Share of the grades that could not be had or read")
    warnings: list[str] = Field(description="Why it should not be trusted, and what is not known, in plain words")


class OneJudge(JudgeFigures):
    judge: str


class JudgeReport(JudgeFigures):
    judge: str | None = Field(description="The model that judges now, or several with ` + `; null: nobody judges")
    judges: list[OneJudge] = Field(description="Where several judge, each by itself; what they come to is above")


class JudgedAnswer(Shape):
    answer: str
    model: str | None


class JudgeVoice(Shape):
    """What one of several judges said: a `score`, or a `winner`; neither where it was away or could not be read."""

    model: str
    score: int | None
    winner: Literal["A", "B", "tie"] | None
    words: str


class Verdict(Shape):
    """A grade of one answer, or a comparison of the two to one question."""

    id: str
    kind: Literal["grade", "comparison"]
    time: int = Field(description="When it was given, ms since the epoch")
    query_id: str
    session_id: str
    user_id: str | None = Field(description="Whose question it is; null: the answers are not kept any more")
    query: str | None
    respondent: str | None = Field(description="Whose answer was graded; null: a comparison")
    score: int | None = Field(description="1 to 5; null: a comparison, or the judge's words could not be read")
    winner: Literal["A", "B", "tie"] | None = Field(description="null: a grade")
    score_a: float | None
    score_b: float | None
    rubric: str | None = Field(description="What was looked at; null: a comparison")
    words: str = Field(description="The judge's reasons")
    judges: list[JudgeVoice] = Field(description="Where several judge, what each said")
    answers: dict[str, JudgedAnswer] = Field(description="The answers to the question that are kept, by respondent")


class VerdictPage(Shape):
    verdicts: list[Verdict]
    cursor: str | None = Field(description="Of the next page; null: this is the last")


class ConsentShown(Shape):
    user_id: str
    consent: bool | None = Field(description="null: never asked")


class ExportCount(Shape):
    rows: int
    more: bool = Field(description="There are more of them: counting ends behind the first thousand")
    why: str | None = Field(description="Why there is none, in a sentence; null: there are some")


class ExportCounts(Shape):
    dpo: ExportCount
    kto: ExportCount
    critiques: ExportCount


class PreferenceMessage(Shape):
    """`tool_calls`: of the assistant, `{type, function: {name, arguments}}`; `name`: the tool, of the role `tool`."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] = Field(default=[])
    name: str = ""


class PreferenceRow(Shape):
    """A row of training data: dpo has `chosen` and `rejected`, kto `completion` and `label`, critiques `completion` and
    `score`."""

    prompt: list[PreferenceMessage]
    split: Literal["train", "test"]
    provenance: dict[str, Any]
    chosen: list[PreferenceMessage] = Field(default=[])
    rejected: list[PreferenceMessage] = Field(default=[])
    completion: list[PreferenceMessage] = Field(default=[])
    label: bool = False
    score: int = 0
