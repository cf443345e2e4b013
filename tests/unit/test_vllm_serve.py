"""The start of vLLM in a container: tools and thinking by the model's family, so that its name is all that is set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "vllm" / "serve.sh"


def served(folder: Path, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With a vllm that prints its arguments, one a line."""
    command = folder / "vllm"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)
    return subprocess.run(
        ["/bin/sh", str(SCRIPT)],
        env={"PATH": f"{folder}:{os.environ['PATH']}", "MODEL": model, **environment},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "tools", "thinks"),
    [
        ("google/gemma-4-E4B-it", "gemma4", "gemma4"),
        ("openai/gpt-oss-20b", "openai", "openai_gptoss"),
        ("Qwen/Qwen3-8B", "hermes", "qwen3"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "hermes", None),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder", None),
        ("Qwen/Qwen2.5-7B-Instruct", "hermes", None),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json", None),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral", None),
        ("ibm-granite/granite-4.0-h-small", "granite", None),
    ],
)
def test_the_parsers_follow_from_the_name_of_the_model(
    tmp_path: Path, model: str, tools: str, thinks: str | None
) -> None:
    done = served(tmp_path, model)
    assert done.returncode == 0, done.stderr
    expected = ["serve", model, "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "32000"]
    expected += ["--enable-auto-tool-choice", "--tool-call-parser", tools]
    assert done.stdout.splitlines() == expected + (["--reasoning-parser", thinks] if thinks else [])


def test_a_model_of_an_unknown_family_is_not_started_without_a_word(tmp_path: Path) -> None:
    done = served(tmp_path, "somebody/something-7b")
    assert (done.returncode, done.stdout) == (1, "")
    assert "set LOCAL2_VLLM_TOOL_PARSER" in done.stderr
    told = served(tmp_path, "somebody/something-7b", LOCAL2_VLLM_TOOL_PARSER="none")
    assert told.returncode == 0
    assert "--enable-auto-tool-choice" not in told.stdout


def test_what_is_set_goes_before_and_more_is_passed_on(tmp_path: Path) -> None:
    own = {"LOCAL2_VLLM_TOOL_PARSER": "pythonic", "LOCAL2_VLLM_REASONING_PARSER": "none", "LOCAL2_NUM_CTX": "8192"}
    done = served(tmp_path, "google/gemma-4-E4B-it", LOCAL2_VLLM_ARGS="--tensor-parallel-size 2", **own)
    lines = done.stdout.splitlines()
    assert lines[lines.index("--tool-call-parser") + 1] == "pythonic"
    assert "--reasoning-parser" not in lines
    assert lines[lines.index("--max-model-len") + 1] == "8192"
    assert lines[-2:] == ["--tensor-parallel-size", "2"]
