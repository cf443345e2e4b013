"""Opening an export: a file, a folder or a zip archive with JSON in it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import orjson

from services.cli.local_files import FileTrouble

# All of a file is in memory while it is read.
MAX_BYTES = 500 * 1024**2


def documents(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The JSON documents of an export with their names; a file of JSON lines is one list.

    names: patterns of those that count in a folder or archive; a file is read whatever its name.
    Raises FileTrouble.
    """
    some = False
    try:
        for name, raw in _parts(path, names):
            some = True
            yield name, _parsed(name, raw)
    except FileNotFoundError as exc:
        raise FileTrouble(f"there is no file {path}") from exc
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as exc:
        raise FileTrouble(f"{path} cannot be read: {exc}") from exc
    if not some:
        raise FileTrouble(f"{path} holds no {' or '.join(names)}: name the file of the export itself")


def _parts(path: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for one in sorted(path.rglob("*")):
            if one.is_file() and _wanted(one.name, names):
                yield one.name, _read(one)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for inside in sorted(archive.infolist(), key=lambda one: one.filename):
                if _wanted(Path(inside.filename).name, names):
                    _bounded(inside.filename, inside.file_size)
                    yield inside.filename, archive.read(inside)
    else:
        yield path.name, _read(path)


def _wanted(name: str, names: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in names)


def _read(path: Path) -> bytes:
    _bounded(path.name, path.stat().st_size)
    return path.read_bytes()


def _bounded(name: str, size: int) -> None:
    if size > MAX_BYTES:
        raise FileTrouble(
            f"{name} has {size / 1024**2:,.0f} MB, and at most {MAX_BYTES // 1024**2} are read at once: split it "
            "(JSON lines can be cut at any line)"
        )


def _parsed(name: str, raw: bytes) -> Any:
    text = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        whole = exc
    lines = [line for line in text.split(b"\n") if line.strip()]
    try:
        found = [orjson.loads(line) for line in lines]
    except orjson.JSONDecodeError as exc:
        raise FileTrouble(f"{name} is not JSON ({whole}): is it whole? Export it again") from exc
    if not found:
        raise FileTrouble(f"{name} is empty: export it again")
    return found
