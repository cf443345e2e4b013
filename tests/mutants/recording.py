"""A pytest plugin: which lines each test runs, in this process and in those that it starts.

coverage.py starts itself in every Python process that sees COVERAGE_PROCESS_START (its `.pth` file). This plugin tells
it the name of the running test; a process that the test starts takes it from PYTEST_CURRENT_TEST (`settings`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = "MUTANTS_RECORD"


def settings(root: Path, folder: Path) -> str:
    """coverage's configuration. root: the copy that is tested. folder: where every process leaves what it saw."""
    return f"""[run]
data_file = {folder}/lines
parallel = true
source =
    {root}/shared
    {root}/services
    {root}/tests
context = ${{PYTEST_CURRENT_TEST}}
sigterm = true
core = ctrace
disable_warnings = no-data-collected,module-not-imported,module-not-measured,already-imported
"""


_took: dict[str, list[float]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    took = _took.setdefault(report.nodeid, [0.0, 1.0])
    took[0] += report.duration
    # skipped and failed tests notice nothing
    took[1] *= report.passed


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (running := coverage.Coverage.current()) is not None:
        running.stop()
        running.save()
        folder = Path(os.environ[FOLDER])
        folder.joinpath(f"took-{os.getpid()}.json").write_text(json.dumps(_took))
