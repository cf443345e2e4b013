"""The stack on the data folder and the backup of the last release (tests/upgrade/run.py records both)."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import ROOT, TESTS
from support.local2_run import running, scripted_model
from support.upgrading import RULES, goes_on, same, works

pytestmark = pytest.mark.slow
RECORDED = TESTS / "support" / "releases" / "2026-11.tar.xz"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_model(tmp_path_factory.mktemp("model"), RULES) as url:
        yield url


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The old release's data folder (`data`), its backup (`old.backup`), and what its users saw (`seen.json`)."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def recorded(old: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((old / "seen.json").read_text(encoding="utf-8"))
    return found


def test_stack_on_data_of_last_release_has_everything_once(old: Path, model: str) -> None:
    before = recorded(old)
    for start in ("first", "second"):
        with running(ROOT, old / "data", model) as stack:
            same(stack, before["anna"], before["seen"], f"after the {start} start")
            works(stack)
            if start == "second":
                goes_on(stack)
    assert list((old / "data").glob("knowledge.lbug.backup-*"))


def test_backup_of_last_release_restores_everything_once(old: Path, model: str) -> None:
    before = recorded(old)
    with running(ROOT, old / "restored", model) as stack:
        stack.command("restore", str(old / "old.backup"))
        same(stack, before["anna"], before["seen"], "after the restore")
        works(stack)
