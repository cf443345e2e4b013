"""Settings of the critic."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from services.critic.rubrics import check_choice, load_rubrics
from shared.errors import SettingsError
from shared.llm.preemption import PreemptionSettings
from shared.llm.settings import JudgeName, JudgeSettings
from shared.participant.settings import Settings

# Calls of the judge's tools that one replica runs at the same time.
_TOOL_CALLS = 4


class CriticSettings(JudgeSettings, PreemptionSettings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "model", "temperature", "grade_timeout", "load_timeout", "attempts", "skip_tool_answers", "judge_one_in",
        "pairwise_buffer", "rubrics", "concurrency", "yield_above", "yield_rest", "yield_seconds",
        "leave_ungraded_above", "judge_within", "judges",
    }  # fmt: skip

    judges: list[JudgeName] = Field(
        default=[],
        max_length=9,
        json_schema_extra={"uniqueItems": True},
        description="Models at the backend that judge together, each asked for itself: the middle one of their grades, "
        "the winner that most of them name; empty: `model` alone",
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="Sampling of the judge")
    grade_timeout: float = Field(default=30.0, gt=0, le=600, description="Longest time for one judgement, in seconds")
    load_timeout: float = Field(
        default=300.0,
        ge=0,
        le=3600,
        description="Seconds more until the judge's first word: its server may have to load it",
    )
    attempts: int = Field(default=3, ge=1, le=10, description="Judgements asked for until one can be read")
    patience: float = Field(
        default=600.0, ge=0, description="How long a judge that cannot be reached is waited for, in seconds"
    )
    skip_tool_answers: bool = Field(default=True, description="Leave answers that used tools ungraded")
    judge_one_in: int = Field(default=1, ge=1, le=10_000, description="Judge one query in so many")
    leave_ungraded_above: int | None = Field(
        default=1_000,
        ge=1,
        description="The answers to the oldest questions are left ungraded while more than so many wait for the judge; "
        "null: never",
    )
    judge_within: float | None = Field(
        default=3_600.0,
        gt=0,
        description="Answers that have waited longer than so many seconds are left ungraded; null: however long",
    )
    pairwise_buffer: int = Field(default=100, ge=1, le=10_000, description="Answers that wait for their counterpart")
    rubrics: dict[str, str] = Field(
        default={"web_search": "style", "web_fetch": "style", "save_memory": "clarity", "save_topic": "clarity"},
        description="Which rubric fits a turn that used a tool; the default one is `realistic`",
    )
    rubrics_dir: Path | None = Field(default=None, description="Folder of further rubrics, NAME.txt each")
    concurrency: int = Field(default=1, ge=1, le=64, description="Answers judged at the same time by one replica")

    @property
    def jury(self) -> list[str]:
        """Who judges."""
        return self.judges or [self.model]

    @property
    def slots_in_all(self) -> int:
        """Grading waits for a quiet moment; who asks the judge by a tool does not wait behind it."""
        return self.concurrency + _TOOL_CALLS

    @model_validator(mode="after")
    def _rubrics_and_judges(self) -> Self:
        """Raises SettingsError: an update at run time is refused as well, and one of earlier days left out."""
        check_choice(self.rubrics, load_rubrics(self.rubrics_dir))
        if twice := sorted({name for name in self.judges if self.judges.count(name) > 1}):
            raise SettingsError(f"judges: {', '.join(twice)} is named twice; each judge has one voice")
        return self
