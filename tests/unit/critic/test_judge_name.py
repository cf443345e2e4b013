"""The judge's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.cli.settings import CriticWish
from services.critic.settings import CriticSettings
from shared.llm.settings import JUDGE


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith("LOCAL2_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("old", ["prometheus:7b", "prometheus"])
@pytest.mark.parametrize("settings", [CriticSettings, CriticWish])
def test_the_old_name_of_the_judge_means_the_one_that_can_be_had(
    settings: type[CriticSettings | CriticWish], old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings().model == JUDGE == "ggozad/prometheus2"
    monkeypatch.setenv("LOCAL2_CRITIC_MODEL", old)
    assert settings.load("critic").model == JUDGE
    monkeypatch.setenv("LOCAL2_CRITIC_MODEL", "prometheus:8x7b")
    assert settings.load("critic").model == "prometheus:8x7b"


def test_the_old_name_is_understood_at_run_time_too() -> None:
    assert CriticSettings(model="other").update_settings({"model": "prometheus:7b"}).model == JUDGE
