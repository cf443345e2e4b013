"""The text of a page that is too heavy to be parsed, by searches that take no longer than the page is long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.entities import html5

from services.web_fetch.links import Line

FURNITURE = (
    "script", "style", "noscript", "template", "svg", "iframe", "nav", "header", "footer", "aside", "form", "button",
    "dialog",
)  # fmt: skip

INLINE = (
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "kbd", "mark", "q", "s", "samp",
    "small", "span", "strong", "sub", "sup", "time", "u", "var", "wbr",
)  # fmt: skip

# A page with more is not parsed. 30,000 tags take the extractor about a second.
MAX_TAGS = 30_000
# With those in scripts, which take a tenth of a second to be told apart.
MAX_BRACKETS = 150_000
# Of one tag; the parser compares each with all others.
MAX_ATTRIBUTES = 300
MAX_DEPTH = 1_000

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
# What comes directly behind a bracket is looked at first: millions of brackets are no tags.
_INLINE = re.compile(
    rf"<(?=[/a-zA-Z])/?(?:{'|'.join(INLINE)})(?=[\s/>])[^<>]*>",
    re.IGNORECASE,
)
_ANY = re.compile(r"<[/!?a-zA-Z][^<>]*(?:>|\Z)|<\Z")
_SKIPPED = re.compile(
    rf"<(?=[/!{''.join(name[0] for name in FURNITURE)}])(?:(/?)({'|'.join(FURNITURE)})(?=[\s/>])|!--)|-->",
    re.IGNORECASE,
)
_TITLE_WITHIN = 200_000
_TITLE = re.compile(r"<title(?=[\s>])[^<>]*>([^<]*)", re.IGNORECASE)
# The beginning or the end of a link.
_LINK = re.compile(r"<a\s([^<>]*)>|</a(?=[\s>])", re.IGNORECASE)
_LINK_WITHIN = 1_000
_HREF = re.compile(r"(?:^|\s)href\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'>]+)", re.IGNORECASE)
_BASE = re.compile(r"<base\s([^<>]*)>", re.IGNORECASE)
_REFERENCE = re.compile(r"&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z][a-zA-Z0-9]{1,31}));")
# More references than that stay as they are written.
_MAX_REFERENCES = 100_000


def too_heavy(html: str) -> bool:
    """Whether a page has so many tags, such deep ones or such full ones that parsing it is not even tried.

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


def lean(html: str) -> str:
    """The page without what is in its scripts and styles, where leaving these out is little work."""
    return html if html.count("<") > MAX_BRACKETS else _without_scripts(html)


def plain_text(html: str) -> tuple[str, str]:
    """Title and text, without scripts, menus, headers, footers and forms."""
    title = _TITLE.search(html, 0, _TITLE_WITHIN)
    text = _ANY.sub("\n", _INLINE.sub("", _without_furniture(html)))
    lines = (" ".join(line.split()) for line in _unescaped(text).split("\n"))
    return " ".join(_unescaped(title[1]).split()) if title else "", "\n".join(line for line in lines if line)


def plain_links(html: str) -> Iterator[Line]:
    """Yield a line for each link outside the furniture."""
    href, begin = "", 0
    html = _without_furniture(html)
    for match in _LINK.finditer(html):
        if href:
            text = _ANY.sub(" ", html[begin : min(match.start(), begin + _LINK_WITHIN)])
            yield Line([_unescaped(text)], [(href, 0, 1)])
        found = _HREF.search(match[1] or "")
        href = _unescaped(found[1].strip("\"'")) if found else ""
        begin = match.end()


def plain_base(html: str) -> str:
    """Return the reference of <base>, or ""."""
    base = _BASE.search(html, 0, _TITLE_WITHIN)
    found = _HREF.search(base[1]) if base else None
    return _unescaped(found[1].strip("\"'")) if found else ""


def _without_furniture(html: str) -> str:
    """What is never closed is not left out: it would take the rest of the page with it."""
    lower = html.lower()
    closed = {"": html.rfind("-->")} | {name: lower.rfind(f"</{name}") for name in FURNITURE}
    kept, at, inside = [], 0, None
    for match in _SKIPPED.finditer(html):
        name = (match[2] or "").lower()
        closes = match[1] == "/" or match[0] == "-->"
        if inside is None and not closes and closed[name] > match.start():
            kept.append(html[at : match.start()])
            at, inside = match.start(), name
        elif inside == name and closes:
            at, inside = match.end() if not name else match.start(), None
    return "".join([*kept, html[at:]])


def _unescaped(text: str) -> str:
    return _REFERENCE.sub(_character, text, count=_MAX_REFERENCES)


def _character(match: re.Match[str]) -> str:
    decimal, hexadecimal, name = match.groups()
    if name:
        return html5.get(f"{name};", match[0])
    number = int(decimal) if decimal else int(hexadecimal, 16)
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"
