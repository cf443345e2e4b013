"""`make up` on machines of all kinds: what it finds, what it chooses, what it says, and what it leaves in .env."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Answers what the test has put beside it, and keeps what it was asked to do.
DOCKER = """#!/bin/sh
echo "$COMPOSE_FILE|$*" >>"$STATE/docker"
case "$*" in
*.Runtimes*) cat "$STATE/runtimes" 2>/dev/null || echo '{"runc":{}}' ;;
*.DiscoveredDevices*) cat "$STATE/devices" 2>/dev/null || { echo 'template: map has no entry' >&2; exit 1; } ;;
*.CDISpecDirs*) cat "$STATE/specdirs" 2>/dev/null || echo null ;;
*compose*up*) [ ! -e "$STATE/broken" ] || exit 1 ;;
*compose*ps*) echo 'gateway 127.0.0.1:8765->8765/tcp' ;;
esac
"""
SMI = '#!/bin/sh\ncat "$STATE/smi"\nexit "$(cat "$STATE/smi-status" 2>/dev/null || echo 0)"\n'


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout with a .env, and a machine with nothing in it but Docker."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "up.sh").write_text((ROOT / "deploy" / "up.sh").read_text())
    (tmp_path / ".env").write_text("LOCAL2_REDIS_PASSWORD=x")
    command(tmp_path, "docker", DOCKER)
    return tmp_path


def command(machine: Path, name: str, text: str) -> None:
    path = machine / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def up(machine: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    places = {"DEV": machine / "dev", "SYS": machine / "sys", "CDI": machine / "cdi", "STATE": machine,
              "LOCALTIME": machine / "localtime"}  # fmt: skip
    own = {"PATH": f"{machine / 'bin'}:{os.environ['PATH']}", **{name: str(path) for name, path in places.items()}}
    return subprocess.run(
        ["bash", str(machine / "deploy" / "up.sh"), *arguments],
        env={**own, **environment},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip


def found(machine: Path) -> dict[str, str]:
    """What it has written into .env."""
    lines = [line.removesuffix(" # by make up") for line in (machine / ".env").read_text().splitlines()[1:]]
    return dict(line.split("=", 1) for line in lines if line)


def nvidia(machine: Path, memory: str = "24576\n") -> None:
    command(machine, "nvidia-smi", SMI)
    (machine / "smi").write_text(memory)


def amd(machine: Path, memory: int = 17_163_091_968) -> None:
    card = machine / "sys" / "class" / "drm" / "card1" / "device"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1002\n")
    (card / "mem_info_vram_total").write_text(f"{memory}\n")
    (machine / "dev" / "dri").mkdir(parents=True)
    for name in ("kfd", "dri/card1"):
        (machine / "dev" / name).touch()


@pytest.mark.parametrize(
    ("line", "variable", "written"),
    [("", "", {"TZ": "Europe/Berlin"}), ("TZ=Asia/Tokyo", "", {"TZ": "Asia/Tokyo"}), ("", "Asia/Tokyo", {})],
    ids=["of-the-machine", "given-in-the-file", "given-by-a-variable"],
)
def test_zone_of_the_machine_is_the_containers(
    machine: Path, line: str, variable: str, written: dict[str, str]
) -> None:
    (machine / "localtime").symlink_to("/usr/share/zoneinfo/Europe/Berlin")
    (machine / ".env").write_text(f"LOCAL2_REDIS_PASSWORD=x\n{line}\n")
    assert up(machine, **({"TZ": variable} if variable else {})).returncode == 0
    assert {name: value for name, value in found(machine).items() if name == "TZ"} == written


def test_without_a_gpu_it_says_so_and_starts_on_the_cpu(machine: Path) -> None:
    done = up(machine)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no GPU found" in done.stdout
    assert "Up: http://127.0.0.1:8765" in done.stdout
    assert found(machine) == {"COMPOSE_FILE": "compose.yaml:compose.cpu.yaml"}


def test_the_runtime_of_nvidia_is_used(machine: Path) -> None:
    nvidia(machine, "24576\n8192\n")
    (machine / "runtimes").write_text('{"io.containerd.runc.v2":{},"nvidia":{"path":"nvidia-container-runtime"}}')
    done = up(machine)
    assert done.stderr == ""
    assert "2 NVIDIA GPU(s), 34 GB" in done.stdout
    assert found(machine) == {
        "COMPOSE_FILE": "compose.yaml",
        "LOCAL2_GPU": "nvidia",
        "LOCAL2_GPU_MEMORY": "34360",
    }


@pytest.mark.parametrize(
    "files",
    [
        {"devices": '[{"Source":"cdi","ID":"nvidia.com/gpu=all"}]'},
        {"specdirs": '["/etc/cdi","/var/run/cdi"]', "cdi/nvidia.yaml": "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n"},
    ],
)
def test_a_host_that_has_only_cdi_is_used_by_cdi(machine: Path, files: dict[str, str]) -> None:
    (machine / "cdi").mkdir()
    for name, text in files.items():
        (machine / name).write_text(text)
    done = up(machine)
    assert done.stderr == ""
    assert found(machine) == {"COMPOSE_FILE": "compose.yaml:compose.cdi.yaml", "LOCAL2_GPU": "nvidia"}


def test_a_docker_that_does_not_read_cdi_is_told_how(machine: Path) -> None:
    (machine / "cdi").mkdir()
    (machine / "cdi" / "nvidia.json").write_text('{"kind": "nvidia.com/gpu"}')
    done = up(machine)
    assert '{"features": {"cdi": true}} into /etc/docker/daemon.json' in done.stderr
    # what is asked afterwards knows that there is one
    assert found(machine) == {"COMPOSE_FILE": "compose.yaml:compose.cpu.yaml", "LOCAL2_GPU": "nvidia"}


def test_a_gpu_that_docker_cannot_give_out_is_loud(machine: Path) -> None:
    nvidia(machine)
    done = up(machine)
    assert done.returncode == 0
    assert "install NVIDIA's container toolkit" in done.stderr
    assert found(machine)["LOCAL2_GPU"] == "nvidia"
    assert found(machine)["COMPOSE_FILE"] == "compose.yaml:compose.cpu.yaml"


def test_a_driver_that_does_not_work_is_told_and_not_used(machine: Path) -> None:
    nvidia(machine, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    (machine / "smi-status").write_text("9")
    (machine / "runtimes").write_text('{"nvidia":{}}')
    done = up(machine)
    assert "couldn't communicate" in done.stderr
    assert found(machine) == {"COMPOSE_FILE": "compose.yaml:compose.cpu.yaml"}


def test_an_amd_card_is_used_with_the_groups_that_own_it(machine: Path) -> None:
    amd(machine)
    done = up(machine)
    assert done.stderr == ""
    own = str((machine / "dev" / "kfd").stat().st_gid)
    assert found(machine) == {
        "LOCAL2_RENDER_GROUP": own,
        "LOCAL2_VIDEO_GROUP": own,
        "COMPOSE_FILE": "compose.yaml:compose.rocm.yaml",
        "LOCAL2_GPU": "amd",
        "LOCAL2_GPU_MEMORY": "17163",
    }


def test_a_processors_own_graphics_are_no_gpu(machine: Path) -> None:
    amd(machine, 536_870_912)
    assert up(machine).stderr == ""
    assert found(machine) == {"COMPOSE_FILE": "compose.yaml:compose.cpu.yaml"}


@pytest.mark.parametrize(
    "line", ["LOCAL2_OLLAMA_HOST=http://x:11434", "LOCAL2_BASE_URL=http://x/v1", "LOCAL2_BACKEND=google_genai"]
)
def test_a_model_server_elsewhere_needs_no_gpu_here(machine: Path, line: str) -> None:
    nvidia(machine)
    (machine / ".env").write_text(f"{line}\n")
    assert up(machine).stderr == ""
    assert found(machine) == {"COMPOSE_FILE": "compose.yaml:compose.remote.yaml"}


RUNTIME = {"runtimes": '{"nvidia":{}}'}
CDI = {"devices": '[{"Source":"cdi","ID":"nvidia.com/gpu=all"}]'}


@pytest.mark.parametrize(
    ("own", "state", "used", "warning"),
    [
        # A file for the GPU is missing: the script adds the one of this machine.
        ("compose.yaml:compose.small.yaml", {}, "compose.yaml:compose.small.yaml:compose.cpu.yaml", ""),
        ("compose.yaml:compose.small.yaml", RUNTIME, "", ""),
        ("compose.yaml:compose.small.yaml", CDI, "compose.yaml:compose.small.yaml:compose.cdi.yaml", ""),
        ("/srv/compose.yaml:own.yaml", {}, "/srv/compose.yaml:own.yaml:compose.cpu.yaml", ""),
        # The list names a file for the GPU: it stays unchanged.
        ("compose.yaml:compose.cdi.yaml:compose.small.yaml", {}, "", ""),
        ("compose.yaml:compose.cpu.yaml", {}, "", ""),
        ("compose.yaml:compose.remote.yaml", {}, "", ""),
        ("compose.yaml:compose.vllm.yaml", RUNTIME, "", ""),
        ("other.yaml", {}, "", ""),
        # The GPU is left out: a warning.
        ("compose.yaml:compose.cpu.yaml:own.yaml", RUNTIME, "", "COMPOSE_FILE=compose.yaml:own.yaml"),
        ("compose.yaml:compose.cpu.yaml", CDI, "", "COMPOSE_FILE=compose.yaml:compose.cdi.yaml"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_variable", [False, True])
def test_compose_file_of_the_user_gets_the_gpu_file(
    machine: Path, own: str, state: dict[str, str], used: str, warning: str, by_variable: bool
) -> None:
    for name, text in state.items():
        (machine / name).write_text(text)
    if not by_variable:
        (machine / ".env").write_text(f"COMPOSE_FILE={own}\n")
    done = up(machine, **({"COMPOSE_FILE": own} if by_variable else {}))
    assert done.returncode == 0
    assert ("leaves the GPU out" in done.stderr) is bool(warning)
    assert done.stderr.strip().endswith(warning)
    # a variable goes before .env: the line would have no effect
    assert found(machine).get("COMPOSE_FILE") == ((used or None) if not by_variable else None)
    if by_variable:
        (start,) = [line for line in (machine / "docker").read_text().splitlines() if "|compose up" in line]
        assert start.startswith(f"{used or own}|")


def test_it_finds_out_anew_each_time_and_leaves_the_other_lines(machine: Path) -> None:
    (machine / "runtimes").write_text('{"nvidia":{}}')
    up(machine)
    assert found(machine)["COMPOSE_FILE"] == "compose.yaml"
    (machine / "runtimes").unlink()
    up(machine)
    up(machine)
    line = "COMPOSE_FILE=compose.yaml:compose.cpu.yaml # by make up"
    assert (machine / ".env").read_text() == f"LOCAL2_REDIS_PASSWORD=x\n{line}\n"
    assert (machine / ".env").stat().st_mode & 0o077 == 0


def test_it_says_where_the_admin_key_really_is(machine: Path) -> None:
    assert "The admin key: docker compose exec gateway cat /data/admin.key" in up(machine).stdout
    (machine / ".env").write_text("LOCAL2_ADMIN_KEY=l2_secret\n")
    told = up(machine).stdout
    assert "The admin key: LOCAL2_ADMIN_KEY of .env" in told
    assert "l2_secret" not in told


@pytest.mark.parametrize(
    ("line", "arguments", "works"),
    [
        ("", ("--scale", "gateway=2"), False),
        ("LOCAL2_GATEWAY_REPLICAS=3\n", (), False),
        ("LOCAL2_GATEWAY_REPLICAS=3\nLOCAL2_API_PORT=8765-8774\n", (), True),
        ("COMPOSE_FILE=compose.yaml:compose.proxy.yaml\n", ("--scale", "gateway=2"), True),
    ],
)
def test_several_gateways_are_told_that_they_cannot_share_one_port(
    machine: Path, line: str, arguments: tuple[str, ...], works: bool
) -> None:
    (machine / ".env").write_text(line)
    done = up(machine, *arguments)
    assert (done.returncode == 0) is works
    assert ("cannot share one port" in done.stderr) is not works
    assert ("compose up" in (machine / "docker").read_text()) is works


def test_a_start_that_fails_says_where_to_look_and_fails(machine: Path) -> None:
    (machine / "broken").touch()
    done = up(machine)
    assert done.returncode == 1
    assert "docker compose logs NAME" in done.stderr
    assert "Up:" not in done.stdout
