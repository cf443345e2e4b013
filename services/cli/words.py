"""Texts for people: counted nouns, ages, printable text, command lines, what a stack lacks."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `1 turn`, `2 turns`, `1,200 turns`. many: a plural that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def printable(text: str) -> str:
    """Return the text without control characters: a page that the model quotes must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or ((c.isprintable() or c.isspace()) and c not in "\r\x0b\x0c\x85"))


def ago(ms: Any, now: float | None = None) -> str:
    """Return `3 min ago` for milliseconds since the epoch, and an empty text for anything else."""
    if not isinstance(ms, int | float):
        return ""
    seconds = max(0.0, (time.time() if now is None else now) - ms / 1000)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def typed(*args: str) -> str:
    """Return a command line of this program as the user can type it: `local2` if the PATH has it, else its path."""
    return " ".join([_program(sys.argv[0], Path.cwd()), *args])


def _program(started_as: str, here: Path) -> str:
    program = Path(started_as)
    if program.parts[-3:] == ("services", "cli", "__main__.py"):
        return f"{_path(Path(sys.executable), here)} -m services.cli"
    if program.name != "local2" or not program.is_file():
        return "local2"
    found = shutil.which("local2")
    if found is not None and os.path.samefile(found, program):
        return "local2"
    return _path(program, here)


def _path(program: Path, here: Path) -> str:
    """Return a path relative to the working directory, with a slash: a shell searches the PATH for a bare name."""
    whole = program.absolute()
    if not whole.is_relative_to(here):
        return shlex.quote(str(whole))
    below = str(whole.relative_to(here))
    return shlex.quote(below if "/" in below else f"./{below}")


def reasons(response: httpx.Response) -> list[str]:
    """Return `part: reason` for each part that an answer of GET /ready names as not ready."""
    try:
        return not_ready(response.json())
    except ValueError:
        return []


def not_ready(body: Any) -> list[str]:
    """Return the same for the decoded answer: `parts` by name, each with `ok` and `reason`."""
    parts: dict[str, Any] = body.get("parts", {}) if isinstance(body, dict) else {}
    return [f"{name}: {part.get('reason') or 'not ready'}" for name, part in parts.items() if not part.get("ok")]
