"""Settings of reward."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shared.participant.settings import Settings, kept_days


class RewardSettings(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {"samples", "patience", "keep_days", "keep_days_preferences"}

    database: Path | None = Field(default=None, description="SQLite file; unset: preferences.sqlite in the data folder")
    concurrency: int = Field(default=8, ge=6, le=64, description="Messages handled at the same time by one replica")
    samples: int = Field(default=1000, ge=50, le=20_000, description="Bootstrap repetitions behind an interval")
    patience: float = Field(
        default=10.0, ge=0, le=600, description="How long a vote waits for the answer it is about, in seconds"
    )
    keep_days: int = kept_days("Answers that nobody compared or rated are removed after so many days")
    keep_days_preferences: int = kept_days(
        "Answers with their grades, comparisons and votes are removed after so many days"
    )

    @property
    def path(self) -> Path:
        return self.database or self.data_dir / "preferences.sqlite"
