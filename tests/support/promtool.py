"""Prometheus' own checker: from the PATH, or out of Debian's package, which is unpacked and not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

# Beside the interpreter: a later run finds it, and `make clean` removes it.
_KEPT = Path(sys.prefix) / "bin" / "promtool"


@cache
def found() -> Path | None:
    on_path = shutil.which("promtool")
    if on_path is not None:
        return Path(on_path)
    if not _KEPT.exists():
        _unpack()
    return _KEPT if _KEPT.exists() else None


def _unpack() -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = subprocess.run(
            ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, timeout=90, check=False
        )
        packages = list(folder.glob("prometheus_*.deb"))
        if done.returncode != 0 or not packages:
            return
        subprocess.run(["dpkg-deb", "-x", packages[0], folder / "x"], capture_output=True, timeout=60, check=True)
        # newer packages leave it out
        if (program := folder / "x" / "usr" / "bin" / "promtool").exists():
            shutil.move(program, _KEPT)


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """What it says; fails the test when it finds a fault, skips it (loudly) where it cannot be had."""
    program = found()
    if program is None:
        pytest.skip("NOT CHECKED: promtool is neither on the PATH nor to be had from Debian's package `prometheus`")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
