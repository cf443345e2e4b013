"""Bytes of a page to text: byte-order mark, then the header, then what the page says itself, then UTF-8."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# What browsers take these labels for: the superset that authors really mean.
_MEANT = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "tis-620": "cp874",
}
# Codecs of Python that are no charsets of pages, or that hide markup (utf-7).
_REFUSED = frozenset({"utf-7", "unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined"})

_IN_HEADER = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_IN_PAGE = re.compile(
    rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]+)|^\s*<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([\w.:-]+)",
    re.IGNORECASE,
)
SEARCHED = 4_096


def to_text(data: bytes, content_type: str, cut: bool = False) -> str:
    """The text of a page; `cut` says that the bytes may end in the middle of a character.

    Never fails: what fits no declared charset is read as UTF-8 if it is valid, else as Windows-1252.
    """
    for mark, name in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, errors="replace")
    declared = list(_declared(data, content_type))
    for name in [*declared, "utf-8"]:
        try:
            return codecs.getincrementaldecoder(name)(errors="strict").decode(data, final=not cut)
        except UnicodeError:
            continue
    return data.decode(declared[0] if declared else "cp1252", errors="replace")


def _declared(data: bytes, content_type: str) -> Iterator[str]:
    header = _IN_HEADER.search(content_type)
    if header and (name := _codec(header[1])):
        yield name
    page = _IN_PAGE.search(data[:SEARCHED])
    if page and (name := _codec((page[1] or page[2]).decode("ascii", errors="replace"))):
        # The declaration was readable as ASCII: the page cannot be UTF-16 or UTF-32.
        yield "utf-8" if name.startswith(("utf-16", "utf-32")) else name


def _codec(label: str) -> str | None:
    try:
        info = codecs.lookup(label.strip().lower().removeprefix("x-"))
        # Raises LookupError for codecs that do not make text of bytes (zlib, rot13).
        b"x".decode(info.name, errors="ignore")
    except (LookupError, ValueError):
        return None
    name = _MEANT.get(info.name, info.name)
    return None if name in _REFUSED else name
