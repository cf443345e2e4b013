"""A copy of the checkout in a temporary folder, in which a change can do no harm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil


class Copy:
    """Everything of a checkout that git knows or would take.

    `root` is the copy's folder, `environment` what a process needs that shall import the copy's code and not the
    checkout's; whatever that process starts inherits it.
    """

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        self._temporary = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
        self.root = Path(self._temporary.name).resolve() / "copy"
        self._scratch = self.root.with_name("tmp")
        self._scratch.mkdir()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(self.root), str(self.root / "tests"))),
            "TMPDIR": str(self._scratch),
            # threads of libraries do not survive a fork
            "OPENBLAS_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        told = subprocess.run(listing, cwd=self._checkout, capture_output=True, text=True, check=True).stdout
        for name in filter(None, told.split("\0")):
            source, target = self._checkout / name, self.root / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        return self

    def compile(self) -> None:
        """Adds byte code that is checked by content."""
        # two contents of one second and one length would pass for the same file by its time
        options = ("-q", "--invalidation-mode", "checked-hash", "shared", "services")
        subprocess.run([sys.executable, "-m", "compileall", *options], cwd=self.root, check=True)

    def tidy(self) -> None:
        """Removes the temporary files of the processes that were started with `environment`."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(exist_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._temporary.cleanup()


def end(pid: int) -> None:
    """Kills a process with all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [first := psutil.Process(pid), *first.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
