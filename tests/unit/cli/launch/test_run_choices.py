"""What `local2 run` decides before anything is started."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.cli.launch.models import Wanted, choose_model, demo_env, instead_of_demo, late_model
from services.cli.launch.plan import PARTICIPANTS, RunOptions, participants
from services.cli.launch.probes import choose_search, port_state, writable
from services.cli.launch.pull_view import PullView
from services.cli.launch.run import tell_what_lacks
from services.cli.launch.run_lock import UnusableFolder, run_lock
from services.cli.settings import ClientSettings, McpConfig, ModelConfig, SearchConfig
from services.cli.words import typed
from services.gateway.settings import GatewaySettings
from shared.errors import SettingsError
from shared.llm.ollama_admin import PullProgress
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import Script

NOWHERE = "http://127.0.0.1:9"
OPTIONS = RunOptions(Path("data"), api_port=9000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ignored(_model: str, _part: PullProgress) -> None:
    """A download nobody watches."""


async def chosen(
    config: ModelConfig, *models: str, judge: str | None = None, named: bool = False
) -> tuple[bool, str, list[str]]:
    said: list[str] = []
    with PullView(said.append, None) as progress:
        choice = await choose_model(config, Wanted(models or [config.model], judge, named), said.append, progress)
    assert choice.away == choice.notes[0].endswith("; waiting for it")
    return choice.demo, "\n".join(choice.notes), said


async def test_a_model_that_ollama_has_is_used_as_it_is() -> None:
    async with ScriptedModelServer(Script(models={"gemma4:e4b": []})) as server:
        demo, notes, said = await chosen(ModelConfig(ollama_host=server.url))
    assert (demo, notes, said) == (False, f"model gemma4:e4b from Ollama at {server.url}", [])


async def test_a_missing_model_is_pulled_and_the_progress_is_told() -> None:
    async with ScriptedModelServer(Script(models={"other": []})) as server:
        demo, notes, said = await chosen(ModelConfig(ollama_host=server.url), "gemma4:e4b", "gemma4:e4b")
    assert not demo
    assert "pulled now" in notes
    assert said[0] == "Ollama does not have gemma4:e4b yet: pulling it"
    assert [line.rsplit(" ", 2)[1] for line in said[1:]] == ["0", "50", "100"]


async def test_a_missing_judge_is_named_and_not_waited_for() -> None:
    async with ScriptedModelServer(Script(models={"gemma4:e4b": []})) as server:
        config = ModelConfig(ollama_host=server.url)
        _, without, said = await chosen(config, judge="ggozad/prometheus2")
        _, there, _ = await chosen(config, judge="gemma4:e4b")
    assert without.endswith("get it with: ollama pull ggozad/prometheus2")
    assert (said, "judge" in there) == ([], False)


async def test_a_pull_that_fails_shows_the_exact_command() -> None:
    async with ScriptedModelServer(Script(models={"other": []})) as server:
        demo, notes, _ = await chosen(ModelConfig(ollama_host=server.url, model="nosuch:1b"))
    assert not demo
    assert notes.endswith("get it with: ollama pull nosuch:1b")


async def test_without_ollama_the_demonstration_model_is_chosen() -> None:
    demo, notes, _ = await chosen(ModelConfig(ollama_host=NOWHERE))
    assert (demo, notes) == (True, "Ollama does not answer at http://127.0.0.1:9")


async def test_an_ollama_that_was_named_is_waited_for_and_never_replaced_by_the_demonstration_model() -> None:
    demo, notes, _ = await chosen(ModelConfig(ollama_host=NOWHERE), named=True)
    assert not demo
    assert notes.startswith("Ollama does not answer at http://127.0.0.1:9 (")
    assert notes.endswith("; start it with: ollama serve; waiting for it")


async def test_another_program_at_ollamas_address_is_waited_for_too(
    loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer({"detail": "sign in"}, 401))

    loopback_gateway.play = play
    demo, notes, _ = await chosen(ModelConfig(ollama_host=f"127.0.0.1:{loopback_gateway.port}"))
    assert (demo, notes.endswith("; waiting for it")) == (False, True)
    assert "OLLAMA_API_KEY" in notes


@pytest.mark.parametrize(
    ("environment", "file", "named"),
    [
        ({}, "", False),
        ({"OLLAMA_HOST": "gpu-box"}, "", True),
        ({"LOCAL2_GENERATOR_OLLAMA_HOST": "gpu-box"}, "", True),
        ({"LOCAL2_MODEL": "qwen3:8b"}, "", True),
        ({"LOCAL2_BACKEND": "ollama"}, "", True),
        ({"OLLAMA_HOST": "", "LOCAL2_NUM_CTX": "9000"}, "", False),
        ({}, "generator: {model: qwen3:8b}", True),
        ({}, "defaults: {ollama_host: gpu-box}", True),
        ({}, "critic: {ollama_host: gpu-box}", False),
    ],
)
def test_a_server_or_a_model_is_named_by_any_setting(
    environment: dict[str, str], file: str, named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith(("LOCAL2_", "OLLAMA_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "local2.yaml").write_text(file)
    assert ModelConfig.load("generator").named == named


async def test_an_ollama_that_comes_later_is_given_what_it_lacks() -> None:
    said: list[str] = []
    port = free_port()
    config = ModelConfig(ollama_host=f"http://127.0.0.1:{port}")
    with PullView(said.append, None) as progress:
        waiting = asyncio.create_task(
            late_model(config, Wanted(["gemma4:e4b"], "judge:7b"), said.append, progress, 0.01)
        )
        await asyncio.sleep(0)
        assert not said
        async with ScriptedModelServer(Script(models={"other": []}), port=port):
            await asyncio.wait_for(waiting, 60)
    assert said[0] == f"Ollama answers now at http://127.0.0.1:{port}"
    assert said[1] == "Ollama does not have gemma4:e4b yet: pulling it"
    assert f"model gemma4:e4b from Ollama at http://127.0.0.1:{port} (pulled now)" in said
    assert said[-1].endswith("get it with: ollama pull judge:7b")


async def test_while_the_demonstration_model_answers_an_ollama_that_comes_is_one_line_that_says_what_to_type() -> None:
    said: list[str] = []
    port = free_port()
    waiting = asyncio.create_task(instead_of_demo(ModelConfig(ollama_host=f"127.0.0.1:{port}"), said.append, 0.01))
    async with ScriptedModelServer(port=port):
        await asyncio.wait_for(waiting, 60)
    (line,) = said
    assert line.startswith(f"Ollama answers now at http://127.0.0.1:{port}; to use it instead of the demonstration")
    assert line.endswith(f"Ctrl-C, then {typed('run')}")


def test_who_has_a_model_server_of_its_own_keeps_it_beside_the_demonstration_model() -> None:
    env = demo_env("http://d", "smol", ["generator", "respondent-b", "memory"])
    specs = {spec.name: spec.env for spec in participants(OPTIONS, "redis://x", env, None)}
    assert "LOCAL2_CRITIC_ATTEMPTS" not in specs["critic"]
    assert not any("BACKEND" in name or "OLLAMA" in name for name in specs["critic"])
    assert (
        specs["memory"]["LOCAL2_MEMORY_OLLAMA_HOST"] == specs["generator"]["LOCAL2_GENERATOR_OLLAMA_HOST"] == "http://d"
    )


def test_the_gateway_listens_where_the_options_say_whatever_its_own_variables_say() -> None:
    gateway = next(s for s in participants(OPTIONS, "redis://x", {}, None) if s.name == "gateway")
    assert gateway.env["LOCAL2_GATEWAY_PORT"] == gateway.env["LOCAL2_API_PORT"] == "9000"


def test_the_gateway_is_told_whose_tools_are_started_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {spec.name: spec for spec in participants(OPTIONS, "redis://x", {}, None)}
    monkeypatch.setenv("LOCAL2_GATEWAY_EXPECTS", specs["gateway"].env["LOCAL2_GATEWAY_EXPECTS"])
    expected = GatewaySettings.load("gateway").expects
    assert expected == ["web_search", "web_fetch", "memory", "knowledge"]
    assert set(expected) <= specs.keys()


async def test_another_backend_is_never_replaced_by_the_demonstration_model() -> None:
    demo, notes, _ = await chosen(ModelConfig(backend="openai", model="m", ollama_host=NOWHERE))
    assert (demo, notes) == (False, "model m from the openai backend")


def test_the_progress_is_a_bar_in_a_terminal() -> None:
    out = io.StringIO()
    with PullView(print, Console(file=out, force_terminal=True, width=100)) as progress:
        progress("gemma4:e4b", PullProgress("pulling manifest", None, None))
        progress("gemma4:e4b", PullProgress("pulling abc", 1_000, 500))
    assert "gemma4:e4b: pulling abc" in out.getvalue()


async def test_search_is_the_one_asked_for_then_the_configured_then_the_one_that_is_there(
    loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer({}))

    loopback_gateway.play = play
    there, away = f"http://127.0.0.1:{loopback_gateway.port}", NOWHERE
    keys: dict[str, Any] = {"brave_api_key": "b", "tavily_api_key": "t"}
    assert (await choose_search(SearchConfig(provider="brave"), "mock")).provider == "mock"
    assert (await choose_search(SearchConfig(provider="brave", searxng_url=there), None)).note == "web search by brave"
    assert (await choose_search(SearchConfig(searxng_url=there, **keys), None)).provider == "searxng"
    assert (await choose_search(SearchConfig(searxng_url=away, **keys), None)).provider == "brave"
    assert (await choose_search(SearchConfig(searxng_url=away, tavily_api_key="t"), None)).provider == "tavily"
    nothing = await choose_search(SearchConfig(searxng_url=away), None)
    assert nothing.provider is None
    assert nothing.note.startswith("no web search: SearXNG does not answer at http://127.0.0.1:9")


def test_one_process_per_participant_with_the_settings_handed_on() -> None:
    specs = {spec.name: spec for spec in participants(OPTIONS, "redis://x", {}, "mock")}
    assert set(specs) == set(PARTICIPANTS) - {"respondent-b", "mcp"}
    for spec in specs.values():
        assert spec.env["LOCAL2_REDIS_URL"] == "redis://x"
        assert spec.env["LOCAL2_API_PORT"] == "9000"
        assert Path(spec.env["LOCAL2_DATA_DIR"]).is_absolute()
    assert specs["web_search"].env["LOCAL2_WEB_SEARCH_PROVIDER"] == "mock"
    assert specs["generator"].env["LOCAL2_RESPONDENT_ID"] == "A"


def test_mcp_is_started_where_the_settings_name_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not McpConfig.load("mcp").servers
    (tmp_path / "local2.yaml").write_text("mcp: {servers: {git: uvx mcp-server-git}, timeout: 5}")
    assert McpConfig.load("mcp").servers
    monkeypatch.setenv("LOCAL2_MCP_SERVERS", '{"there": "https://example.com/mcp"}')
    assert list(McpConfig.load("mcp").servers) == ["there"]
    names = [spec.name for spec in participants(replace(OPTIONS, mcp=True), "redis://x", {}, None)]
    assert "mcp" in names
    assert "mcp" not in [spec.name for spec in participants(OPTIONS, "redis://x", {}, None)]


def test_respondent_b_is_the_generator_with_its_own_model_and_temperature() -> None:
    options = RunOptions(Path("d"), model="m:1", respondent_b=True, model_b="m:2", temperature_b=0.7)
    specs = {spec.name: spec for spec in participants(options, "redis://x", {}, None)}
    assert specs["respondent-b"].argv == specs["generator"].argv
    b = specs["respondent-b"].env
    assert (b["LOCAL2_RESPONDENT_ID"], b["LOCAL2_RESPONDENT_B_TEMPERATURE"]) == ("B", "0.7")
    assert (b["LOCAL2_MODEL"], specs["generator"].env["LOCAL2_MODEL"]) == ("m:2", "m:1")
    assert "LOCAL2_WEB_SEARCH_PROVIDER" not in specs["web_search"].env


def test_memory_embeds_with_what_the_demonstration_model_has() -> None:
    demo = {spec.name: spec for spec in participants(OPTIONS, "redis://x", demo_env("http://d", "smol"), None)}
    assert demo["memory"].env["LOCAL2_MEMORY_EMBEDDING_MODEL"] == "all-minilm"
    assert demo["memory"].env["LOCAL2_OLLAMA_HOST"] == "http://d"
    real = {spec.name: spec for spec in participants(OPTIONS, "redis://x", {}, None)}
    assert "LOCAL2_MEMORY_EMBEDDING_MODEL" not in real["memory"].env


def test_the_demonstration_model_wins_over_a_model_that_nobody_can_serve() -> None:
    options = RunOptions(Path("d"), model="m:1", respondent_b=True, model_b="m:2")
    specs = {s.name: s for s in participants(options, "redis://x", demo_env("http://127.0.0.1:5", "tiny"), None)}
    for name in ("generator", "respondent-b"):
        env = specs[name].env
        assert {env["LOCAL2_MODEL"], env["LOCAL2_GENERATOR_MODEL"], env["LOCAL2_RESPONDENT_B_MODEL"]} == {"tiny"}
        assert (env["OLLAMA_HOST"], env["LOCAL2_DEMO"]) == ("http://127.0.0.1:5", "1")


async def test_a_port_is_free_taken_or_a_gateways(loopback_gateway: Any, json_answer: Callable[..., bytes]) -> None:
    answer: dict[str, Any] = {}

    async def play(_heard: Any, writer: Any) -> None:
        writer.write(json_answer(answer))

    loopback_gateway.play = play
    assert (await port_state("127.0.0.1", loopback_gateway.port)).state == "taken"
    answer["parts"] = {"bus": {"ok": True}}
    assert (await port_state("127.0.0.1", loopback_gateway.port)).state == "gateway"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert (await port_state("127.0.0.1", port)).state == "free"
    assert (await port_state("192.0.2.1", port)).state == "refused"


def test_run_on_a_port_in_use_ends_with_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[4])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "services.cli", "run", "--headless", "--api-port", str(port)]
        env = {**os.environ, "PYTHONPATH": root}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use by another program; choose another port" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / ".local2").iterdir()} == {"crew.lock", "run.lock"}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        pytest.param({"LOCAL2_REDIS_URL": "redis:/here"}, "LOCAL2_REDIS_URL cannot be read; expected: ", id="URL"),
        pytest.param(
            {"LOCAL2_REDIS_URL": "redis://127.0.0.1:9/one"}, "LOCAL2_REDIS_URL has a database that is not a number",
            id="database",
        ),
        pytest.param(
            {"LOCAL2_BACKEND": "google_genai", "GEMINI_API_KEY": "k"},
            "LOCAL2_BACKEND=google_genai has no default model: name one in LOCAL2_MODEL", id="Gemini without a model",
        ),
    ],
)  # fmt: skip
def test_run_with_a_setting_that_cannot_work_starts_nothing(
    variables: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), **variables}
    command = [sys.executable, "-m", "services.cli", "run", "--headless", "--api-port", str(free_port())]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"local2: {sentence}")


def test_the_key_is_the_given_one_else_the_admins_else_the_one_in_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("from-file\n")
    assert ClientSettings(data_dir=tmp_path, api_key="a", admin_key="b").key() == "a"
    assert ClientSettings(data_dir=tmp_path, admin_key="b").key() == "b"
    assert ClientSettings(data_dir=tmp_path).key() == "from-file"
    assert ClientSettings(data_dir=tmp_path / "none").key() is None
    (tmp_path / "admin.key").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot be read"):
        ClientSettings(data_dir=tmp_path).key()


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ({}, "http://127.0.0.1:8765"),
        ({"api_host": "0.0.0.0", "api_port": 9}, "http://127.0.0.1:9"),
        ({"api_host": "::1"}, "http://[::1]:8765"),
        ({"api_url": "https://host.example/local2/"}, "https://host.example/local2"),
    ],
)
def test_where_the_api_is(values: dict[str, Any], url: str) -> None:
    assert ClientSettings(**values).base_url == url


def test_the_gateways_own_names_of_host_and_port_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_GATEWAY_PORT", "9123")
    monkeypatch.setenv("LOCAL2_API_HOST", "127.0.0.2")
    assert ClientSettings.load("cli").base_url == "http://127.0.0.2:9123"


@pytest.mark.parametrize("command", [["run", "--headless", "--data-dir"], ["doctor"]])
def test_a_data_folder_that_cannot_be_made_is_one_sentence(command: list[str], tmp_path: Path) -> None:
    # Below a file nobody can make a folder, not even the superuser.
    (tmp_path / "file").write_text("x")
    folder = str(tmp_path / "file" / "data")
    whole = [sys.executable, "-m", "services.cli", *command, *([folder] if command[0] == "run" else [])]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "LOCAL2_DATA_DIR": folder}
    done = subprocess.run(whole, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    if command[0] == "run":
        assert done.returncode == 2
        assert done.stderr.startswith(f"local2: the data folder {folder} cannot be used: ")
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 1
        assert "MISSING data folder: " in done.stdout


def test_a_folder_in_which_nothing_can_be_made_is_found_out_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writable(tmp_path / "new" / "data") is None
    assert list(tmp_path.iterdir()) == []

    def refused(*_args: object, **_named: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("services.cli.launch.probes.tempfile.mkdtemp", refused)
    assert writable(tmp_path / "new") == f"nothing can be made in {tmp_path} (Read-only file system)"


def test_a_disk_without_room_is_found_out_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("services.cli.launch.probes.os.fsync", full)
    assert writable(tmp_path / "new") == f"nothing can be made in {tmp_path} (No space left on device)"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leads", ["nowhere", "link"])
def test_a_link_that_leads_nowhere_is_told(tmp_path: Path, leads: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / leads)
    assert writable(tmp_path / "link") == f"{tmp_path / 'link'} is a link that leads nowhere"
    (tmp_path / "whole").symlink_to(tmp_path)
    assert writable(tmp_path / "whole") is None


async def test_a_lock_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(UnusableFolder, match="cannot be used: Is a directory"):
        async with run_lock(tmp_path):
            pass


async def test_what_a_stack_does_without_is_said_once_and_when_it_is_there_again(
    loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    lacking = {"memory": {"ok": False, "reason": "no embeddings"}}
    passing = {"memory": {"ok": False, "reason": "the store is being read"}}
    looks: list[tuple[dict[str, Any], int]] = [(passing, 200), (lacking, 200), (lacking, 200), (lacking, 200)]
    looks += [(lacking, 503), ({}, 200), ({}, 200), ({}, 200)]
    stop, said = asyncio.Event(), list[str]()

    async def play(_heard: object, writer: asyncio.StreamWriter) -> None:
        parts, status = looks.pop(0) if looks else ({}, 200)
        writer.write(json_answer({"parts": parts}, status))
        if not looks:
            stop.set()

    loopback_gateway.play = play
    url = f"http://127.0.0.1:{loopback_gateway.port}"
    await asyncio.wait_for(tell_what_lacks(url, said.append, stop, look=0.05), 60)
    assert said == ["it answers, without all of its memory: no embeddings", "nothing is missing any more"]
