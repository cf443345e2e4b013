"""What judge and people prefer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.shapes.shape import Shape


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


class ConsentShown(Shape):
    user_id: str
    consent: bool | None = Field(description="null: never asked")


class PreferenceMessage(Shape):
    role: str
    content: str


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
