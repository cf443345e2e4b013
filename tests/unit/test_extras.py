"""Optional packages: a setting that needs a missing one ends in an error that names the extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.launch.extras import missing_extras

ROOT = Path(__file__).parents[2]
# The module that is missing, the use of a setting that needs it, that setting, and the extra that has the module.
MISSING = [
    pytest.param(
        "neo4j",
        "import asyncio; from services.knowledge.bolt import open_bolt;"
        "asyncio.run(open_bolt('bolt://graph:7687', '', '', None, [], 1.0).__aenter__())",
        "LOCAL2_KNOWLEDGE_STORE",
        "knowledge-bolt",
        id="graph server",
    ),
    pytest.param(
        "google.genai",
        "from shared.llm.factory import open_chat_model; open_chat_model('google_genai')",
        "LOCAL2_BACKEND",
        "google-genai",
        id="Gemini as chat model",
    ),
    pytest.param(
        "google.genai",
        "from shared.llm.factory import open_embedding_model; open_embedding_model('google_genai')",
        "LOCAL2_BACKEND",
        "google-genai",
        id="Gemini as embedding model",
    ),
    pytest.param(
        "obstore",
        "from services.memory.service import file_store; from services.memory.settings import MemorySettings;"
        "file_store(MemorySettings(files_bucket='s3://files'))",
        "LOCAL2_MEMORY_FILES_BUCKET",
        "bucket",
        id="files in a bucket",
    ),
    pytest.param(
        "opentelemetry.exporter",
        "from shared.telemetry import tracing; tracing.start('tester', 'tester-1', 'http://127.0.0.1:9')",
        "LOCAL2_OTLP_ENDPOINT",
        "observability",
        id="traces",
    ),
    pytest.param(
        "prometheus_client",
        "import asyncio; from shared.participant.observing import observing;"
        "from shared.participant.settings import Settings;"
        "asyncio.run(observing('tester', 'tester-1', Settings(metrics_port=0)).__aenter__())",
        "LOCAL2_METRICS_PORT",
        "observability",
        id="metrics",
    ),
    pytest.param(
        "socksio",
        "import os; os.environ['ALL_PROXY'] = 'socks5://127.0.0.1:1080';"
        "from shared.llm.address import proxy_for; proxy_for('https://api.example.com')",
        "ALL_PROXY",
        "socks",
        id="SOCKS proxy",
    ),
]


@pytest.mark.parametrize(("module", "use", "setting", "extra"), MISSING)
def test_missing_package_is_named_with_its_setting_and_extra(module: str, use: str, setting: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{module!r}] = None
from shared.errors import SettingsError
try:
    exec({use!r})
except SettingsError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert f"{setting}" in done.stdout, done.stderr
    assert f"needs the package {module}" in done.stdout
    assert f"pip install 'local2[{extra}]'" in done.stdout
    assert f"make extras EXTRAS='{extra}'" in done.stdout


# Variables that ask for an extra; the packages are hidden from the program that looks for them.
WANTED = [
    pytest.param({}, [], id="nothing is asked for"),
    pytest.param({"LOCAL2_KNOWLEDGE_STORE": "bolt://graph:7687"}, ["knowledge-bolt"], id="graph server"),
    pytest.param({"LOCAL2_MEMORY_FILES_BUCKET": "s3://files"}, ["bucket"], id="bucket"),
    pytest.param({"LOCAL2_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, ["observability"], id="traces"),
    pytest.param({"LOCAL2_BACKEND": "google_genai"}, ["google-genai"], id="Gemini for all"),
    pytest.param({"LOCAL2_CRITIC_BACKEND": "google_genai"}, ["google-genai"], id="Gemini for the critic alone"),
]
HIDDEN = ["ladybug", "neo4j", "obstore", "google.genai", "opentelemetry.exporter.otlp.proto.http"]


def _missing(folder: Path, variables: dict[str, str]) -> list[str]:
    """Return the extras that a program in a folder misses, with the packages hidden."""
    program = f"""
import importlib.util, json
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {HIDDEN!r} else there(name, *rest)
from services.cli.launch.extras import missing_extras
print(json.dumps(missing_extras()))
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL2_")}
    environment = {**own, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=True, env=environment
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("variables", "extras"), WANTED)
def test_missing_extras_are_those_that_the_settings_need(
    variables: dict[str, str], extras: list[str], tmp_path: Path
) -> None:
    assert _missing(tmp_path, variables) == extras


@pytest.mark.parametrize(
    ("variables", "extras"), [({}, ["ladybug"]), ({"LOCAL2_KNOWLEDGE_STORE": "bolt://graph:7687"}, ["knowledge-bolt"])]
)
def test_graph_of_an_older_release_needs_its_reader(
    variables: dict[str, str], extras: list[str], tmp_path: Path
) -> None:
    (tmp_path / "knowledge.lbug").touch()
    assert _missing(tmp_path, {"LOCAL2_DATA_DIR": str(tmp_path), **variables}) == extras


def test_installed_extra_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_KNOWLEDGE_STORE", "bolt://graph:7687")
    assert missing_extras() == []
