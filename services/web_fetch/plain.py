"""Pages that are too heavy for the extraction: whether a page is one, and the text of its beginning.

Beautiful Soup takes 10 microseconds and 1 kB for each bracket of a page, and does not slow down with its depth or its
attributes: PLAIN_TAGS brackets take at most half a second and 40 MB.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from services.web_fetch.links import Line
from services.web_fetch.tree import FURNITURE, UNSEEN, lines_of

if TYPE_CHECKING:
    from bs4.element import PageElement, Tag

# A page with more tags is not extracted: 30,000 take the extractor about a second.
MAX_TAGS = 30_000
# With the brackets in scripts, which take a tenth of a second to find.
MAX_BRACKETS = 150_000
# Of one tag: lxml compares each with all others.
MAX_ATTRIBUTES = 300
MAX_DEPTH = 1_000
# The beginning of a heavy page: at most so many brackets and characters.
PLAIN_TAGS, PLAIN_CHARS = 40_000, 1_000_000

# What needs no end tag does not make a page deep.
_UNCLOSED = frozenset({
    "p", "li", "dt", "dd", "option", "optgroup", "tr", "td", "th", "thead", "tbody", "tfoot", "colgroup", "rt", "rp",
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
    "html", "head", "body",
})  # fmt: skip
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/<>]*)([^<>]*)>")
# A quoted attribute value, which may contain markup, the path of a drawing or a base64 image.
_VALUE = re.compile(r"=\s*+(?:\"[^\"]*\"|'[^']*')")
_CODE = re.compile(r"<(/?)(script|style)(?=[\s/>])[^<>]*>", re.IGNORECASE)


def too_heavy(html: str) -> bool:
    """Return whether a page has too many tags, levels or attributes to be extracted.

    Scripts and quoted attribute values do not count. Takes linear time.
    """
    if html.count("<") > MAX_BRACKETS:
        return True
    html = _VALUE.sub("=", _without_scripts(html))
    if html.count("<") > MAX_TAGS:
        return True
    depth = 0
    for match in _TAG.finditer(html):
        closes, name, rest = match.groups()
        if rest.count("=") > MAX_ATTRIBUTES or rest.count(" ") > 4 * MAX_ATTRIBUTES:
            return True
        if not rest.endswith("/") and name.lower() not in _UNCLOSED:
            depth = max(0, depth - 1) if closes else depth + 1
            if depth > MAX_DEPTH:
                return True
    return False


def _without_scripts(html: str) -> str:
    """Without what is in scripts and styles. One that is never closed stays: it would hide the rest of the page."""
    marks = list(_CODE.finditer(html))
    last = {match[2].lower(): match.start() for match in marks if match[1]}
    kept, at, inside = [], 0, ""
    for match in marks:
        name = match[2].lower()
        if not inside and not match[1] and last.get(name, -1) > match.start():
            kept.append(html[at : match.end()])
            inside = name
        elif inside == name and match[1]:
            at, inside = match.start(), ""
    return "".join([*kept, html[at:]])


def beginning(html: str) -> tuple[str, bool]:
    """Return at most PLAIN_CHARS and PLAIN_TAGS of a page, and whether text is missing: scripts and styles go first."""
    if len(html) > PLAIN_CHARS and html.count("<") <= MAX_BRACKETS:
        html = _without_scripts(html)
    pieces = html[:PLAIN_CHARS].split("<", PLAIN_TAGS + 1)
    return "<".join(pieces[: PLAIN_TAGS + 1]), len(html) > PLAIN_CHARS or len(pieces) > PLAIN_TAGS + 1


class PlainPage:
    """A page as Beautiful Soup reads it."""

    def __init__(self, html: str) -> None:
        from bs4 import BeautifulSoup

        # The parser returns each NUL as a text of its own.
        self._soup = BeautifulSoup(html.replace("\0", ""), "lxml")

    @property
    def title(self) -> str:
        return " ".join(self._soup.title.get_text().split()) if self._soup.title else ""

    @property
    def base(self) -> str:
        """The reference of <base>, or ""."""
        base = self._soup.find("base", href=True)
        return str(base["href"]) if base else ""

    def lines(self) -> Iterator[Line]:
        """Yield the lines with their links, without menus, headers, footers and forms, unless these are all of it."""
        lines = self._lines(FURNITURE)
        first = next(lines, None)
        return self._lines(UNSEEN) if first is None else chain([first], lines)

    def _lines(self, without: Collection[str]) -> Iterator[Line]:
        return lines_of(self._soup.body or self._soup, without, name=attrgetter("name"), parts=_parts)


def _parts(tag: Tag) -> list[PageElement]:
    from bs4.element import PreformattedString

    # Comments and declarations are strings too.
    return [part for part in tag.contents if not isinstance(part, PreformattedString)]
