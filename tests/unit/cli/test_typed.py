"""The command's own name in what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.cli.words import typed


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program of that name in a virtual environment below the working directory."""
    path = tmp_path / ".venv" / "bin" / "local2"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_program_that_is_not_on_the_path_is_named_as_it_lies(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert typed("run") == ".venv/bin/local2 run"
    monkeypatch.setattr(sys, "argv", [".venv/bin/local2"])
    assert typed("ask") == ".venv/bin/local2 ask"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert typed("ask") == f"{program} ask"
    monkeypatch.chdir(program.parent)
    assert typed("ask") == "./local2 ask"


def test_a_program_on_the_path_is_named_by_its_name_and_another_one_there_is_not_meant(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(program.parent))
    assert typed("run") == "local2 run"
    other = tmp_path / "other" / "local2"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert typed("run") == ".venv/bin/local2 run"


def test_the_module_is_named_with_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/services/cli/__main__.py"])
    assert typed("run") == f"{sys.executable} -m services.cli run"
