"""`make upgrade` changes nothing before all that can fail beforehand has not; the rest is tried in real containers."""

from __future__ import annotations

import gzip
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A project whose containers are those that the test names; what it is told is kept.
DOCKER = """#!/bin/sh
echo "$*" >>"$STATE/docker"
case "$*" in
*config*json*) echo '{'; echo '  "name": "local2",' ;;
*"/ready"*) [ ! -e "$STATE/not-ready" ] ;;
*exec*"local2 backup"*) cat "$STATE/backup.gz" ;;
*exec*"local2 restore"*) cat >"$STATE/restored"; echo "$*" >"$STATE/restored-how" ;;
"ps --quiet"*) cat "$STATE/running" 2>/dev/null || true ;;
"ps --format"*) printf 'gateway\\nmemory\\n' ;;
"inspect"*config_files*) echo /old/compose.yaml,/old/compose.cdi.yaml ;;
"inspect"*) echo sha256:abc ;;
"volume ls"*) printf 'local2_redis\\nlocal2_ollama\\nlocal2_data\\n' ;;
port*) echo 127.0.0.1:8765 ;;
*"build gateway"*) [ ! -e "$STATE/broken-build" ] ;;
*"compose up"*) [ ! -e "$STATE/broken-start" ] ;;
esac
"""
BACKUP = '{"local2_backup":1}\n{"end":"sessions","count":3,"sha256":"x"}\n{"complete":true}\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, and containers that run it."""
    folder = tmp_path / "checkout"
    (folder / "deploy").mkdir(parents=True)
    for name in ("upgrade.sh", "backup.sh", "restore.sh", "up.sh"):
        (folder / "deploy" / name).write_text((ROOT / "deploy" / name).read_text())
        (folder / "deploy" / name).chmod(0o755)
    (folder / "Makefile").write_text("env:\n\t@true\n")
    (folder / "compose.yaml").write_text("services: {}\n")
    (folder / ".env").write_text("LOCAL2_REDIS_PASSWORD=x\nCOMPOSE_FILE=compose.yaml # by make up\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "-q"], ["add", "compose.yaml"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], cwd=folder, check=True, capture_output=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "backup.gz").write_bytes(gzip.compress(BACKUP.encode()))
    (tmp_path / "running").write_text("c1\n")
    return folder


def run(checkout: Path, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    state = checkout.parent
    return subprocess.run(
        [checkout / "deploy" / name, *arguments],
        env={"PATH": f"{state / 'bin'}:{os.environ['PATH']}", "STATE": str(state), **environment},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def told(checkout: Path) -> str:
    return (checkout.parent / "docker").read_text()


def test_it_stops_copies_starts_and_looks_whether_everything_is_there(checkout: Path) -> None:
    done = run(checkout, "upgrade.sh", FROM="HEAD")
    assert done.returncode == 0, done.stderr
    assert "done: everything that the backup has is there" in done.stdout
    commands = told(checkout)
    order = ["local2 backup", "build gateway", "stop", "volume create", "compose up", "local2 backup"]
    places = [commands.index(word) for word in order[:-1]] + [commands.rindex(order[-1])]
    assert places == sorted(places)
    # the models are not copied
    assert "local2_redis_before" in commands
    assert "local2_ollama_before" not in commands
    # a way back knows what ran, and does not take over what was found out for the new one
    assert "files=compose.yaml:compose.cdi.yaml" in (checkout / ".upgrade" / "state").read_text()
    assert (checkout / ".upgrade" / "from" / ".env").read_text() == "LOCAL2_REDIS_PASSWORD=x\n"
    assert list((checkout / ".upgrade").glob("local2-*.backup"))


@pytest.mark.parametrize(
    ("spoil", "version", "said"),
    [
        ("no-containers", "HEAD", "nothing of the project local2 runs here"),
        ("not-ready", "HEAD", "what runs is not ready"),
        ("", "1234567", "1234567 is no commit here"),
        ("", "", "which version runs is not known"),
        ("broken-build", "HEAD", ""),
        ("broken-backup", "HEAD", "is not whole"),
    ],
)
def test_what_fails_beforehand_changes_nothing(checkout: Path, spoil: str, version: str, said: str) -> None:
    state = checkout.parent
    if spoil == "no-containers":
        (state / "running").unlink()
    elif spoil == "broken-backup":
        (state / "backup.gz").write_bytes(gzip.compress(BACKUP.partition('{"complete"')[0].encode()))
    elif spoil == "not-ready":
        script = checkout / "deploy" / "upgrade.sh"
        script.write_text(script.read_text().replace("ready 30", "ready 0"))
    elif spoil:
        (state / spoil).touch()
    done = run(checkout, "upgrade.sh", FROM=version)
    assert done.returncode != 0
    assert said in done.stderr
    assert " stop" not in told(checkout)
    assert "compose up" not in told(checkout)


def test_a_version_that_does_not_start_ends_with_the_one_before_and_its_data(checkout: Path) -> None:
    script = checkout / "deploy" / "upgrade.sh"
    # the one before comes up
    script.write_text(script.read_text().replace('docker compose --project-name "$project" up', "docker before up"))
    (checkout.parent / "broken-start").touch()
    done = run(checkout, "upgrade.sh", FROM="HEAD")
    assert done.returncode == 1
    assert "it runs again, with the data of before" in done.stdout
    commands = told(checkout)
    assert "local2_redis_before:/from:ro --volume local2_redis:/to" in commands
    assert "before up --detach --wait --no-build gateway memory" in commands
    again = run(checkout, "upgrade.sh", "back")
    assert "back to what ran before" in again.stdout


def test_there_is_no_way_back_without_an_upgrade(checkout: Path) -> None:
    done = run(checkout, "upgrade.sh", "back")
    assert (done.returncode, "there was no upgrade" in done.stderr) == (1, True)


def test_a_backup_of_containers_is_whole_or_not_there(checkout: Path) -> None:
    assert run(checkout, "backup.sh", "a.backup").returncode == 0
    made = checkout / "a.backup"
    assert gzip.decompress(made.read_bytes()).decode() == BACKUP
    assert made.stat().st_mode & 0o077 == 0
    assert "is there already" in run(checkout, "backup.sh", "a.backup").stderr
    assert "name the file" in run(checkout, "backup.sh", "").stderr
    (checkout.parent / "backup.gz").write_bytes(made.read_bytes()[:20])
    assert run(checkout, "backup.sh", "b.backup").returncode != 0
    assert not list(checkout.glob("b.backup*"))


def test_a_restore_sends_the_file_and_the_arguments(checkout: Path) -> None:
    (checkout / "a.backup").write_bytes(b"everything")
    assert run(checkout, "restore.sh", "a.backup", "--merge").returncode == 0
    assert (checkout.parent / "restored").read_bytes() == b"everything"
    assert (checkout.parent / "restored-how").read_text().endswith("sh --merge\n")
    assert "cannot be read" in run(checkout, "restore.sh", "no.backup").stderr
