"""Settings of knowledge."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr, field_validator

from shared.llm.preemption import PreemptionSettings
from shared.llm.settings import BackendSettings
from shared.participant.settings import Settings, kept_days

EMBEDDED = "sqlite"
OLD_SUFFIX = ".lbug"
SERVERS = ("bolt://", "bolt+s://", "bolt+ssc://", "neo4j://", "neo4j+s://", "neo4j+ssc://")


class KnowledgeSettings(BackendSettings, PreemptionSettings):
    """`backend` and its address are those of the model that reads facts."""

    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "extract", "model", "n_results", "hops", "concurrency", "extract_timeout", "yield_above", "yield_rest",
        "yield_seconds", "keep_days_facts",
    }  # fmt: skip

    store: str = Field(
        default=EMBEDDED,
        description="`sqlite`: a file in the data folder, for one replica; or the Bolt address of your graph server",
    )
    store_user: str = Field(default="", description="Name at the graph server")
    store_password: SecretStr | None = Field(default=None, description="Password at the graph server")
    store_database: str | None = Field(default=None, description="Database of the graph server; unset: its usual one")
    store_timeout: float = Field(default=10.0, gt=0, le=300, description="Seconds to wait for the graph server")
    store_path: Path | None = Field(
        default=None, description="File of the embedded database; unset: knowledge.sqlite in the data folder"
    )
    extract: bool = Field(default=True, description="Read facts from what is said")
    model: str = Field(default="gemma4:e4b", min_length=1, description="Model that reads facts")
    extract_timeout: float = Field(default=60.0, gt=0, le=600, description="Seconds for reading a turn")
    n_results: int = Field(default=20, ge=1, le=200, description="Most facts given to the model")
    hops: int = Field(
        default=2, ge=1, le=2, description="1: facts about what is asked for; 2: also about what those name"
    )
    concurrency: int = Field(default=24, ge=10, description="Messages handled at the same time by one replica")
    keep_days_facts: int = kept_days(
        "What facts were read from is forgotten after so many days, but what a person has entered"
    )
    demo: bool = Field(default=False, description="Set by `local2 run` when the demonstration model answers")

    @field_validator("store")
    @classmethod
    def _embedded_or_server(cls, value: str) -> str:
        if value == "ladybug":
            # The embedded store of older releases, whose graph is migrated.
            return EMBEDDED
        if value != EMBEDDED and not (value.startswith(SERVERS) and value.partition("://")[2].strip("/")):
            raise ValueError(f"{value!r} is neither {EMBEDDED} nor the address of a server, such as bolt://graph:7687")
        return value

    @property
    def path(self) -> Path:
        """The file of the embedded database."""
        path = (self.store_path or self.data_dir / "knowledge.sqlite").absolute()
        return path.with_suffix(".sqlite") if path.suffix == OLD_SUFFIX else path

    @property
    def old_path(self) -> Path:
        """The file in which older releases kept the embedded graph."""
        return self.path.with_suffix(OLD_SUFFIX)

    @property
    def by_model(self) -> bool:
        """Whether a model reads facts; the demonstration model cannot."""
        return self.extract and not self.demo
