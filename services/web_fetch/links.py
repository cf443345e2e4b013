"""The links of a page's main text and its frames, with absolute URLs. Pure."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urljoin

from services.web_fetch.errors import Blocked
from services.web_fetch.url import parse
from services.web_fetch.words import count, words

MAX_LINKS = 100
# Characters of a link's text, and of its URL; a link with a longer URL is left out.
MAX_TEXT, MAX_URL = 200, 1_000
# Characters of the main text in which links are looked for.
SEARCHED = 500_000
# A link is in the main text when this many words of its line stand there in a row.
_ROW = 4
# When there are too many links, those with fewer words ("hide", "2 comments") are dropped before titles.
TITLE_WORDS = 3
# Browsers remove these from a reference.
_LINE_BREAKS = re.compile(r"[\t\r\n]")


@dataclass(slots=True)
class Line:
    """A line of the page: its pieces of text, and its links as (href, first piece, piece behind the last)."""

    pieces: list[str] = field(default_factory=list)
    anchors: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())

    def close(self, href: str, begin: int) -> None:
        """End the link that began at piece `begin`; an empty `href` or a link without text is left out."""
        if href and begin < len(self.pieces):
            self.anchors.append((href, begin, len(self.pieces)))


@dataclass(frozen=True, slots=True)
class Link:
    text: str
    url: str


def absolute(base: str, href: str) -> str | None:
    """Return the http(s) URL of a reference, without its fragment. None: web_fetch would not fetch it."""
    try:
        return str(parse(urljoin(base, _LINE_BREAKS.sub("", href).strip())))
    except (Blocked, ValueError):
        return None


def links_in(
    lines: Iterable[Line], text: str, offset: int, page: str, base: str, frames: Iterable[tuple[str, str]] = ()
) -> list[Link]:
    """Return at most MAX_LINKS links that stand in `text`, in the order of the page, then `frames`; each URL once.

    When there are more, those behind `offset` come first, then those with a title. page: the URL of the page, which is
    not a link. base: the base URL of references. frames: the name and the reference of each; without a name, the URL is
    the link's text.
    """
    late, early = _Text(text[offset : offset + SEARCHED]), _Text(text[:offset][:SEARCHED])
    urls: dict[str, str | None] = {}
    # By URL, in the order of the page: whether a link to it stands behind `offset`.
    found: dict[str, bool] = {}
    # By URL: the number of words and the text of its first link with a title, else of its first link.
    titles: dict[str, tuple[int, str]] = {}
    for line in lines:
        if not line.anchors:
            continue
        own: list[str] = []
        # The index of the first word of each piece.
        begins = [0]
        for piece in line.pieces:
            own += words(piece)
            begins.append(len(own))
        for href, first, behind in line.anchors:
            begin, end = begins[first], begins[behind]
            if href not in urls:
                urls[href] = absolute(base, href)
            url = urls[href]
            if url is None or url == page or len(url) > MAX_URL or begin == end:
                continue
            if titles.get(url, (0, ""))[0] < min(end - begin, TITLE_WORDS):
                titles[url] = (end - begin, " ".join("".join(line.pieces[first:behind]).split())[:MAX_TEXT])
            if late.has(own, begin, end):
                found[url] = True
            elif early.has(own, begin, end):
                found.setdefault(url, False)
    for name, src in frames:
        url = absolute(base, src)
        if src and url is not None and url != page and len(url) <= MAX_URL and url not in found:
            found[url] = True
            titles[url] = (count(name), (name or url)[:MAX_TEXT])
    best = sorted(found, key=lambda url: (not found[url], titles[url][0] < TITLE_WORDS))
    chosen = set(best[:MAX_LINKS])
    return [Link(titles[url][1], url) for url in found if url in chosen]


class _Text:
    """An index of a text: finds whether it has a line of the page, in time independent of the text's length."""

    def __init__(self, text: str) -> None:
        found = words(text)
        self._rows = {hash(tuple(found[at : at + _ROW])) for at in range(len(found) - _ROW + 1)}
        del found
        # Lines, and cells of tables, that are shorter than a row.
        cells = (words(cell) for line in io.StringIO(text) for cell in line.split("|"))
        self._short = {tuple(cell) for cell in cells if len(cell) < _ROW}

    def has(self, line: list[str], begin: int, end: int) -> bool:
        """Return whether the text has the words from `begin` to `end` of a line; few words are searched with their
        neighbours."""
        if len(line) < _ROW:
            return tuple(line) in self._short
        if end - begin >= _ROW:
            rows = [hash(tuple(line[at : at + _ROW])) in self._rows for at in range(begin, end - _ROW + 1)]
            return 2 * sum(rows) > len(rows)
        first, last = max(0, end - _ROW), min(begin, len(line) - _ROW)
        if any(hash(tuple(line[at : at + _ROW])) in self._rows for at in range(first, last + 1)):
            return True
        # The text may have the link in a line or a cell of its own.
        return tuple(line[begin:end]) in self._short
