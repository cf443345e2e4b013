"""Settings of a respondent: the generator (A) or respondent-b (B)."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from services.generator.identities import UnknownPersona, load_identities
from shared.llm.gpu import GpuSetting
from shared.llm.preemption import PreemptionSettings
from shared.llm.settings import BackendSettings
from shared.participant.settings import Settings


@cache
def default_system_prompt() -> str:
    return files("services.generator").joinpath("prompts/system.md").read_text(encoding="utf-8").strip()


class GeneratorSettings(BackendSettings, PreemptionSettings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "model", "think", "temperature", "max_tokens", "max_tool_iterations", "max_calls", "tool_timeout",
        "first_token_seconds", "timeout_seconds", "concurrency", "history_turns", "compact", "system_prompt",
        "tell_low_grade", "active_personas", "order", "rounds", "parallel", "persona_tool_iterations", "yield_above",
        "yield_rest", "yield_seconds", "answer_one_in", "leave_out_above",
    }  # fmt: skip

    respondent_id: Literal["A", "B"] = Field(default="A", description="A: its answer is shown; B: the shadow")
    agent_id: str = Field(default="", description="Name in events; GeneratorAgent for A, respondent_b for B")
    model: str = Field(default="gemma4:e4b", min_length=1, description="Model name at the backend")
    gpu: GpuSetting = Field(
        default="auto",
        description="The GPU of the model server's host, so that one that is not used is told: nvidia, amd, or none; "
        "here: it is looked for on this machine; auto: that, where the server's address is a loopback one",
    )
    think: bool = Field(default=True, description="Let the model think before it answers, where it can")
    temperature: float | None = Field(default=None, ge=0, le=2, description="Sampling; unset: the backend's own")
    max_tool_iterations: int = Field(default=5, ge=0, le=50, description="Rounds of tool calls per answer")
    max_calls: int = Field(default=16, ge=1, le=1000, description="Tool calls of one message that are run")
    max_tokens: int = Field(default=8192, ge=16, description="Longest answer of one model call, thinking included")
    tool_timeout: float = Field(
        default=15.0,
        gt=0,
        le=600,
        description="Seconds to wait for a tool call. A value that is set bounds every tool; left at its default, a "
        "tool may take the longer time that it announces",
    )
    first_token_seconds: float = Field(
        default=600.0,
        gt=0,
        le=3600,
        description="Longest wait for the model's first token without a sign of life of its server, in seconds; the "
        "model is loaded and the prompt read in it",
    )
    timeout_seconds: float = Field(
        default=120.0, gt=0, le=3600, description="Longest wait from one token of the model to the next, in seconds"
    )
    deadline_seconds: float = Field(default=900.0, gt=0, description="For a query that carries no deadline")
    concurrency: int = Field(default=4, ge=1, le=256, description="Queries answered at the same time by one replica")
    history_turns: int = Field(default=50, ge=0, le=50, description="Turns of a session given to the model")
    compact: bool = Field(
        default=True,
        description="Older turns become a running summary when the history nears the model's context; off, or with "
        "the demonstration model, what does not fit is left out",
    )
    system_prompt: str = Field(default_factory=default_system_prompt, description="What the model is told about itself")
    tell_low_grade: bool = Field(
        default=True, description="The model is told, once, when its last graded answer of a session was graded 1 or 2"
    )
    identities: Path | None = Field(
        default=None, description="YAML file of committee members beside the shipped ones, or in place of some of them"
    )
    active_personas: list[str] = Field(
        default=["Analyst", "Skeptic", "Empath", "Creative", "Pragmatist"],
        max_length=20,
        description="Who deliberates in a committee, unless the query names others; nobody: the answer is as in a chat",
    )
    order: list[str] = Field(
        default=[], max_length=20, description="Who of them speaks first; the others follow as they are listed"
    )
    rounds: int = Field(default=1, ge=1, le=10, description="Rounds of a committee, unless the query says otherwise")
    parallel: bool = Field(
        default=False, description="Members of a round speak at the same time, and hear only the rounds before"
    )
    persona_tool_iterations: int = Field(
        default=3, ge=0, le=50, description="Rounds of tool calls of a committee member in one turn"
    )
    answer_one_in: int = Field(default=1, ge=1, le=10_000, description="Respondent B answers one query in so many")
    leave_out_above: int | None = Field(
        default=20,
        ge=0,
        description="Respondent B leaves queries out while more than so many wait; null: it never does",
    )
    demo: bool = Field(default=False, description="Set by `local2 run` when the demonstration model answers")

    @model_validator(mode="before")
    @classmethod
    def _shadow_samples_differently(cls, values: Any) -> Any:
        """Respondent B's temperature is 0.5 unless it is given; null is the backend's own, as it is for A."""
        if isinstance(values, dict) and values.get("respondent_id") == "B" and "temperature" not in values:
            return {**values, "temperature": 0.5}
        return values

    @field_validator("active_personas", "order")
    @classmethod
    def _members(cls, names: list[str], info: ValidationInfo) -> list[str]:
        """The names as their file has them."""
        try:
            return load_identities(info.data.get("identities")).named(names)
        except UnknownPersona as exc:
            raise ValueError(str(exc)) from exc

    @property
    def members(self) -> list[str]:
        """Who deliberates when a query names nobody."""
        return load_identities(self.identities).in_order(self.active_personas, self.order)

    @property
    def compacts(self) -> bool:
        """Whether older turns are summarised; the demonstration model cannot."""
        return self.compact and not self.demo

    @property
    def name(self) -> str:
        return self.agent_id or ("GeneratorAgent" if self.respondent_id == "A" else "respondent_b")

    @property
    def own_options(self) -> dict[str, Any]:
        """The sampling options that these settings make: what tells this respondent's configuration from others."""
        return {} if self.temperature is None else {"temperature": self.temperature}

    def sampling(self, wanted: dict[str, Any] | None) -> dict[str, Any]:
        """The options of one query; of the client's only what concerns sampling. A follows the client first; B is on
        trial with its own settings, and follows the client in what they leave open."""
        asked = {name: value for name, value in (wanted or {}).items() if name in SAMPLING}
        return {**asked, **self.own_options} if self.respondent_id == "B" else {**self.own_options, **asked}


SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "num_predict", "stop", "repeat_penalty", "presence_penalty",
     "frequency_penalty"}
)  # fmt: skip
