"""The bytes of files, by user and content: in the folder beside the users' databases. Everything here blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class BlobsAway(OSError):
    """The place where files are kept does not answer, or refuses; another try may help."""


class Blobs(Protocol):
    """`owner`: the name of a user's folder; `digest`: of the content, in hexadecimal. All but `there` and `left` may be
    repeated. Raises BlobsAway."""

    def keep(self, path: Path, owner: str, digest: str) -> None:
        """Takes over the complete file at `path`."""
        ...

    def there(self, owner: str, digest: str) -> bool: ...

    def content(self, owner: str, digest: str) -> Path | bytes:
        """Where the bytes are, or themselves. Raises FileNotFoundError."""
        ...

    def drop(self, owner: str, digest: str) -> None: ...

    def drop_all(self, owner: str) -> None: ...

    def left(self, owner: str) -> Iterator[tuple[str, float]]:
        """What is there, with the time at which it came, in seconds since the epoch."""
        ...


class FolderBlobs:
    """`root`: the folder of all users."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _at(self, owner: str, digest: str = "") -> Path:
        return self._root / owner / "files" / digest

    def keep(self, path: Path, owner: str, digest: str) -> None:
        self._at(owner).mkdir(parents=True, exist_ok=True, mode=0o700)
        os.replace(path, self._at(owner, digest))

    def there(self, owner: str, digest: str) -> bool:
        return self._at(owner, digest).exists()

    def content(self, owner: str, digest: str) -> Path | bytes:
        path = self._at(owner, digest)
        if not path.exists():
            raise FileNotFoundError(path)
        return path

    def drop(self, owner: str, digest: str) -> None:
        self._at(owner, digest).unlink(missing_ok=True)

    def drop_all(self, owner: str) -> None:
        for digest, _ in list(self.left(owner)):
            self.drop(owner, digest)

    def left(self, owner: str) -> Iterator[tuple[str, float]]:
        folder = self._at(owner)
        for path in folder.iterdir() if folder.exists() else ():
            try:
                yield path.name, path.stat().st_mtime
            except FileNotFoundError:
                # somebody has removed it meanwhile
                continue
