"""Which environment variable counts, over every setting of every participant."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from services.cli.settings import ClientSettings
from services.critic.settings import CriticSettings
from services.gateway.settings import GatewaySettings
from services.generator.settings import GeneratorSettings
from services.knowledge.settings import KnowledgeSettings
from services.memory.settings import MemorySettings
from services.reward.settings import RewardSettings
from services.web_fetch.service import WebFetchSettings
from services.web_search.service import WebSearchSettings
from shared.participant.settings import Environment, Settings

ROOT = Path(__file__).parents[3]
CLASSES: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "generator": GeneratorSettings,
    "respondent-b": GeneratorSettings,
    "critic": CriticSettings,
    "memory": MemorySettings,
    "knowledge": KnowledgeSettings,
    "reward": RewardSettings,
    "web_search": WebSearchSettings,
    "web_fetch": WebFetchSettings,
    "cli": ClientSettings,
}
FIELDS = [(name, field) for name, settings in CLASSES.items() for field in settings.model_fields]
# General names that are not `LOCAL2_<FIELD>`, because that would mean something else.
OTHERWISE = {
    ("critic", "model"): [],
    ("gateway", "host"): ["LOCAL2_API_HOST"],
    ("gateway", "port"): ["LOCAL2_API_PORT"],
    ("cli", "api_host"): ["LOCAL2_GATEWAY_HOST", "LOCAL2_API_HOST"],
    ("cli", "api_port"): ["LOCAL2_GATEWAY_PORT", "LOCAL2_API_PORT"],
    **{(name, "backend_api_key"): ["LOCAL2_BACKEND_API_KEY"] for name in CLASSES},
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("participant", "field"), FIELDS)
def test_the_participants_own_name_then_ours_then_those_of_other_programs(
    participant: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CLASSES[participant]
    names = settings.variables(field, participant)
    prefix = f"LOCAL2_{participant.upper().replace('-', '_')}_"
    assert names[0] == f"{prefix}{field.upper()}"
    assert len(names) == len(set(names))
    general = names[1:]
    ours = [name for name in general if name.startswith("LOCAL2_")]
    assert ours == [
        name for name in OTHERWISE.get((participant, field), [f"LOCAL2_{field.upper()}"]) if name != names[0]
    ]
    assert general[: len(ours)] == ours, "our names go before those of other programs"
    # the last is set first: each one set then goes before all that were
    for number, name in enumerate(reversed(names)):
        monkeypatch.setenv(name, f"[{number}]")
        found: dict[str, Any] = {}
        for own in (False, True):
            found |= Environment(settings, participant, own=own).read()
        # what is written as JSON comes as it was meant
        assert found in ({field: [number]}, {field: f"[{number}]"})
    assert list(Environment(settings, participant, own=True).read()) == [field]


def test_no_name_means_two_settings_of_one_participant() -> None:
    for participant, settings in CLASSES.items():
        names = [name for field in settings.model_fields for name in settings.variables(field, participant)]
        assert len(names) == len(set(names)), participant


def test_the_tables_of_the_docs_are_made_from_the_settings() -> None:
    """When they are not: make docs-settings."""
    script = runpy.run_path(str(ROOT / "deploy" / "docs_settings.py"))
    page = script["PAGE"].read_text()
    assert script["filled"](page) == page
    for participant, field in FIELDS:
        general = CLASSES[participant].variables(field, participant)[1:]
        assert all(f"`{name}`" in page for name in general), (participant, field)
