"""The bus against the Redis image that compose names, where a Docker engine and the image are at hand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.apps import ProbeSettings, probe
from support.services import announced, running
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient

COMPOSE = Path(__file__).resolve().parents[2] / "compose.yaml"


@pytest.fixture
def redis_image() -> str:
    named: str = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["redis"]["image"]
    image = named.removeprefix("${REDIS_IMAGE:-").removesuffix("}")
    look = ["docker", "image", "inspect", image]
    if shutil.which("docker") is None or subprocess.run(look, capture_output=True).returncode:
        pytest.skip(f"no Docker engine with the image {image} here")
    return image


@pytest.fixture
def container_url(redis_image: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # the container is ours to stop; a reaper would be another image to have
    monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
    ready = LogMessageWaitStrategy("Ready to accept connections").with_startup_timeout(30)
    with DockerContainer(redis_image).with_exposed_ports(6379).waiting_for(ready) as container:
        yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"


async def test_a_tool_is_called_over_the_image_that_compose_names(container_url: str, tmp_path: Path) -> None:
    settings = ProbeSettings(redis_url=container_url, data_dir=tmp_path, heartbeat=0.2, drain=1.0)
    async with running(probe, settings):
        await announced(container_url, "probe")
        async with open_context("asker", settings) as context:
            result = await ToolClient(context).call(
                "probe", {"text": "hello"}, call_id="c1", caller=Caller("1-1"), timeout=5
            )
    assert (result.result, result.error) == ("you said hello", None)
