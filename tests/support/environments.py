"""Python environments for programs that are tried beside LoCAL2, made once for exact versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class NotInstalled(Exception):
    """The packages cannot be installed here; the text says why."""


def python_environment(place: Path, packages: Sequence[str], seconds: float) -> Path:
    """Return the Python of an environment in `place` that has these packages.

    packages: requirements for pip. The environment is made again when they change.
    seconds: the time limit of each step.
    Raises NotInstalled.
    """
    python, stamp, wanted = place / "bin" / "python", place / "installed.txt", "\n".join(packages)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(place, ignore_errors=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "2"]
    try:
        for command in ([sys.executable, "-m", "venv", str(place)], [*pip, "install", "-q", *packages]):
            subprocess.run(command, check=True, timeout=seconds, capture_output=True, text=True)
    except subprocess.TimeoutExpired as exc:
        raise NotInstalled(f"the installation took more than {seconds:g} s") from exc
    except subprocess.CalledProcessError as exc:
        lines = [line for line in exc.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled(lines[-1] if lines else f"the installation ended with status {exc.returncode}") from exc
    stamp.write_text(wanted, encoding="utf-8")
    return python
