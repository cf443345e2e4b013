"""The model pull of the containers: it says what comes and whether there is room, and one failure stops no other."""

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
list)
	echo 'NAME    ID    SIZE    MODIFIED'
	cat "$STATE/listed" 2>/dev/null
	exit 0
	;;
show) [ -e "$STATE/$2" ] ;;
pull)
	if [ -e "$STATE/broken" ] && ! grep -q "^pull $2" "$STATE/tried" 2>/dev/null; then
		echo "pull $2" >>"$STATE/tried"
		echo 'Error: connection reset' >&2
		exit 1
	fi
	[ ! -e "$STATE/dead" ] && [ ! -e "$STATE/dead-$2" ] || { echo 'Error: no such host' >&2; exit 1; }
	printf '\033[?25l\033[1Gpulling manifest \342\240\213 \033[K\033[?25h' >&2
	printf '\033[?25l\033[1Gpulling manifest \342\240\231 \033[K\033[?25h' >&2
	for percent in 3 4 5 5 37 50 99 100; do
		printf '\033[A\033[1Gpulling manifest \033[K\npulling 3f8eb4da87fa: %3d%% ' $percent >&2
		printf '\342\226\225\342\226\210 \342\226\217 1.2 GB/9.6 GB   45 MB/s   3m7s\033[K' >&2
	done
	printf '\nsuccess \033[K\n' >&2
	mkdir -p "$(dirname "$STATE/$2")"
	touch "$STATE/$2"
	;;
esac
"""
# What a registry answers that is asked for a manifest; the names of the paths that it was asked for are kept.
OPENSSL = r"""#!/bin/sh
read -r _ path _
echo "$path $*" >>"$STATE/asked"
[ -e "$STATE/unreachable" ] && exit 1
printf 'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n'
printf '{"schemaVersion":2,"config":{"digest":"sha256:a","size":500},"layers":[{"size":9600000000},{"size": 7000000}]}'
"""
# A disk with the room that the test gives it, in KB.
DF = """#!/bin/sh
echo 'Filesystem 1024-blocks Used Available Capacity Mounted on'
echo "/dev/x 1 1 $(cat "$STATE/free") 1% /models"
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in (("ollama", OLLAMA), ("openssl", OPENSSL), ("df", DF)):
        command = tmp_path / "bin" / name
        command.write_text(text)
        command.chmod(0o755)
    (tmp_path / "free").write_text("40000000")
    return tmp_path


def pulled(state: Path, models: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"MODELS": models, "STATE": str(state), "TMPDIR": str(state), "PAUSE": "0", "LOCAL2_GPU": "none"}
    environment = {**own, "OLLAMA_MODELS": str(state / "models"), **environment}
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
        "nomic-embed-text is to be downloaded: 9.6 GB",
        f"In all 9.6 GB to come; 41.0 GB free in {state / 'models'}",
        "nomic-embed-text: pulling manifest",
        "nomic-embed-text: pulling 3f8eb4da87fa:   5% of 9.6 GB",
        "nomic-embed-text: pulling 3f8eb4da87fa:  50% of 9.6 GB",
        "nomic-embed-text: pulling 3f8eb4da87fa: 100% of 9.6 GB",
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


def test_one_that_cannot_be_had_stops_no_other(state: Path) -> None:
    (state / "dead-gemma4:e4b").touch()
    done = pulled(state, "gemma4:e4b nomic-embed-text", ATTEMPTS="2")
    assert done.returncode == 1
    assert "gemma4:e4b could not be downloaded" in done.stderr
    assert done.stdout.endswith("nomic-embed-text is here now\n")
    # in the containers nobody waits for it: the log and /ready say what is missing
    assert pulled(state, "gemma4:e4b nomic-embed-text", ATTEMPTS="1", MISSING_IS_FINE="1").returncode == 0


def test_the_size_of_each_and_of_all_is_said_before_the_first_byte(state: Path) -> None:
    done = pulled(
        state, "gemma4:e4b ggozad/prometheus2 hf.co/someone/model:q4", HTTPS_PROXY="http://proxy.example:3128/"
    )
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "gemma4:e4b is to be downloaded: 9.6 GB",
        "ggozad/prometheus2 is to be downloaded: 9.6 GB",
        "hf.co/someone/model:q4 is to be downloaded: 9.6 GB",
        f"In all 28.8 GB to come; 41.0 GB free in {state / 'models'}",
    ]
    asked = [line.split(" ", 1) for line in (state / "asked").read_text().splitlines()]
    assert [path for path, _ in asked] == [
        "/v2/library/gemma4/manifests/e4b",
        "/v2/ggozad/prometheus2/manifests/latest",
        "/v2/someone/model/manifests/q4",
    ]
    assert ["-connect registry.ollama.ai:443" in arguments for _, arguments in asked] == [True, True, False]
    assert all(
        "-proxy proxy.example:3128" in arguments and "-verify_return_error" in arguments for _, arguments in asked
    )


def test_a_registry_that_does_not_say_how_large_a_model_is_hinders_nothing(state: Path) -> None:
    (state / "unreachable").touch()
    done = pulled(state, "gemma4:e4b")
    assert done.returncode == 0, done.stderr
    assert "how large it is, its registry does not say" in done.stdout
    assert "How much comes in all is not known; 41.0 GB free" in done.stdout


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(state: Path) -> None:
    (state / "free").write_text("3000000")
    done = pulled(state, "gemma4:e4b")
    assert done.returncode == 1
    assert "gemma4:e4b is not downloaded: it takes 9.6 GB, and 3.1 GB are free" in done.stderr
    assert not pulls(state)


def test_what_was_begun_counts_as_room(state: Path) -> None:
    begun = state / "models" / "blobs" / "sha256-1-partial"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"x" * 2_000_000)
    (state / "free").write_text("1000000")
    assert "1.0 GB free" in pulled(state, "other").stdout
    said = pulled(state, "gemma4:e4b").stderr
    assert "1.0 GB are free" in said


@pytest.mark.parametrize(
    ("devices", "environment", "said"),
    [
        ({}, {}, ""),
        (
            {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: x"},
            {},
            "COMPOSE_FILE=compose.yaml (compose.yaml:compose.cdi.yaml where",
        ),
        ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: x"}, {"LOCAL2_GPU_GIVEN": "1"}, ""),
        ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: x"}, {"LOCAL2_GPU": "none"}, ""),
        ({}, {"LOCAL2_GPU": "nvidia"}, "COMPOSE_FILE=compose.yaml (compose.yaml:compose.cdi.yaml where"),
        ({}, {"LOCAL2_GPU": "amd"}, "compose.rocm.yaml"),
        (_radeon := {"vendor": "0x1002\n", "mem_info_vram_total": "17163091968\n"}, {}, "compose.rocm.yaml"),
        # a processor's own graphics
        (_radeon | {"mem_info_vram_total": "536870912\n"}, {}, ""),
        (_radeon | {"vendor": "0x8086\n"}, {}, ""),
    ],
)
def test_a_gpu_that_the_model_server_is_not_given_is_told_with_what_mends_it(
    state: Path, devices: dict[str, str], environment: dict[str, str], said: str
) -> None:
    (state / "gemma4:e4b").touch()
    for name, text in devices.items():
        path = state / "root" / (name if "/" in name else f"sys/class/drm/card0/device/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = pulled(state, "gemma4:e4b", **{"LOCAL2_GPU": "here", "ROOT": str(state / "root"), **environment})
    assert done.returncode == 0
    assert bool(done.stderr) is bool(said)
    assert said in done.stderr


def test_models_that_do_not_fit_into_the_gpu_together_are_told(state: Path) -> None:
    for name in ("gemma4:e4b", "ggozad/prometheus2"):
        (state / name).parent.mkdir(exist_ok=True)
        (state / name).touch()
    (state / "listed").write_text(
        "gemma4:e4b  c6eb  9.6 GB  now\nggozad/prometheus2:latest  d3  4.4 GB  now\nold:1  e 90 GB now\n"
    )
    both = {"BESIDE": "gemma4:e4b", "LOCAL2_GPU_GIVEN": "1"}
    assert (
        "take 14.0 GB before any context, the GPU has 12.3 GB"
        in pulled(state, "ggozad/prometheus2", LOCAL2_GPU_MEMORY="12288", **both).stderr
    )
    assert pulled(state, "ggozad/prometheus2", LOCAL2_GPU_MEMORY="24576", **both).stderr == ""
    assert pulled(state, "ggozad/prometheus2", **both).stderr == ""


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
