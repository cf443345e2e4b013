"""Read the text of a PDF, in paragraphs with their pages.

A hostile file can take any time and memory: call `read_pdf` in a process that can be killed (`shared.reading.child`),
with the limits MEMORY and CPU_SECONDS.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shared.reading.lines import one_line, without_controls

# Bytes of memory, and seconds of the processor, of a process that reads one file.
MEMORY = 300 * 1024 * 1024
CPU_SECONDS = 30.0
# The most characters of text; the rest of a file is left out.
MOST_CHARS = 4_000_000
# Readers accept other bytes before the magic number, within the first 1,024 bytes.
_MAGIC, _MAGIC_WITHIN = b"%PDF-", 1_024

_BLANK = re.compile(r"\n[ \t]*\n")
_HYPHENATED = re.compile(r"(\w)-\n(?=[a-zà-ÿ])")

# The parser fails on damaged files with many kinds of exceptions.
_FAILURES = (
    ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError, OSError,
    zlib.error, struct.error,
)  # fmt: skip

Why = Literal["password", "encryption", "damaged", "no_text"]


class PdfUnreadable(Exception):
    """The PDF has no readable text. why: the kind of problem. detail: the parser's message, or the number of pages."""

    def __init__(self, why: Why, detail: str = "") -> None:
        super().__init__(detail)
        self.why: Why = why
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PdfText:
    """blocks: paragraphs, each with its page number from 1 on. pages: of the file. read: pages that were read."""

    title: str
    blocks: list[tuple[int, str]]
    pages: int
    read: int


def is_pdf(data: bytes) -> bool:
    return _MAGIC in data[:_MAGIC_WITHIN]


def load_parser() -> None:
    """Import the parser, and switch its warnings about files off."""
    import pypdf  # noqa: F401

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def read_pdf(data: bytes, *, most_chars: int = MOST_CHARS, seconds: float | None = None) -> PdfText:
    """Return the text of a PDF. Raises PdfUnreadable.

    most_chars, seconds: after this much text or time the function begins no further page.
    """
    # Imported at first use: only readers of PDF need it.
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    started = time.monotonic()
    blocks: list[tuple[int, str]] = []
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise PdfUnreadable("password")
        pages, read, chars = len(reader.pages), 0, 0
        title = str((reader.metadata and reader.metadata.title) or "")
        while read < pages and chars <= most_chars:
            if seconds is not None and read and time.monotonic() - started > seconds:
                break
            found = list(_paragraphs(reader.pages[read].extract_text()))
            read += 1
            blocks += ((read, text) for text in found)
            chars += sum(map(len, found))
    except (DependencyError, PyPdfError, *_FAILURES) as exc:
        detail = str(exc)[:200]
        if isinstance(exc, DependencyError) or (isinstance(exc, NotImplementedError) and "encryption" in detail):
            raise PdfUnreadable("encryption", detail) from exc
        raise PdfUnreadable("damaged", f"{type(exc).__name__}: {detail}") from exc
    if not blocks:
        raise PdfUnreadable("no_text", str(pages))
    return PdfText(one_line(without_controls(title)), blocks, pages, read)


def _paragraphs(page: str) -> Iterator[str]:
    for part in _BLANK.split(_HYPHENATED.sub(r"\1", without_controls(page))):
        # Line ends inside a paragraph come from the width of the page.
        if text := one_line(part):
            yield text
