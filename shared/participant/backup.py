"""The file of a backup: gzip'ed JSON lines that prove their own completeness.

    {"local2_backup": 1, "product": "0.1.0", "created": 1700000000000, "sections": {"sessions": 1}, …}
    {"section": "sessions", "record": {…}}
    {"end": "sessions", "count": 1, "sha256": "…"}
    {"complete": true, "count": 1, "sha256": "…"}

`sections` names what is in it, each with the version of its records. A section's digest is over its record lines, that
of the last line over everything before it. A file without the last line is incomplete, whatever else is in it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from os import SEEK_CUR
from typing import Any, BinaryIO

import orjson

from shared.errors import Local2Error

FORMAT = 1
MEDIA_TYPE = "application/gzip"
# 50 turns of a session are one line: far below this.
MAX_LINE = 64 * 1024 * 1024
_LEVEL = 6
_MAGIC = b"\x1f\x8b"

Record = dict[str, Any]


class BackupError(Local2Error):
    """A file is not a backup that can be used. `code` is for programs, the text says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Header:
    """`created` is the bus's clock, in ms since the epoch; `without`: sections that were left out on purpose.

    `notes`: what somebody who keeps the file should know, as sentences.
    """

    product: str
    created: int
    sections: Mapping[str, int]
    without: Sequence[str] = ()
    notes: Sequence[str] = ()

    def line(self) -> dict[str, Any]:
        return {
            "local2_backup": FORMAT,
            "product": self.product,
            "created": self.created,
            "sections": dict(self.sections),
            "without": list(self.without),
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Summary:
    """What a complete file holds. `digest` tells two files with different content apart."""

    header: Header
    counts: dict[str, int] = field(default_factory=dict)
    digest: str = ""


def product_version() -> str:
    return version("local2")


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """Makes the file piece by piece; every method returns the bytes to append, which may be none yet."""

    def __init__(self) -> None:
        self._gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
        self._all = sha256()
        self._section = sha256()
        self._count = 0
        self._total = 0

    def begin(self, header: Header) -> bytes:
        return self._line(header.line())

    def records(self, section: str, records: Sequence[Record]) -> bytes:
        lines = b"".join([orjson.dumps({"section": section, "record": record}) + b"\n" for record in records])
        self._section.update(lines)
        self._count += len(records)
        return self._add(lines)

    def end(self, section: str) -> bytes:
        done = self._line({"end": section, "count": self._count, "sha256": self._section.hexdigest()})
        self._total += self._count
        self._section, self._count = sha256(), 0
        return done

    def complete(self) -> bytes:
        last = self._line({"complete": True, "count": self._total, "sha256": self._all.hexdigest()})
        return last + self._gzip.flush()

    def failed(self, code: str, message: str) -> bytes:
        """Instead of the end: why there is none."""
        return self._line({"failed": code, "message": message}) + self._gzip.flush()

    def _line(self, value: dict[str, Any]) -> bytes:
        return self._add(orjson.dumps(value) + b"\n")

    def _add(self, lines: bytes) -> bytes:
        self._all.update(lines)
        return self._gzip.compress(lines)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Reader:
    """Reads a file from its beginning. `header` is there at once, `summary` when `records` has ended.

    Every method raises BackupError for a file that is not whole, not ours, or newer than this version.
    """

    def __init__(self, file: BinaryIO) -> None:
        start = file.read(len(_MAGIC))
        file.seek(-len(start), SEEK_CUR)
        if start and not _MAGIC.startswith(start):
            raise _foreign()
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self._all = sha256()
        self._current = b""
        line = self._line() if start else b""
        try:
            self.header = _header(orjson.loads(line) if line else None)
        except orjson.JSONDecodeError as exc:
            raise _foreign() from exc
        self.summary: Summary | None = None

    @property
    def size(self) -> int:
        """Bytes of the line that was read last."""
        return len(self._current)

    def records(self) -> Iterator[tuple[str, Record]]:
        """(section, record), in the order of the file; what is wrong is known for certain only at the end."""
        found = Summary(self.header)
        section, count, digest = "", 0, sha256()
        for value in iter(self._next, None):
            match value:
                case {"section": str(name), "record": dict(record)} if name in self.header.sections:
                    if section not in ("", name) or name in found.counts:
                        raise _corrupt(f"a record of {name} at the wrong place")
                    section, count = name, count + 1
                    digest.update(self._current)
                    yield name, record
                case {"end": str(name), "count": int(said), "sha256": str(seal)} if name in self.header.sections:
                    if section not in ("", name) or name in found.counts:
                        raise _corrupt(f"the end of {name} at the wrong place")
                    if said != count or seal != digest.hexdigest():
                        raise _corrupt(f"the checksum of {name} is wrong")
                    found.counts[name] = count
                    section, count, digest = "", 0, sha256()
                case {"complete": True, "count": int(said), "sha256": str(seal)}:
                    if seal != self._before or said != sum(found.counts.values()):
                        raise _corrupt("the checksum of the whole is wrong")
                    if missing := sorted(set(self.header.sections) - set(found.counts)):
                        raise _corrupt(f"{missing[0]} is missing")
                    if self._next() is not None:
                        raise _corrupt("something follows its last line")
                    found.digest = seal
                    self.summary = found
                    return
                case {"failed": str(code), "message": str(message)}:
                    raise BackupError("incomplete", f"the backup was not finished: {message} ({code})")
                case _:
                    raise _corrupt("a line that has no meaning")
        raise _truncated()

    def _next(self) -> Any:
        """The next line's value, None after the last one."""
        line = self._line()
        try:
            return orjson.loads(line) if line else None
        except orjson.JSONDecodeError as exc:
            raise _corrupt("a line that is not JSON") from exc

    def _line(self) -> bytes:
        self._before = self._all.hexdigest()
        try:
            line = self._file.readline(MAX_LINE)
        except EOFError as exc:
            raise _truncated() from exc
        except gzip.BadGzipFile as exc:
            raise _corrupt(str(exc)) from exc
        except zlib.error as exc:
            raise _corrupt("it cannot be decompressed") from exc
        self._current = line
        self._all.update(line)
        if line and not line.endswith(b"\n"):
            raise _corrupt("a line without an end")
        return line


def examine(file: BinaryIO) -> Summary:
    """Reads a whole file and says what is in it. Raises BackupError."""
    reader = Reader(file)
    for _ in reader.records():
        pass
    assert reader.summary is not None, "records() ends with a summary or raises"
    return reader.summary


def _header(value: Any) -> Header:
    match value:
        case None:
            raise BackupError("truncated", "the file is empty: it is not a backup")
        case {"local2_backup": int(number)} if number > FORMAT:
            raise BackupError(
                "newer_format",
                f"the file has format {number}, this version reads up to {FORMAT}: "
                f"restore it with LoCAL2 {value.get('product', 'that made it')} or newer",
            )
        case {
            "local2_backup": int(number),
            "product": str(product),
            "created": int(created),
            "sections": dict(sections),
            "without": list(without),
            "notes": list(notes),
        } if number >= 1 and all(isinstance(each, int) for each in sections.values()):
            return Header(product, created, sections, [str(name) for name in without], [str(note) for note in notes])
        case _:
            raise _foreign()


def _foreign() -> BackupError:
    return BackupError("not_a_backup", "the file is not a backup of LoCAL2: give the one that `local2 backup` wrote")


def _truncated() -> BackupError:
    return BackupError(
        "truncated", "the file ends before its last line: it was cut off. Nothing was changed; use a complete copy"
    )


def _corrupt(what: str) -> BackupError:
    return BackupError("corrupt", f"the file is damaged ({what}). Nothing was changed; use another copy")
