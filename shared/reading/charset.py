"""Decode the bytes of a page or a text file.

Order of evidence: byte-order mark, valid UTF-8, the HTTP header, the declaration in the head, detection.
"""

from __future__ import annotations

import codecs
import re

# Browsers decode these labels as the superset that authors mean (WHATWG Encoding Standard).
_SUPERSETS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "cp950",
    "shift_jis": "cp932",
    "euc_jp": "euc_jis_2004",
    "euc_kr": "cp949",
    "tis-620": "cp874",
    "utf-16": "utf-16-le",
    # Labels of the web that Python does not know.
    "windows-31j": "cp932",
    "windows-874": "cp874",
    "gb_2312-80": "gb18030",
    "iso-8859-8-i": "iso8859-8",
}
# Python codecs that are no charset of a page, or that hide markup (utf-7).
_REFUSED = frozenset({"utf-7", "unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined"})
_LAST_RESORT = "cp1252"

_IN_HEADER = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
# The pattern matches comments first: a declaration inside a comment does not count.
_IN_HEAD = re.compile(rb"<!--.*?(?:-->|\Z)|(<meta[\s/][^<>]*>)|(</head|<body)", re.IGNORECASE | re.DOTALL)
_XML_DECLARATION = re.compile(rb"\s*<\?xml[^<>]*>", re.IGNORECASE)
_BETWEEN_TAGS = re.compile(rb"[^<>]+")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_HIGH_BYTES = bytes(range(0x80, 0x100))
_LATIN, _HIGH = re.compile(rb"[a-zA-Z]"), re.compile(rb"[\x80-\xff]")
_ESCAPE = b"\x1b"

# Bytes of text that are enough to recognise an encoding.
SAMPLE_BYTES = 20_000
# Text with fewer bytes outside ASCII, or with more Latin letters for each of them, skips detection.
FEW_HIGH_BYTES, MOSTLY_LATIN = 6, 4
# The zero bytes in its beginning identify a UTF-16 text.
_ZEROS_WITHIN, _ZEROS_SHARE = 4_096, 0.2
# An encoding fits when at most one of so many characters outside ASCII is broken.
_FEW_BROKEN = 10


def load_detector() -> None:
    """Import the detector, before the time of a page is measured."""
    import bs4.dammit  # noqa: F401


def to_text(data: bytes, content_type: str, cut: bool = False) -> str:
    """Return the text of `data`; never raises.

    content_type: the Content-Type header, or "". cut: the bytes may end in the middle of a character. A character that
    cannot be decoded becomes U+FFFD.
    """
    from bs4.dammit import EncodingDetector

    data, marked = EncodingDetector.strip_byte_order_mark(data)
    marked = marked or utf_16(data)
    if marked:
        return _decoded(data, marked, cut)
    text = _decoded(data, "utf-8", cut)
    foreign = len(text) - len(data.translate(None, _HIGH_BYTES))
    if not foreign and _ESCAPE not in data and b"\0" not in data:
        return text
    if foreign and _few(text.count("\ufffd"), foreign):
        return text
    return _decoded(data, _encoding(data, content_type, cut), cut)


def _encoding(data: bytes, content_type: str, cut: bool) -> str:
    """Return the codec of text that is not UTF-8."""
    from bs4.dammit import EncodingDetector

    header = _IN_HEADER.search(content_type)
    stated = [header[1] if header else "", _declaration(data)]
    sample = _sample(_without_end(data, len(data)) if cut else data)
    if _ESCAPE in sample:
        stated.append("iso-2022-jp")
    # Detection takes Western text for Central European, and fails on few bytes: windows-1252 is likelier there.
    high = len(_HIGH.findall(sample))
    western = high < FEW_HIGH_BYTES or len(_LATIN.findall(sample)) > MOSTLY_LATIN * high
    detector = EncodingDetector(b"" if western else sample, user_encodings=[label for label in stated if label])
    for label in detector.encodings:
        name = _codec(label)
        # `utf_16` has excluded UTF-16: a page that was readable up to here is none, whatever it declares.
        if name is None or (name.startswith(("utf-16", "utf-32")) and b"\0" not in data[:_ZEROS_WITHIN]):
            continue
        text = _decoded(sample, name, cut=False)
        if _few(text.count("\ufffd"), len(_NOT_ASCII.findall(text))):
            return name
    return _LAST_RESORT


def _decoded(data: bytes, name: str, cut: bool) -> str:
    return codecs.getincrementaldecoder(name)(errors="replace").decode(data, final=not cut)


def _few(broken: int, foreign: int) -> bool:
    """Return whether few enough of the characters outside ASCII are broken for this encoding to be right."""
    return broken * _FEW_BROKEN <= foreign - broken


def utf_16(data: bytes) -> str | None:
    """Return the codec of UTF-16 text, with or without a byte-order mark: every second byte of markup is zero."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    head = data[:_ZEROS_WITHIN]
    even, odd = head[::2].count(0), head[1::2].count(0)
    enough = max(4, _ZEROS_SHARE * len(head) / 2)
    if odd >= enough and odd > 10 * even:
        return "utf-16-le"
    return "utf-16-be" if even >= enough and even > 10 * odd else None


def _declaration(data: bytes) -> str:
    """Return the encoding from the page's XML declaration or a <meta> of its head, or ""."""
    from bs4.dammit import EncodingDetector

    found = _XML_DECLARATION.match(data)
    declarations = [found[0]] if found else []
    for match in _IN_HEAD.finditer(data):
        if match[2]:
            break
        if match[1]:
            declarations.append(match[1])
    return (
        EncodingDetector.find_declared_encoding(b"\n".join(declarations), is_html=True, search_entire_document=True)
        or ""
    )


def _sample(data: bytes) -> bytes:
    """Return pieces of text outside ASCII, at most SAMPLE_BYTES; no piece ends in the middle of a character."""
    pieces: list[bytes] = []
    room = SAMPLE_BYTES
    for match in _BETWEEN_TAGS.finditer(data):
        piece = match[0]
        if piece.isascii() and _ESCAPE not in piece:
            continue
        if len(piece) > room:
            pieces.append(_without_end(piece, room))
            break
        pieces.append(piece)
        room -= len(piece)
    return b" ".join(pieces)


def _without_end(data: bytes, room: int) -> bytes:
    """Return at most `room` bytes that do not end in the middle of a character."""
    # No encoding of pages uses these bytes inside a longer character.
    end = max(data.rfind(low, 0, room) for low in (b" ", b"\n", b".", b",", b">"))
    return data[: end + 1] if end >= 0 else data[:room]


def _codec(label: str) -> str | None:
    label = label.strip().lower().removeprefix("x-")
    try:
        info = codecs.lookup(_SUPERSETS.get(label, label))
        # Raises LookupError for codecs that do not make text of bytes (zlib, rot13).
        b"x".decode(info.name, errors="ignore")
    except (LookupError, ValueError):
        return None
    name = _SUPERSETS.get(info.name, info.name)
    return None if name in _REFUSED else name
