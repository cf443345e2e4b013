"""Which files are taken, and what each is: by its first bytes, not by its name. Pure."""

from __future__ import annotations

import codecs
import re
from pathlib import PurePosixPath
from typing import Literal

from shared.errors import ToolError

Kind = Literal["pdf", "html", "markdown", "text", "png", "jpeg", "webp", "gif"]

TYPES: dict[Kind, str] = {
    "pdf": "application/pdf",
    "html": "text/html",
    "markdown": "text/markdown",
    "text": "text/plain",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
}
KINDS: dict[str, Kind] = {mime: kind for kind, mime in TYPES.items()}
IMAGES: frozenset[Kind] = frozenset({"png", "jpeg", "webp", "gif"})
# So much of a file's beginning is looked at.
HEAD = 4_096

# What may stand before a PDF's own first bytes, as readers of PDF allow it.
_PDF_WITHIN = 1_024
_BOMS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
# A comment ends where it ends: tried in all ways, a row of them would take for ever.
_HTML = re.compile(rb"\s*+(?:(?><!--.*?-->)\s*+)*+(?:<!doctype\s+html|<html[\s>])", re.IGNORECASE | re.DOTALL)
# By the ends of names: what such a file must be.
_NAMED: dict[str, Kind] = {
    ".pdf": "pdf", ".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif",
}  # fmt: skip
_TEXTS: dict[str, Kind] = {
    ".html": "html", ".htm": "html", ".xhtml": "html", ".md": "markdown", ".markdown": "markdown",
}  # fmt: skip
_OTHERS = (
    (b"PK\x03\x04", "a ZIP archive or an Office document: save what is in it as PDF or text"),
    (b"\xd0\xcf\x11\xe0", "an Office document of an older form: save it as PDF or text"),
    (b"{\\rtf", "a rich text document: save it as PDF or text"),
    (b"\x1f\x8b", "a compressed archive: add the files that are in it"),
    (b"7z\xbc\xaf", "a compressed archive: add the files that are in it"),
    (b"Rar!", "a compressed archive: add the files that are in it"),
    (b"%!PS", "a PostScript document: save it as PDF"),
)
_TAKEN = "text, Markdown, HTML, PDF and images (PNG, JPEG, WebP, GIF) are taken"


class FileRefused(ToolError):
    """A file that cannot be taken; the text says why, and what to do. `code`: for programs."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def kind_of(name: str, declared: str, head: bytes) -> Kind:
    """What a file is. `declared`: the type that its sender gives it; `head`: its first HEAD bytes. Raises
    FileRefused."""
    if not head:
        raise FileRefused("empty_file", f"{name} is empty")
    ending = PurePosixPath(name.lower()).suffix
    found = _by_magic(head)
    wanted = _NAMED.get(ending)
    if wanted is not None and found != wanted and not (wanted in IMAGES and found in IMAGES):
        raise FileRefused(
            "wrong_type", f"{name} is not what its name says: its first bytes are not those of a {ending[1:]} file"
        )
    if found is not None:
        return found
    if (other := next((what for magic, what in _OTHERS if head.startswith(magic)), None)) is not None:
        raise FileRefused("unsupported_type", f"{name} is {other}")
    if not head.startswith(_BOMS) and b"\0" in head:
        raise FileRefused("unsupported_type", f"{name} is no text and no file that can be read: {_TAKEN}")
    declared = declared.partition(";")[0].strip().lower()
    if ending in _TEXTS:
        return _TEXTS[ending]
    if _HTML.match(head.removeprefix(codecs.BOM_UTF8)) or declared in ("text/html", "application/xhtml+xml"):
        return "html"
    return "markdown" if declared == "text/markdown" else "text"


def _by_magic(head: bytes) -> Kind | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "webp"
    return "pdf" if b"%PDF-" in head[:_PDF_WITHIN] else None


def clean_name(given: str) -> str:
    """A file's name as it is shown: without folders, on one line, at most 200 characters."""
    last = given.replace("\\", "/").rpartition("/")[2]
    shown = "".join(char for char in last if char.isprintable()).strip()[:200]
    return "file" if shown in ("", ".", "..") else shown
