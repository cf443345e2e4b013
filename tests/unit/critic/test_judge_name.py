"""The judge's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.cli.settings import CriticConfig
from services.critic.settings import CriticSettings
from shared.llm.settings import JUDGE


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith("LOCAL2_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("old", ["prometheus:7b", "prometheus"])
@pytest.mark.parametrize("settings", [CriticSettings, CriticConfig])
def test_the_old_name_of_the_judge_means_the_one_that_can_be_had(
    settings: type[CriticSettings | CriticConfig], old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings().model == JUDGE == "ggozad/prometheus2"
    monkeypatch.setenv("LOCAL2_CRITIC_MODEL", old)
    assert settings.load("critic").model == JUDGE
    monkeypatch.setenv("LOCAL2_CRITIC_MODEL", "prometheus:8x7b")
    assert settings.load("critic").model == "prometheus:8x7b"


# The environment, and the judge.
DEFAULTS = [
    ("ollama", {}, JUDGE),
    ("ollama with another model", {"LOCAL2_MODEL": "qwen3:8b"}, JUDGE),
    ("gemini", {"LOCAL2_BACKEND": "google_genai", "LOCAL2_MODEL": "gemini-3-flash"}, "gemini-3-flash"),
    ("gemini, the generator's own variable",
     {"LOCAL2_BACKEND": "google_genai", "LOCAL2_MODEL": "x", "LOCAL2_GENERATOR_MODEL": "gemini-3-pro"}, "gemini-3-pro"),
    ("a server of openai's protocol",
     {"LOCAL2_BACKEND": "openai", "LOCAL2_BASE_URL": "http://vllm:8000/v1", "LOCAL2_MODEL": "qwen"}, "qwen"),
    ("a judge that is named",
     {"LOCAL2_BACKEND": "google_genai", "LOCAL2_MODEL": "gemini-3-flash", "LOCAL2_CRITIC_MODEL": "mine"}, "mine"),
    ("a judge at a server of its own",
     {"LOCAL2_BACKEND": "openai", "LOCAL2_BASE_URL": "http://vllm:8000/v1", "LOCAL2_MODEL": "qwen",
      "LOCAL2_CRITIC_BASE_URL": "http://judge:8000/v1"}, JUDGE),
    ("a judge at ollama beside gemini",
     {"LOCAL2_BACKEND": "google_genai", "LOCAL2_MODEL": "gemini-3-flash", "LOCAL2_CRITIC_BACKEND": "ollama"}, JUDGE),
]  # fmt: skip


@pytest.mark.parametrize("settings", [CriticSettings, CriticConfig])
@pytest.mark.parametrize(("environment", "judge"), [row[1:] for row in DEFAULTS], ids=[row[0] for row in DEFAULTS])
def test_default_judge_is_a_model_that_its_server_has(
    settings: type[CriticSettings | CriticConfig],
    environment: dict[str, str],
    judge: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert settings.load("critic").model == judge


def test_default_judge_of_a_file_is_the_generators_model(tmp_path: Path) -> None:
    (tmp_path / "local2.yaml").write_text(
        "defaults: {backend: google_genai}\ngenerator: {model: gemini-3-flash}\n", encoding="utf-8"
    )
    assert CriticSettings.load("critic").model == "gemini-3-flash"


def test_the_old_name_is_understood_at_run_time_too() -> None:
    assert CriticSettings(model="other").update_settings({"model": "prometheus:7b"}).model == JUDGE
