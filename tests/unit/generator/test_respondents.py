"""Who a generator process is, and the settings that it starts with."""

from __future__ import annotations

from typing import Any

import pytest

from services.generator.service import service
from services.generator.settings import GeneratorSettings
from shared.errors import SettingsError

CONTRACT = {
    "backend": "ollama",
    "model": "gemma4:e4b",
    "num_ctx": 32_000,
    "think": True,
    "temperature": None,
    "max_tool_iterations": 5,
    "tool_timeout": 15,
    "timeout_seconds": 120,
    "deadline_seconds": 900,
    "concurrency": 4,
    "history_turns": 50,
}


def test_the_generator_starts_with_the_contracts_settings() -> None:
    settings = GeneratorSettings()
    assert {name: getattr(settings, name) for name in CONTRACT} == CONTRACT
    assert (settings.respondent_id, settings.name) == ("A", "GeneratorAgent")


def test_respondent_b_differs_in_its_name_and_its_sampling_only() -> None:
    settings = GeneratorSettings(respondent_id="B")
    assert {name: getattr(settings, name) for name in CONTRACT} == {**CONTRACT, "temperature": 0.5}
    assert (settings.respondent_id, settings.name) == ("B", "respondent_b")
    assert GeneratorSettings(respondent_id="B", temperature=1.2).temperature == 1.2


def test_a_follows_the_clients_sampling_and_b_its_own_settings_first() -> None:
    asked = {"temperature": 1.0, "top_p": 0.2, "num_predict": 9, "num_ctx": 1}
    a, b = GeneratorSettings(temperature=0.3), GeneratorSettings(respondent_id="B")
    assert a.sampling(asked) == {"temperature": 1.0, "top_p": 0.2, "num_predict": 9}
    assert b.sampling(asked) == {"temperature": 0.5, "top_p": 0.2, "num_predict": 9}
    assert (a.sampling(None), b.sampling({})) == ({"temperature": 0.3}, {"temperature": 0.5})
    assert GeneratorSettings().sampling(None) == {}


@pytest.mark.parametrize(
    ("respondent", "participant"), [(None, "generator"), ("A", "generator"), ("B", "respondent-b")]
)
def test_the_environment_says_which_participant_a_process_is(
    monkeypatch: pytest.MonkeyPatch, respondent: str | None, participant: str
) -> None:
    monkeypatch.delenv("LOCAL2_RESPONDENT_ID", raising=False)
    if respondent:
        monkeypatch.setenv("LOCAL2_RESPONDENT_ID", respondent)
    assert service().participant == participant
    assert GeneratorSettings.load(participant).respondent_id == (respondent or "A")


def test_an_unknown_respondent_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_RESPONDENT_ID", "C")
    with pytest.raises(SettingsError, match="must be A or B"):
        service()


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"model": "x", "temperature": 0.1, "system_prompt": "Be brief."}, True),
        ({"temperature": 2.5}, False),
        ({"model": ""}, False),
        ({"num_ctx": 1_000}, False),
        ({"api_key": "k"}, False),
        ({"max_tool_iterations": -1}, False),
    ],
)
def test_only_run_time_settings_in_range_can_be_changed(values: dict[str, Any], allowed: bool) -> None:
    settings = GeneratorSettings()
    if allowed:
        changed = settings.update_settings(values)
        assert {name: getattr(changed, name) for name in values} == values
        return
    with pytest.raises(SettingsError):
        settings.update_settings(values)


def test_secrets_are_not_among_the_values_shown() -> None:
    settings = GeneratorSettings(api_key="very secret")
    assert "very secret" not in str(settings.runtime_values())
    assert "api_key" not in GeneratorSettings.get_settings_schema()["properties"]


def test_tool_timeout_bounds_every_tool_when_it_is_set() -> None:
    usual = GeneratorSettings()
    assert usual.tool_limit is None
    assert usual.update_settings({"temperature": 0.1}).tool_limit is None
    assert usual.update_settings({"tool_timeout": 15}).tool_limit == 15
    assert GeneratorSettings(tool_timeout=20).update_settings({"temperature": 0.1}).tool_limit == 20
