"""The worked example of docs/add-a-tool.md, as it stands there, on the real bus."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from shared.participant.service import Context, open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/add-a-tool.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "world_clock.py"
    path.write_text(blocks("python")[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("services.world_clock", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["services.world_clock"] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["services.world_clock"]


@pytest.fixture
async def asking(settings: Settings) -> AsyncIterator[Context[Settings]]:
    async with open_context("asker", settings) as context:
        yield context


@pytest.fixture
async def worker(example: ModuleType, settings: Settings, asking: Context[Settings]) -> AsyncIterator[None]:
    stop = asyncio.Event()
    shared = settings.model_dump(include={"redis_url", "data_dir", "heartbeat", "drain"})
    running = asyncio.create_task(example.app.run(example.WorldClockSettings(**shared), stop))
    async with asyncio.timeout(10):
        while "world_clock" not in await asking.registry.tools():
            await asyncio.sleep(0.02)
    yield
    stop.set()
    await running


async def call(context: Context[Settings], args: dict[str, Any]) -> Any:
    client = ToolClient(context)
    return await client.call("world_clock", args, call_id=f"c:{args}", caller=Caller(query_id="q"), timeout=5)


@pytest.mark.usefixtures("worker")
async def test_the_example_answers_over_the_bus(asking: Context[Settings]) -> None:
    outcome = await call(asking, {"zone": "Asia/Tokyo"})
    assert outcome.error is None
    assert outcome.result.startswith("Asia/Tokyo: ")
    assert outcome.data["zone"] == "Asia/Tokyo"
    assert outcome.data["time"].endswith("+09:00")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("args", "error"), [({"zone": "Mars/Olympus"}, "unknown time zone: Mars/Olympus"), ({}, "missing zone argument")]
)
async def test_the_examples_errors_are_texts(asking: Context[Settings], args: dict[str, str], error: str) -> None:
    outcome = await call(asking, args)
    assert outcome.error == error
    assert outcome.result == f"[tool error: {error}]"


@pytest.mark.usefixtures("worker")
async def test_what_the_page_says_to_the_model_is_in_the_schema(asking: Context[Settings]) -> None:
    schema = (await asking.registry.tools())["world_clock"]["function"]
    assert "what time is it in Tokyo" in schema["description"]
    assert schema["parameters"]["required"] == ["zone"]


def test_the_pages_test_passes(example: ModuleType, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(blocks("python")[1], "add-a-tool.md", "exec"), namespace)
    asyncio.run(namespace["test_an_unknown_zone_is_an_error_that_the_model_can_read"]())


def test_the_pages_compose_entry_fits_into_the_compose_file() -> None:
    entry, _ = blocks("yaml")
    whole = yaml.safe_load((ROOT / "compose.yaml").read_text().replace("\nnetworks:\n", f"\n{entry}\nnetworks:\n", 1))
    added = whole["services"]["world_clock"]
    assert added["read_only"] is True
    assert added["image"] == whole["services"]["web_fetch"]["image"]
    assert added["healthcheck"]["test"][-1] == "world_clock"
    assert added["deploy"]["resources"]["limits"]["memory"]
