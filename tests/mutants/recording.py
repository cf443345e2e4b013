"""A pytest plugin: which places of the product each test runs, in this process and in those that it starts.

Leaves one file for each test file, as soon as its last test has ended: `{"file": path, "cases": {id: [seconds, passed,
places]}, "asserted": [lines]}`. seconds: as if nobody else had used the machine. passed: 1, or 0 when it failed or was
skipped. asserted: where an assertion held.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mutants import marks

_cases: dict[str, list[Any]] = {}
_asserted: set[int] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    from shared._seen import SEEN  # type: ignore[import-not-found]  # stands in a marked copy alone

    SEEN[:] = bytes(len(SEEN))
    had, waited = _processor()
    result = yield
    seen = bytes(SEEN)
    had, waited = (now - before for now, before in zip(_processor(), (had, waited), strict=True))
    case = _cases.setdefault(item.nodeid, [0.0, 0])
    case[0] *= had / max(had + waited, 1)
    case.append([place for place, ran in enumerate(seen) if ran])
    if nextitem is None or nextitem.path != item.path:
        _leave(item.nodeid.partition("::")[0])
        _cases.clear()
        _asserted.clear()
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    case = _cases.setdefault(report.nodeid, [0.0, 1])
    case[0] += report.duration
    case[1] *= report.passed


def _processor() -> tuple[int, int]:
    """For how long this process has had a processor, and for how long it has waited for one, in ns."""
    try:
        had, waited, _ = Path("/proc/self/schedstat").read_text().split()
    except OSError:
        return time.process_time_ns(), 0
    return int(had), int(waited)


def pytest_assertion_pass(lineno: int) -> None:
    _asserted.add(lineno)


def _leave(file: str) -> None:
    told = {"file": file, "cases": _cases, "asserted": sorted(_asserted)}
    part = Path(os.environ[marks.SEEN]).with_name(f"{hashlib.sha256(file.encode()).hexdigest()[:16]}.part")
    part.write_text(json.dumps(told))
    part.rename(part.with_suffix(".json"))
