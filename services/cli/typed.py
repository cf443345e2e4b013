"""How this command can be typed: `local2` where the shell finds it, else the path it was started by."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def typed(*args: str) -> str:
    """A command line of this program for the terminal that it was started in."""
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
    """Relative below the working directory, with a slash in it: a bare name would be looked for on the PATH."""
    whole = program.absolute()
    if not whole.is_relative_to(here):
        return shlex.quote(str(whole))
    below = str(whole.relative_to(here))
    return shlex.quote(below if "/" in below else f"./{below}")
