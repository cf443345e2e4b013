"""Search files for traces of a word, open files included, and make files that cannot grow."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


def having(word: str, folder: Path) -> list[str]:
    """Files below a folder with a word in them, in whatever case, by their paths from there.

    Another process looks: whoever closes a file that SQLite has open in the same process undoes SQLite's locks on it
    (sqlite.org/howtocorrupt.html, 2.2). Files that go meanwhile, and sockets, are passed over.
    """
    command = ["grep", "-rlaiFs", "-e", word, "."]
    found = subprocess.run(command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True)
    return sorted(line.removeprefix("./") for line in found.stdout.splitlines())


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """This process cannot write files beyond a size, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_disk() -> Iterator[None]:
    """The operating system reports no free space on any disk."""
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        about = list(real(path))
        # f_bfree and f_bavail
        about[3] = about[4] = 0
        return os.statvfs_result(about)

    with mock.patch("os.statvfs", full):
        yield
