"""The doctor where nothing is there, and where something is."""

from __future__ import annotations

import ctypes
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import doctor
from services.cli.commands.doctor import World, abilities, examine
from services.cli.launch.redis_servers import server_binary
from services.cli.settings import ClientSettings, CriticConfig, ModelConfig, SearchConfig
from shared.testing.model_server import ScriptedModelServer

NOWHERE = "http://127.0.0.1:9"


def world(tmp_path: Path, **more: Any) -> World:
    values: dict[str, Any] = {
        "client": ClientSettings(data_dir=tmp_path, api_port=free_port()),
        "model": ModelConfig(ollama_host=NOWHERE),
        "search": SearchConfig(searxng_url=NOWHERE),
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


@pytest.mark.usefixtures("no_wheels")
async def test_where_nothing_is_reachable_everything_missing_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server_binary.cache_clear()
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
            model=ModelConfig(backend="openai", base_url=f"{NOWHERE}/v1", model="m"),
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
        findings = await doctor.model(world(tmp_path, model=ModelConfig(ollama_host=server.url)))
        lacking = await doctor.model(world(tmp_path, model=ModelConfig(ollama_host=server.url, model="llama4")))
    said = {finding.about.strip(): finding.text for finding in findings}
    assert said["gemma4:e4b"] == "tools: yes, thinking: yes (the one to be used)"
    assert said["ggozad/prometheus2:latest"] == "tools: no, thinking: no"
    assert [(f.level, f.remedy) for f in lacking if f.about == "model"] == [
        ("note", "ollama pull llama4, or LOCAL2_MODEL=gemma4:e4b, which is there")
    ]
    assert said["embedding model"].startswith("Ollama does not have nomic-embed-text")
    assert "judge" not in said


async def test_a_judge_that_ollama_does_not_have_is_named_unless_it_is_elsewhere(tmp_path: Path) -> None:
    from shared.testing.script import Script

    async with ScriptedModelServer(Script(models={"gemma4:e4b": [], "nomic-embed-text:latest": []})) as server:
        here = ModelConfig(ollama_host=server.url)
        found = await doctor.model(world(tmp_path, model=here))
        elsewhere = await doctor.model(world(tmp_path, model=here, critic=CriticConfig(backend="openai")))
    (judge,) = [f for f in found if f.level != "ok"]
    assert (judge.about, judge.level) == ("judge", "note")
    assert judge.remedy.startswith("ollama pull ggozad/prometheus2")
    assert all(f.level == "ok" for f in elsewhere)


async def test_an_openai_server_without_the_model_names_those_it_has(tmp_path: Path) -> None:
    async with ScriptedModelServer() as server:
        config = ModelConfig(backend="openai", base_url=f"{server.url}/v1", model="nosuch")
        (finding,) = await doctor.model(world(tmp_path, model=config))
        good = ModelConfig(backend="openai", base_url=f"{server.url}/v1", model="gemma4:e4b")
        (found,) = await doctor.model(world(tmp_path, model=good))
    assert (finding.level, found.level) == ("missing", "ok")
    assert "gemma4:e4b" in finding.remedy


async def test_a_searxng_without_json_says_which_setting_to_change(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer({}, 403))

    loopback_gateway.play = play
    config = SearchConfig(searxng_url=f"http://127.0.0.1:{loopback_gateway.port}")
    (finding,) = await doctor.search(world(tmp_path, search=config))
    assert "add `json` to search.formats" in finding.text


async def test_a_provider_without_its_key_is_missing(tmp_path: Path) -> None:
    (finding,) = await doctor.search(world(tmp_path, search=SearchConfig(provider="brave")))
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
    assert "MISSING redis: the server of LOCAL2_REDIS_URL cannot be used" in done.stdout


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
    part["note"] = "the model runs on the CPU, though its host has an NVIDIA GPU"
    (found,) = [f for f in await examine(at) if f.about == "model"]
    assert (found.level, found.remedy) == ("note", part["note"])
    part["demo"] = True
    (found,) = [f for f in await examine(at) if f.about == "model"]
    assert (found.level, "the demonstration model" in found.text) == ("note", True)
    part |= {"ok": False, "reason": "it does not answer"}
    (found,) = [f for f in await examine(at) if f.about == "model"]
    assert (found.level, found.text) == (
        "missing",
        "the running stack's big:70b (openai) is waited for: it does not answer",
    )


class Stack:
    """The answers of a running gateway, by path; other paths are a 404."""

    def __init__(self, json_answer: Callable[..., bytes], **more: Any) -> None:
        self._json = json_answer
        model = {"ok": True, "backend": "openai", "model": "big:70b", "demo": False}
        facts: dict[str, dict[str, Any]] = {
            "generator": {"server": "http://gpu-box:8000"},
            "memory": {"embedding_model": "e5", "embedding_in_use": "e5", "embedding_ok": True},
            "critic": {"model": "judge:7b", "backend": "openai", "backend_ok": True},
            "web_search": {},
            **more.pop("facts", {}),
        }
        rows = [{"name": name, "replicas": [{"facts": one}]} for name, one in facts.items() if one is not None]
        values = {"provider": "mock", "searxng_url": "http://search:8080", **more.pop("search", {})}
        parts = {"bus": {"ok": True}, "model": model, **more.pop("parts", {})}
        self.answers: dict[str, tuple[Any, int]] = {
            "/health": ({"status": "ok"}, 200),
            "/ready": ({"status": "x", "parts": parts}, 200 if all(p["ok"] for p in parts.values()) else 503),
            "/participants": ({"participants": rows}, 200),
            "/participants/web_search/settings": ({"values": values}, 200),
            "/tools/web_search/call": ({"result": "", "error": more.pop("error", None)}, 200),
        }
        if more.pop("role", "admin") == "user":
            refusal = {"error": {"code": "forbidden", "message": "administrators only"}}
            self.answers["/participants/web_search/settings"] = (refusal, 403)
            presence = [{"name": name, "replicas": [{"state": "ready"}]} for name in facts]
            self.answers["/participants"] = ({"participants": presence}, 200)

    async def play(self, heard: Any, writer: Any) -> None:
        value, status = self.answers.get(heard.path.partition("?")[0], ({}, 404))
        writer.write(self._json(value, status))


@pytest.mark.parametrize(
    ("stack", "about", "level", "text"),
    [
        ({}, "web search", "note", "the running stack searches by mock: canned hits"),
        ({"search": {"provider": "brave"}}, "web search", "ok", "the running stack searches by brave"),
        ({"search": {"provider": "searxng"}}, "web search", "ok", "by SearXNG at http://search:8080"),
        ({"search": {"provider": "searxng"}, "error": "no answer"}, "web search", "note", "asks SearXNG: no answer"),
        ({"facts": {"web_search": None}}, "web search", "note", "no web_search of the running stack is there"),
        ({"role": "user"}, "web search", "note", "for an administrator's key only"),
        ({}, "model", "ok", "the running stack answers with big:70b"),
        ({}, "redis", "ok", "the bus of the running stack answers"),
        ({"parts": {"bus": {"ok": False, "reason": "full"}}}, "redis", "missing", "the running stack: full"),
        ({}, "embedding model", "ok", "memory of the running stack uses e5"),
        (
            {"facts": {"memory": {"embedding_model": "e5", "embedding_ok": False, "degraded": "e5: 404"}}},
            "embedding model", "note", "memory of the running stack: e5: 404",
        ),
        ({}, "judge", "ok", "the critic of the running stack grades with judge:7b (openai)"),
        (
            {"facts": {"critic": {"model": "j", "backend_ok": False, "backend_reason": "away"}}},
            "judge", "note", "waits for j: away",
        ),
    ],
)  # fmt: skip
async def test_doctor_with_a_running_stack_reports_its_facts(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes], stack: dict[str, Any], about: str,
    level: str, text: str,
) -> None:  # fmt: skip
    loopback_gateway.play = Stack(json_answer, **stack).play
    # The servers of this environment do not exist.
    here = world(tmp_path, client=loopback_gateway.settings(data_dir=tmp_path), redis_url="redis://127.0.0.1:9/0")
    found = await examine(here)
    (one,) = [finding for finding in found if finding.about == about]
    assert one.level == level
    assert text in one.text
    assert not any("127.0.0.1:9" in finding.text for finding in found)


def ollama_says(*models: str) -> dict[str, Any]:
    return {"models": [{"name": name, "model": name} for name in models]}


@pytest.mark.parametrize(
    ("host", "named", "advice"),
    [
        # the usual address, where nobody has named one: Ollama is to be started, or the demonstration model answers
        (NOWHERE, False, {"ollama": "start it with: ollama serve"}),
        # one that was named is never replaced
        (NOWHERE, True, {"ollama": "start it with: ollama serve", "model": "start it with: ollama serve"}),
        ("http://no-such-host.invalid:11434", True, {"ollama": "check the spelling of the host in OLLAMA_HOST"}),
    ],
)
async def test_the_advice_on_an_ollama_that_does_not_answer_fits_its_address(
    tmp_path: Path, host: str, named: bool, advice: dict[str, str]
) -> None:
    config = ModelConfig(ollama_host=host)
    findings = await doctor.model(world(tmp_path, model=config if named else _unnamed(config)))
    said = {finding.about: finding for finding in findings}
    assert {about: said[about].remedy for about in advice} == advice
    assert "waited for" in said["model"].text if named else "waited for" not in said["model"].text


def _unnamed(config: ModelConfig) -> ModelConfig:
    return ModelConfig.model_construct(_fields_set=set(), **dict(config))


@pytest.mark.parametrize(
    ("status", "body", "headers", "level", "remedy"),
    [
        (401, {"error": "unauthorized"}, {}, "missing", "set OLLAMA_API_KEY to a key of the server"),
        (404, {"detail": "Not Found"}, {}, "missing", "check OLLAMA_HOST, which makes it http://127.0.0.1:"),
        (200, {"status": "ok"}, {}, "missing", "set OLLAMA_HOST to the address of Ollama"),
        (200, {"error": "no"}, {}, "missing", "see its log"),
        (200, ollama_says(), {}, "note", "ollama pull gemma4:e4b"),
        (200, ollama_says("qwen3:8b"), {}, "note", "ollama pull gemma4:e4b, or LOCAL2_MODEL=qwen3:8b, which is there"),
        (200, ollama_says("gemma4:e4b"), {}, "ok", ""),
    ],
)
async def test_the_advice_fits_what_answers_at_ollamas_address(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes], status: int, body: dict[str, Any],
    headers: dict[str, str], level: str, remedy: str,
) -> None:  # fmt: skip
    async def play(heard: Any, writer: Any) -> None:
        shown = {"capabilities": ["completion", "tools"], "details": {}, "model_info": {"general.architecture": "q",
                 "q.context_length": 8192}, "version": "0.33.0"}  # fmt: skip
        # the list comes first; what follows is about one model
        writer.write(json_answer(body if "/api/tags" in heard.path else shown, status))

    loopback_gateway.play = play
    config = ModelConfig(ollama_host=f"http://127.0.0.1:{loopback_gateway.port}")
    (found,) = [f for f in await doctor.model(world(tmp_path, model=config)) if f.about == "model"]
    assert found.level == level
    assert found.remedy.startswith(remedy)
    assert "ollama serve" not in found.remedy
    if level == "ok":
        assert found.text.endswith("(window 8,192 tokens; can: tools)")


async def test_a_path_in_ollamas_address_is_left_out_and_told(tmp_path: Path) -> None:
    async with ScriptedModelServer() as server:
        findings = await doctor.model(world(tmp_path, model=ModelConfig(ollama_host=f"{server.url}/v1")))
    said = {finding.about: finding for finding in findings}
    assert (said["OLLAMA_HOST"].level, said["OLLAMA_HOST"].remedy) == ("note", f"set OLLAMA_HOST={server.url}")
    assert said["model"].level == "ok"


async def test_a_server_of_the_judges_own_is_looked_at_too(tmp_path: Path) -> None:
    async with ScriptedModelServer() as server:
        there = CriticConfig(backend="openai", base_url=f"{server.url}/v1")
        away = CriticConfig(backend="openai", base_url=f"{NOWHERE}/v1")
        (good,) = await doctor.others(world(tmp_path, critic=there))
        (bad,) = await doctor.others(world(tmp_path, critic=away))
    assert (good.about, good.level) == ("judge", "ok")
    assert (bad.about, bad.level) == ("judge", "note")
    assert bad.remedy == "start that server, or correct LOCAL2_BASE_URL; its own variables begin with LOCAL2_CRITIC_"


async def test_a_gemini_without_a_key_is_told_which_variable_to_set(tmp_path: Path) -> None:
    (found,) = await doctor.model(world(tmp_path, model=ModelConfig(backend="google_genai", model="gemini-x")))
    assert (found.level, found.remedy) == ("missing", "set GEMINI_API_KEY")


async def test_while_the_demonstration_model_answers_an_ollama_that_is_there_is_not_to_be_started(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    part: dict[str, Any] = {"ok": True, "backend": "ollama", "model": "smol", "demo": True}

    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer({"status": "ready", "parts": {"bus": {"ok": True}, "model": part}}))

    loopback_gateway.play = play
    client = loopback_gateway.settings(data_dir=tmp_path)
    async with ScriptedModelServer() as server:
        (there,) = [
            found
            for found in await examine(world(tmp_path, client=client, model=ModelConfig(ollama_host=server.url)))
            if found.about == "model"
        ]
    found = await examine(world(tmp_path, client=client, model=ModelConfig(ollama_host=NOWHERE)))
    (away,) = [one for one in found if one.about == "model"]
    # the demonstration model has a server of its own
    assert "ollama" not in {one.about for one in found}
    assert there.remedy.startswith("Ollama is there now: stop local2 run (Ctrl-C) and start it again")
    assert away.remedy.startswith("start it with: ollama serve; then stop local2 run")


async def test_what_a_running_stack_does_without_is_told(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    parts = {"bus": {"ok": True}, "memory": {"ok": False, "reason": "embedding model m: no such route"}}

    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer({"status": "ready", "parts": parts}))

    loopback_gateway.play = play
    found = await doctor.gateway(world(tmp_path, client=loopback_gateway.settings(data_dir=tmp_path)))
    assert [one.text for one in found if one.level == "note" and one.about == "stack"] == [
        "without all of its memory: embedding model m: no such route"
    ]


async def test_damaged_data_are_missing_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "preferences.sqlite").write_bytes(b"no database" * 1_000)
    (found,) = await doctor.stores(world(tmp_path))
    assert (found.about, found.level) == ("preferences", "missing")
    assert "doctor --repair" in found.remedy
    assert await doctor.stores(world(tmp_path / "new")) == []


async def test_doctor_names_the_package_that_a_setting_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_KNOWLEDGE_STORE", "bolt://graph:7687")
    assert await doctor.packages(world(tmp_path)) == []
    monkeypatch.setitem(sys.modules, "neo4j", None)
    (found,) = await doctor.packages(world(tmp_path))
    assert (found.level, "knowledge-bolt" in found.text) == ("missing", True)
    assert "make extras EXTRAS='knowledge-bolt'" in found.remedy


@pytest.mark.parametrize(("status", "level"), [(401, "missing"), (200, None), (503, None)])
async def test_a_key_that_the_stack_does_not_know_is_told(
    status: int, level: str | None, tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(heard: Any, writer: Any) -> None:
        asked = heard.path.startswith("/sessions")
        writer.write(json_answer({"status": "ready", "parts": {}}, status if asked else 200))

    loopback_gateway.play = play
    found = await doctor.gateway(world(tmp_path, client=loopback_gateway.settings(data_dir=tmp_path)))
    assert [one.level for one in found if one.about == "API key"] == ([level] if level else [])


async def test_a_redis_that_is_full_is_told_with_what_makes_room(
    tmp_path: Path, loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(heard: Any, writer: Any) -> None:
        full = {"bus": {"ok": False, "reason": "the bus is out of memory"}}
        writer.write(json_answer({"status": "x", "parts": full}, 503 if heard.path == "/ready" else 200))

    loopback_gateway.play = play
    found = await doctor.gateway(world(tmp_path, client=loopback_gateway.settings(data_dir=tmp_path)))
    (stack,) = [one for one in found if one.about == "stack"]
    assert stack.level == "missing"
    assert "LOCAL2_REDIS_MEMORY" in stack.remedy


async def test_missing_library_of_the_demonstration_model_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_name: str) -> None:
        raise OSError

    # a default, which no setting names
    config = ModelConfig(ollama_host=NOWHERE)
    config.model_fields_set.clear()
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    assert (await doctor.model(world(tmp_path, model=config)))[-1].level == "note"
    monkeypatch.setattr(ctypes, "CDLL", absent)
    found = (await doctor.model(world(tmp_path, model=config)))[-1]
    assert (found.level, "needs libgomp.so.1" in found.text) == ("missing", True)
    assert "apt-get install libgomp1" in found.remedy
