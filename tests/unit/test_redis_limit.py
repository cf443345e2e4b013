"""Redis' own limit in the containers: below that of its container, unless it is told otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

START = Path(__file__).resolve().parents[2] / "deploy" / "redis" / "start.sh"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A server that only says how it was called, and a control group with a limit of two gigabytes."""
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    cat = tmp_path / "cat"
    cat.write_text("#!/bin/sh\nprintf '%s\\n' \"${LIMIT-2147483648}\"\n")
    for command in (server, cat):
        command.chmod(0o755)
    return tmp_path


def maxmemory(commands: Path, *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        ["/bin/sh", str(START), *arguments],
        env={"PATH": f"{commands}:{os.environ['PATH']}", "TMPDIR": str(commands), "LOCAL2_REDIS_PASSWORD": "a",
             **environment},
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    said = done.stdout.splitlines()
    return [said[at + 1] for at, word in enumerate(said) if word == "--maxmemory"]


def test_redis_keeps_half_of_its_containers_memory_for_data(commands: Path) -> None:
    assert maxmemory(commands) == [str(2**30)]


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", ""])
def test_without_a_limit_on_the_container_there_is_none_for_redis(commands: Path, limit: str) -> None:
    assert maxmemory(commands, LIMIT=limit) == ["0"]


def test_a_limit_that_is_set_is_used(commands: Path) -> None:
    assert maxmemory(commands, LOCAL2_REDIS_MAXMEMORY="1500mb") == ["1500mb"]


def test_a_limit_among_the_arguments_comes_last_and_wins(commands: Path) -> None:
    assert maxmemory(commands, "--maxmemory", "2gb") == [str(2**30), "2gb"]
