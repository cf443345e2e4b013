"""The one-shot model pull of the containers: what is there is left alone, what is not comes with progress, or fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "ollama" / "pull.sh"
# Behaves as the command does without a terminal: it paints the same lines over and over.
OLLAMA = r"""#!/bin/sh
echo "$@" >>"$STATE/calls"
case $1 in
serve) exec sleep 60 ;;
list) exit 0 ;;
show) [ -e "$STATE/$2" ] ;;
pull)
	if [ -e "$STATE/broken" ] && ! grep -q "^pull $2" "$STATE/tried" 2>/dev/null; then
		echo "pull $2" >>"$STATE/tried"
		echo 'Error: connection reset' >&2
		exit 1
	fi
	[ ! -e "$STATE/dead" ] || { echo 'Error: no such host' >&2; exit 1; }
	printf '\033[?25l\033[1Gpulling manifest \342\240\213 \033[K\033[?25h' >&2
	printf '\033[?25l\033[1Gpulling manifest \342\240\231 \033[K\033[?25h' >&2
	for percent in 3 4 5 5 37 50 99 100; do
		printf '\033[A\033[1Gpulling manifest \033[K\npulling 3f8eb4da87fa: %3d%% ' $percent >&2
		printf '\342\226\225\342\226\210 \342\226\217 1.2 GB/9.6 GB\033[K' >&2
	done
	printf '\nsuccess \033[K\n' >&2
	mkdir -p "$(dirname "$STATE/$2")"
	touch "$STATE/$2"
	;;
esac
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    command = tmp_path / "bin" / "ollama"
    command.parent.mkdir()
    command.write_text(OLLAMA)
    command.chmod(0o755)
    return tmp_path


def pulled(state: Path, models: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"MODELS": models, "STATE": str(state), "TMPDIR": str(state), "PAUSE": "0", **environment}
    return subprocess.run(
        ["/bin/sh", str(SCRIPT)],
        env={"PATH": f"{state / 'bin'}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def pulls(state: Path) -> list[str]:
    return [line for line in (state / "calls").read_text().splitlines() if line.startswith("pull")]


def test_the_old_name_of_the_judge_downloads_the_one_that_there_is(state: Path) -> None:
    assert pulled(state, "prometheus:7b ggozad/prometheus2").returncode == 0
    assert pulls(state) == ["pull ggozad/prometheus2"]


def test_models_that_are_there_are_not_pulled(state: Path) -> None:
    (state / "gemma4:e4b").touch()
    done = pulled(state, "gemma4:e4b  gemma4:e4b")
    assert (done.returncode, done.stdout) == (0, "gemma4:e4b is here\n")
    assert not pulls(state)


def test_a_missing_model_is_pulled_with_a_line_for_each_step(state: Path) -> None:
    (state / "gemma4:e4b").touch()
    done = pulled(state, "gemma4:e4b nomic-embed-text")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "gemma4:e4b is here",
        "nomic-embed-text: pulling manifest",
        "nomic-embed-text: pulling 3f8eb4da87fa:   5%",
        "nomic-embed-text: pulling 3f8eb4da87fa:  50%",
        "nomic-embed-text: pulling 3f8eb4da87fa: 100%",
        "nomic-embed-text: success",
        "nomic-embed-text is here now",
    ]
    assert pulls(state) == ["pull nomic-embed-text"]


def test_a_pull_that_broke_off_is_tried_again(state: Path) -> None:
    (state / "broken").touch()
    done = pulled(state, "gemma4:e4b")
    assert done.returncode == 0, done.stderr
    assert "gemma4:e4b: Error: connection reset" in done.stdout
    assert done.stdout.endswith("gemma4:e4b is here now\n")
    assert len(pulls(state)) == 2


def test_a_model_that_cannot_be_had_fails_and_says_so(state: Path) -> None:
    (state / "dead").touch()
    done = pulled(state, "gemma4:e4b", ATTEMPTS="3")
    assert done.returncode == 1
    assert "gemma4:e4b: Error: no such host" in done.stdout
    assert "gemma4:e4b could not be downloaded" in done.stderr
    assert len(pulls(state)) == 3


def test_the_server_of_the_pull_is_gone_afterwards(state: Path) -> None:
    assert pulled(state, "gemma4:e4b").returncode == 0
    mine = f"STATE={state}".encode()
    left = [
        process
        for process in Path("/proc").glob("[0-9]*")
        if os.access(process / "environ", os.R_OK) and mine in _environ(process)
    ]
    assert not left


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""
