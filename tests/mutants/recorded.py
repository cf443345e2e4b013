"""Which tests run which lines: recorded once in a checkout, and again for the test files that have changed since."""

from __future__ import annotations

import ast
import difflib
import gzip
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.copy import Copy, end
from mutants.marks import SEEN, Place, mark

CACHE = ".mutants/recorded.json.gz"
# What they run is none of the areas: the launcher, the model servers, the packages and the manifests.
_UNRELATED = tuple(
    f"tests/unit/{name}" for name in ("cli/", "demo_model/", "llm/", "test_k8s", "test_packaging", "test_mutants")
)
# So often what was recorded is written down, in seconds: a recording that ends early goes on from there.
_EVERY = 10.0
# So many test files share the start of a process.
_TOGETHER = 8
_FOLDERS = ("tests/unit", "tests/integration")


@dataclass(slots=True)
class Case:
    """One test. seconds: how long it takes on a free machine. lines: of each source file those that it ran, as a set
    of bits."""

    seconds: float
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def breadth(self) -> int:
        """How many lines it runs: the fewer, the more it is about each of them."""
        return sum(bits.bit_count() for bits in self.lines.values())


@dataclass(slots=True)
class Recorded:
    """sources: each source file as it was. files: each test file's digest. cases: those that passed, by their id."""

    sources: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)

    def starts(self) -> dict[str, float]:
        """Seconds that it takes before the tests of each file can run, at most: its first test waited for that."""
        starts: dict[str, float] = {}
        for name, case in self.cases.items():
            starts.setdefault(name.partition("::")[0], case.seconds)
        return starts

    def running(self, path: str, lines: Iterable[int]) -> list[str]:
        """The tests that run one of these lines of a file."""
        wanted = sum(1 << line for line in set(lines))
        return [name for name, case in self.cases.items() if case.lines.get(path, 0) & wanted]


def recorded(root: Path, sources: Sequence[str], workers: int) -> Recorded:
    """What is known of this checkout, brought up to date. sources: the paths of all Python files of the product.
    workers: processes that run tests; with 0 none are run, and new test files stay unknown.

    Raises RuntimeError when no test can be run, or none is known.
    """
    known = _read(root / CACHE)
    _follow(known, {path: (root / path).read_text() for path in sources})
    digests = {str(path.relative_to(root)): _digest(path) for path in _test_files(root)}
    gone = {path for path, digest in known.files.items() if digests.get(path) != digest}
    known.cases = {name: case for name, case in known.cases.items() if name.partition("::")[0] not in gone}
    known.files = {path: digest for path, digest in known.files.items() if path not in gone}
    stale = [path for path in digests if path not in known.files] if workers else []
    try:
        told = time.monotonic()
        for done, (path, cases) in enumerate(_record(root, sources, stale, workers) if stale else (), 1):
            known.cases.update(cases)
            known.files[path] = digests[path]
            if time.monotonic() - told > _EVERY:
                _write(root / CACHE, known)
                told = time.monotonic()
                print(f"Recorded which lines {done} of {len(stale)} test files run", file=sys.stderr, flush=True)
    finally:
        if workers and known.files:
            _write(root / CACHE, known)
    if not known.files:
        raise RuntimeError("no test is recorded")
    return known


def _test_files(root: Path) -> list[Path]:
    found = (path for folder in _FOLDERS for path in sorted((root / folder).rglob("test_*.py")))
    return [path for path in found if not str(path.relative_to(root)).startswith(_UNRELATED)]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(path: Path) -> Recorded:
    if not path.exists():
        return Recorded()
    data = json.loads(gzip.decompress(path.read_bytes()))
    cases = {
        name: Case(seconds, {file: int(bits, 16) for file, bits in lines.items()})
        for name, (seconds, lines) in data["cases"].items()
    }
    return Recorded(data["sources"], data["files"], cases)


def _write(path: Path, known: Recorded) -> None:
    cases = {
        name: (case.seconds, {file: f"{bits:x}" for file, bits in case.lines.items()})
        for name, case in known.cases.items()
    }
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"sources": known.sources, "files": known.files, "cases": cases})
    # whoever reads it meanwhile, or finds it after an end, has the whole of one or the other
    fresh = path.with_suffix(".new")
    fresh.write_bytes(gzip.compress(text.encode(), 5))
    fresh.replace(path)


def _follow(known: Recorded, now: Mapping[str, str]) -> None:
    """Moves what was recorded to where the lines are now. A line that was changed keeps the tests of the old one."""
    for path, text in now.items():
        before = known.sources.get(path, "")
        if before != text:
            moved = _moved(before.splitlines(), text.splitlines())
            for case in known.cases.values():
                if path in case.lines:
                    case.lines[path] = sum({1 << new for old in _lines(case.lines[path]) for new in moved.get(old, ())})
    known.sources = dict(now)


def _moved(before: list[str], now: list[str]) -> dict[int, list[int]]:
    moved: dict[int, list[int]] = defaultdict(list)
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if tag == "equal":
            for old, new in zip(range(i1, i2), range(j1, j2), strict=True):
                moved[old + 1].append(new + 1)
        elif tag == "replace":
            for old in range(i1, i2):
                moved[old + 1].extend(range(j1 + 1, j2 + 1))
        elif tag == "insert" and i1:
            moved[i1].extend(range(j1 + 1, j2 + 1))
    return moved


def _lines(bits: int) -> list[int]:
    return [at for at in range(bits.bit_length()) if bits >> at & 1]


def _record(
    root: Path, sources: Sequence[str], files: Sequence[str], workers: int
) -> Iterator[tuple[str, dict[str, Case]]]:
    """Runs the test files, and returns the cases of each as soon as it has ended."""
    groups = [files[at : at + _TOGETHER] for at in range(0, len(files), _TOGETHER)]
    with tempfile.TemporaryDirectory(prefix="local2-mutants-") as temporary, Copy(root) as copy:
        folder = Path(temporary)
        places = mark(copy.root, sources)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants.recording", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-o", "enable_assertion_pass_hook=true", "-m", "not model"]
        running: dict[subprocess.Popen[bytes], Path] = {}
        try:
            for group in itertools.chain(groups, itertools.repeat(None, workers)):
                while len(running) >= workers or (group is None and running):
                    time.sleep(0.2)
                    ended = {process: log for process, log in running.items() if process.poll() is not None}
                    for path in folder.glob("*.json"):
                        yield _collected(copy.root, json.loads(path.read_text()), places)
                        path.unlink()
                    for process, log in ended.items():
                        del running[process]
                        _told(process.returncode, log.read_text(errors="replace"))
                if group is not None:
                    log = folder / f"{len(list(folder.glob('*.log')))}.log"
                    environment = {**copy.environment, SEEN: str(log.with_suffix(".seen"))}
                    with log.open("wb") as out:
                        process = subprocess.Popen(
                            [*command, *group],
                            cwd=copy.root,
                            env=environment,
                            stdout=out,
                            stderr=out,
                            start_new_session=True,
                        )
                    running[process] = log
        finally:
            for process in running:
                end(process.pid)
                process.wait()


def _told(status: int, log: str) -> None:
    if status not in (0, 1):
        print(f"not all could be recorded, and they are tried again the next time:\n{log[-2000:]}", file=sys.stderr)
    for line in log.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(f"not used, it fails as things are: {line[:160]}", file=sys.stderr)


def _collected(root: Path, told: Mapping[str, Any], places: Sequence[Place]) -> tuple[str, dict[str, Case]]:
    file: str = told["file"]
    cases: dict[str, Case] = {}
    for name, (seconds, passed, ran) in told["cases"].items():
        if passed:
            case = cases[name] = Case(seconds)
            for number in ran:
                place = places[number]
                case.lines[place.path] = case.lines.get(place.path, 0) | place.lines
    # one that fails has not come to its end
    if len(cases) == len(told["cases"]):
        for one in unasserted((root / file).read_text(), told["asserted"]):
            print(f"asserted by no test: {file}:{one}", file=sys.stderr)
    return file, cases


def unasserted(text: str, ran: Iterable[int]) -> list[str]:
    """The assertions of a test file that none of its tests came to: in a loop over nothing, say, or behind a condition
    that never held. ran: the lines of those that held."""
    functions = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    asserts = {one.lineno: one for each in functions for one in ast.walk(each) if isinstance(one, ast.Assert)}
    return [f"{line}: {' '.join(ast.unparse(asserts[line]).split())[:100]}" for line in sorted({*asserts} - {*ran})]
