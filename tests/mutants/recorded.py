"""Which tests run which lines: recorded once in a checkout, and again for the test files that have changed since."""

from __future__ import annotations

import ast
import difflib
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coverage
from mutants.copy import Copy
from mutants.recording import FOLDER, settings

CACHE = ".mutants/recorded.json.gz"
# What they run is none of the areas: the launcher, the model servers, the packages and the manifests.
_UNRELATED = tuple(
    f"tests/unit/{name}" for name in ("cli/", "demo_model/", "llm/", "test_k8s", "test_packaging", "test_mutants")
)
# After so many test files what was recorded is written down: a recording that ends early goes on from there.
_AT_A_TIME = 10
_FOLDERS = ("tests/unit", "tests/integration")


@dataclass(slots=True)
class Case:
    """One test. seconds: how long it took. lines: of each source file the lines that it ran, as a set of bits."""

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
    failed = "no test is recorded"
    for at in range(0, len(stale), _AT_A_TIME):
        some = stale[at : at + _AT_A_TIME]
        print(f"Recording which lines {len(some)} of {len(stale) - at} test files run", file=sys.stderr, flush=True)
        try:
            known.cases.update(_record(root, some, workers))
        except RuntimeError as exc:
            failed = str(exc)
            print(f"not used, and tried again the next time: {' '.join(some)}", file=sys.stderr, flush=True)
            continue
        known.files.update((path, digests[path]) for path in some)
        _write(root / CACHE, known)
    if not known.files:
        raise RuntimeError(failed)
    if workers:
        _write(root / CACHE, known)
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
    path.write_bytes(gzip.compress(text.encode(), 5))


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


def _record(root: Path, files: Sequence[str], workers: int) -> dict[str, Case]:
    with tempfile.TemporaryDirectory(prefix="local2-mutants-") as temporary, Copy(root) as copy:
        folder = Path(temporary)
        rc = folder / "coverage.ini"
        rc.write_text(settings(copy.root, folder))
        environment = {**copy.environment, "COVERAGE_PROCESS_START": str(rc), FOLDER: temporary}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants.recording", "-p", "no:cacheprovider"]
        command += ["-m", "not model", "-n", str(workers), "--dist", "loadfile", *files]
        log = folder / "log"
        with log.open("wb") as out:
            done = subprocess.run(command, cwd=copy.root, env=environment, stdout=out, stderr=out, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"the tests cannot be recorded:\n{log.read_text()[-2000:]}")
        for line in log.read_text().splitlines():
            if line.startswith(("FAILED", "ERROR")):
                print(f"not used, it fails as things are: {line[:160]}", file=sys.stderr)
        cases = _collected(copy.root, folder)
    for told in unasserted({path: (root / path).read_text() for path in files}, cases):
        print(f"asserted by no test: {told}", file=sys.stderr)
    return cases


def unasserted(tests: Mapping[str, str], cases: Mapping[str, Case]) -> list[str]:
    """Takes the lines of the tests themselves (path → text) from what was recorded, and returns those with an
    assertion that none of them ran: in a loop over nothing, say, or behind a condition that never held."""
    ran = dict.fromkeys(tests, 0)
    for case in cases.values():
        for path in [path for path in case.lines if path.startswith("tests/")]:
            ran[path] = ran.get(path, 0) | case.lines.pop(path)
    return [
        f"{path}:{node.lineno}: {' '.join(ast.unparse(node).split())[:100]}"
        for path, text in tests.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert) and not any(ran[path] >> line & 1 for line in _span(node))
    ]


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _collected(root: Path, folder: Path) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for path in folder.glob("took-*.json"):
        for name, (seconds, passed) in json.loads(path.read_text()).items():
            if passed:
                cases[name] = Case(seconds)
    for path in folder.glob("lines.*"):
        data = coverage.CoverageData(basename=str(path))
        data.read()
        for file in data.measured_files():
            source = os.path.relpath(file, root)
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    # a process that a test started says what of the test was running: "name (call)"
                    case = cases.get(context.strip("|").removesuffix(" (call)").removesuffix(" (setup)"))
                    if case is not None:
                        case.lines[source] = case.lines.get(source, 0) | 1 << line
    return cases
