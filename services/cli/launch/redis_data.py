"""What an embedded Redis keeps on disk: who wrote it, whether it is whole, and what can be saved of it when it is not.

The server's own answers to damage are not enough. It starts empty, without a word, where the manifest of the
append-only files or the whole folder is missing; and its advice for anything that it cannot read, another server's data
included, is a command that cuts the files off there.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from services.cli.launch.redis_servers import EmbeddedRedisError, Version
from services.cli.words import counted, typed
from shared.participant import store_marker
from shared.participant.store_marker import set_aside

FOLDER = "appendonlydir"
# What is remembered of the server that wrote the folder, and how long its files were.
_RECORD = "redis.json"
_NAME = "appendonly.aof"
_MANIFEST = f"{_NAME}.manifest"
_LINE = re.compile(r'file "?([^\s"/]+)"? seq (\d+) type ([bih])\b')
_OWN_NAME = re.compile(rf"{re.escape(_NAME)}\.(\d+)\.(base|incr)\.(rdb|aof)")
# In the head of a base file, as the server writes it.
_WROTE = re.compile(rb"\xfa.(valkey|redis)-ver.([0-9.]+)", re.DOTALL)
_HEAD = 256
# What the server's last words are about when it cannot read its files.
_UNREADABLE = re.compile(
    r"append.?only|\bAOF\b|\bRDB\b|manifest|short read|loading the DB|check-aof|check-rdb|wrong signature",
    re.IGNORECASE,
)


class DataDamaged(EmbeddedRedisError):
    """The data cannot be read, or are not what they were; nothing was changed."""

    def __init__(self, data_dir: Path, what: str) -> None:
        super().__init__(
            f"the data of the bus in {data_dir} are damaged: {what}. Nothing was changed. "
            f"`{typed('doctor', '--repair')}` saves what can be read and keeps the rest aside; what is lost comes back "
            f"from a backup (`{typed('restore')} FILE`)"
        )
        self.what = what


@dataclass(frozen=True, slots=True)
class _Part:
    """One append-only file by the manifest: `kind` b (base) or i (what came after)."""

    path: Path
    number: int
    kind: str


# ── who wrote it ─────────────────────────────────────────────────────────────────────────────────────────────────


def remember(data_dir: Path, version: Version | None) -> None:
    """Notes who writes the folder, and how long the files are by now: they are never shorter again. Raises OSError."""
    kept = {part.path.name: part.path.stat().st_size for part in _parts(data_dir) if part.path.exists()}
    told = {} if version is None else {"server": version.family, "version": ".".join(map(str, version.number))}
    fresh = data_dir / f"{_RECORD}.new"
    fresh.write_text(json.dumps({**told, "files": kept}), encoding="utf-8")
    fresh.replace(data_dir / _RECORD)


def writer_of(data_dir: Path) -> Version | None:
    """The server that wrote the folder; None when nobody has, or nothing tells."""
    record = _record(data_dir)
    if (noted := Version.of(str(record.get("server")), str(record.get("version")))) is not None:
        return noted
    for part in _parts(data_dir):
        with contextlib.suppress(OSError), part.path.open("rb") as file:
            if part.kind == "b" and (found := _WROTE.search(file.read(_HEAD))):
                return Version.of(found[1].decode().capitalize(), found[2].decode())
    return None


def _record(data_dir: Path) -> dict[str, Any]:
    try:
        read = json.loads((data_dir / _RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


# ── whether it is whole ──────────────────────────────────────────────────────────────────────────────────────────


def check(data_dir: Path) -> None:
    """Before a server is let near the folder. Raises DataDamaged."""
    folder = data_dir / FOLDER
    parts, record = list(_parts(data_dir)), _record(data_dir)
    sizes = record.get("files")
    kept: dict[str, Any] = sizes if isinstance(sizes, dict) else {}
    if not parts:
        if not (folder / _MANIFEST).exists():
            if kept or store_marker.was_created(data_dir):
                gone = "is empty" if folder.exists() and not any(folder.iterdir()) else "has lost its manifest"
                raise DataDamaged(data_dir, f"{FOLDER} {gone if folder.exists() else 'is gone'}")
            if any(part.path.stat().st_size for part in _guessed(folder) if part.kind == "i"):
                raise DataDamaged(data_dir, f"{FOLDER} has lost its manifest")
            return
        raise DataDamaged(data_dir, f"{_MANIFEST} cannot be read")
    for part in parts:
        name = part.path.name
        if not part.path.exists():
            raise DataDamaged(data_dir, f"{name} is gone")
        size, least = part.path.stat().st_size, kept.get(name, 0)
        if part.kind == "b" and not size:
            raise DataDamaged(data_dir, f"{name} is empty")
        if isinstance(least, int) and size < least:
            raise DataDamaged(data_dir, f"{name} has {size} bytes of {least}")


def unreadable(log: list[str]) -> str | None:
    """Of a server that ended at its start: what it says of its files, without its advice; None when it is about
    something else."""
    said = [line.partition(" # ")[2] or line for line in log if _UNREADABLE.search(line)]
    return said[-1].partition(": make a backup")[0].strip() if said else None


def _parts(data_dir: Path) -> Iterator[_Part]:
    """By the manifest; nothing where it cannot be read."""
    folder = data_dir / FOLDER
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in (folder / _MANIFEST).read_text(encoding="utf-8").splitlines():
            found = _LINE.match(line)
            if found is None:
                return
            if found[3] != "h":
                yield _Part(folder / found[1], int(found[2]), found[3])


def _guessed(folder: Path) -> list[_Part]:
    """By the files' own names: the newest base, and what came after."""
    found: list[_Part] = []
    if folder.is_dir():
        named = [(path, _OWN_NAME.fullmatch(path.name)) for path in folder.iterdir()]
        found = [_Part(path, int(name[1]), name[2][0]) for path, name in named if name]
    bases = sorted((part for part in found if part.kind == "b"), key=lambda part: part.number)
    later = sorted((part for part in found if part.kind == "i"), key=lambda part: part.number)
    return [*bases[-1:], *later]


# ── what can be saved ────────────────────────────────────────────────────────────────────────────────────────────


def repair(data_dir: Path, readable: Callable[[], int | None]) -> list[str]:
    """Puts the damaged files aside and in their place what can be read of them. Sentences that say what was done.

    readable: starts a server on the folder and ends it again: the number of keys it has, or None when it cannot read
        the folder.
    """
    folder = data_dir / FOLDER
    parts = [part for part in _parts(data_dir) if part.path.exists()] or _guessed(folder)
    aside = set_aside(folder)
    (data_dir / _RECORD).unlink(missing_ok=True)
    store_marker.remove_marker(data_dir)
    said = [f"{folder} was put aside as {aside}"] if aside else []
    moved = [_Part(aside / part.path.name, part.number, part.kind) for part in parts] if aside else []
    base = [part for part in moved if part.kind == "b" and part.path.stat().st_size]
    later = [part for part in moved if part.kind == "i"]
    # the first base of a folder is always empty: it was written before anything else
    first = bool(later) and all(part.number == 1 for part in moved if part.kind == "b") and later[0].number == 1
    for attempt in ([*base, *later] if base else [], later if first else []):
        if not attempt:
            continue
        lost = _copied(attempt, folder)
        if (keys := readable()) is not None:
            said.append(f"there again: {counted(keys, 'key')}")
            said += [f"lost: {part.path.name} after byte {end} of {of}" for part, end, of in lost]
            return said
        shutil.rmtree(folder, ignore_errors=True)
    return [*said, "nothing could be read: the bus begins anew; a backup brings conversations and keys back"]


def _copied(parts: list[_Part], folder: Path) -> list[tuple[_Part, int, int]]:
    """A folder with as much of these files as is whole, and a manifest; what was cut off: (part, kept bytes, bytes).

    Nothing that came after a cut is kept: it may rest on what is lost.
    """
    folder.mkdir(mode=0o700)
    lines, lost, cut = [], [], False
    for part in parts:
        size = part.path.stat().st_size
        end = 0 if cut else size
        if part.kind == "i" and not cut:
            with part.path.open("rb") as file:
                end = whole_commands(file, size)
        if not cut:
            copy = folder / part.path.name
            shutil.copyfile(part.path, copy)
            with copy.open("r+b") as file:
                file.truncate(end)
            lines.append(f"file {part.path.name} seq {part.number} type {part.kind}\n")
        if end < size:
            lost.append((part, end, size))
            cut = True
    (folder / _MANIFEST).write_text("".join(lines), encoding="utf-8")
    return lost


def whole_commands(file: BinaryIO, size: int) -> int:
    """The bytes of an append-only file up to the end of the last command that is whole, and of no open transaction."""
    end = 0
    in_transaction = False
    while True:
        words = _command(file, size)
        if words is None:
            return end
        name = words[0].upper() if words else b""
        in_transaction = (in_transaction or name == b"MULTI") and name != b"EXEC"
        if not in_transaction:
            end = file.tell()


def _command(file: BinaryIO, size: int) -> list[bytes] | None:
    """The next command's words (none for a remark between two), or None where nothing more can be read."""
    line = file.readline(1 << 16)
    if line.startswith(b"#") and line.endswith(b"\r\n"):
        return []
    count = _number(line, b"*")
    if not count:
        return None
    words = []
    for _ in range(count):
        length = _number(file.readline(64), b"$")
        if length is None or length > size - file.tell():
            return None
        words.append(file.read(length))
        if file.read(2) != b"\r\n":
            return None
    return words


def _number(line: bytes, sign: bytes) -> int | None:
    digits = line[1:-2]
    return int(digits) if line[:1] == sign and line[-2:] == b"\r\n" and digits.isdigit() and len(digits) < 12 else None
