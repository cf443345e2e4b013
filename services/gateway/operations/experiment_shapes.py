"""Experiments: another configuration on trial with respondent B."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.gateway.http.shape import Shape


class Configured(Shape):
    """What tells one configuration from another."""

    model: str
    prompt: str = Field(description="The system prompt")
    temperature: float | None = Field(description="null: the model server's own")


class ExperimentSummary(Shape):
    name: str
    state: Literal["starting", "running", "stopping", "stopped", "promoting", "promoted", "reverting", "reverted"]
    started: int = Field(description="ms since the epoch, by the bus's clock")
    ended: int | None = Field(description="null: it still runs")
    a: Configured
    b: Configured
    changed: list[str] = Field(description="Where B differs from A")


class ExperimentList(Shape):
    experiments: list[ExperimentSummary]


class TrialResult(Shape):
    """Decided by a sequential test that may be looked at after every verdict."""

    decision: Literal["better", "worse", "not yet"]
    verdicts: int
    wins: int = Field(description="Of B")
    ties: int
    losses: int
    conversations: int = Field(description="Those with a decided verdict; each counts once")
    share: float | None = Field(description="Of the decided verdicts those that B won, each conversation counted once")
    low: float = Field(description="The confidence sequence of the share")
    high: float
    p_value: float = Field(description="Always valid")
    decided_at: int | None = Field(description="How many verdicts had come when it was decided")
    more: int | None = Field(description="Decided conversations that are still needed if the share stays")


class VoteCounts(Shape):
    positive: int
    negative: int


class ExperimentVotes(Shape):
    a: VoteCounts = Field(description="On A's answers while it ran: nobody votes on B's, which nobody sees")
    promoted: VoteCounts | None = Field(description="On answers with B's configuration since it was promoted")


class Experiment(ExperimentSummary):
    result: TrialResult
    intents: dict[str, TrialResult] = Field(description="By kind of question, each with a seventh of the chance to err")
    votes: ExperimentVotes
    warnings: list[str] = Field(description="What stands in the way of verdicts, or should be known of them")
