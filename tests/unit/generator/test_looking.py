"""What a respondent says of its model in the registry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.generator.service import describe_model
from services.generator.settings import GeneratorSettings
from shared.llm.gpu import GpuSetting
from shared.llm.port import ChatModel, ModelFacts


class Model:
    def __init__(self, share: float | None) -> None:
        self.share = share

    async def reachable(self, _model: str) -> str | None:
        return None

    async def facts(self, _model: str) -> ModelFacts:
        return ModelFacts("Ollama", window=2048, on_gpu=self.share)


@pytest.mark.parametrize(
    ("gpu", "share", "said"),
    [("nvidia", 0.0, True), ("nvidia", 1.0, False), ("none", 0.0, False), ("none", 0.5, True), ("amd", None, False)],
)
async def test_a_gpu_that_a_model_does_not_use_is_told(gpu: GpuSetting, share: float | None, said: bool) -> None:
    context = SimpleNamespace(settings=GeneratorSettings(gpu=gpu), facts={})
    await describe_model(cast("Any", context), cast("ChatModel", Model(share)))
    assert bool(context.facts["gpu_note"]) is said
    assert context.facts["model_facts"].get("on_gpu") == share


async def test_the_demonstration_model_needs_none() -> None:
    context = SimpleNamespace(settings=GeneratorSettings(gpu="nvidia", demo=True), facts={})
    await describe_model(cast("Any", context), cast("ChatModel", Model(0.0)))
    assert context.facts["gpu_note"] is None
