"""A page as a tree: what stands on it, and what of that is a heading, a link or its own description."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from copy import deepcopy
from html import unescape
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from services.web_fetch.links import Line, absolute

if TYPE_CHECKING:
    from lxml.html import HtmlElement

FURNITURE = (
    "script", "style", "noscript", "template", "svg", "iframe", "nav", "header", "footer", "aside", "form", "button",
    "dialog",
)  # fmt: skip
_INLINE = frozenset({
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "kbd", "mark", "q", "s", "samp",
    "small", "span", "strong", "sub", "sup", "time", "u", "var", "wbr",
})  # fmt: skip
# Where a line break is text; much code stands in no <pre>.
_PREFORMATTED = frozenset({"pre", "code", "samp", "kbd", "textarea", "script", "style"})
# A parser takes such an element for an empty one, and drops the page.
_CLOSED_ROOT = re.compile(r"(<(?:html|head|body)(?=[\s/])[^<>]*)/>", re.IGNORECASE)
_SPACES = re.compile(r"[ \t\r\n\f]+")
# What a parser lets in and does not take back.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_DESCRIPTIONS = frozenset({"description", "og:description", "twitter:description"})
UNSEEN = frozenset({"script", "style", "noscript", "template"})
# A page with a later refresh is meant to be read.
MAX_REFRESH_SECONDS = 5
# `3; url='/next'`: the name and the quotes may be missing, also the closing quote alone.
_REFRESH = re.compile(
    r"\s*(\d{0,6})(?:\.\d*)?\s*[;,\s]\s*(?:url\s*=\s*)?+(?:\"([^\"]*)|'([^']*)|(\S.*))", re.IGNORECASE | re.DOTALL
)
# Comment and CDATA marks around JSON in a script, for old browsers and XML parsers.
_JSON_WRAPPER = re.compile(r"^\s*(?:<!--|(?://|/\*)?\s*<!\[CDATA\[(?:\*/)?)|(?:-->|(?://|/\*)?\s*\]\]>(?:\*/)?)\s*$")
_HAS_MARKUP = re.compile(r"</?(?:p|br|div|span|a|b|i|em|strong|ul|ol|li|h[1-6])\b[^<>]*>", re.IGNORECASE)
# Names (id, class or aria-label) of a thread of comments on blogs and news sites.
_COMMENTS = re.compile(
    r"(?:(?:user|reader|article|post|story|blog|fb)[-_])?comments?"
    r"(?:[-_]?(?:list|area|section|thread|tree|container|wrapper|block|box|body|content))?|disqus[-_]thread",
    re.IGNORECASE,
)


def parsed(html: str) -> HtmlElement | None:
    """The page as a tree in which a line of text is a line: to a browser a line break in the source is a space, except
    in preformatted text. None: there is nothing on the page."""
    # Imported at first use: an idle worker does not need their memory.
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    parser = HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, collect_ids=False, huge_tree=True)
    try:
        tree = document_fromstring(_CLOSED_ROOT.sub(r"\1>", html, count=3).encode("utf-8", "replace"), parser=parser)
    except etree.ParserError:
        return None
    left: list[tuple[HtmlElement, bool]] = [(tree, False)]
    while left:
        element, kept = left.pop()
        kept = kept or element.tag in _PREFORMATTED
        if not kept and element.text:
            element.text = _spaced(element.text)
        for child in element:
            if not kept and child.tail:
                child.tail = _spaced(child.tail)
            left.append((child, kept))
    # A teaser's header contains its title, and extraction tools leave headers out.
    for heading in _linked_headings(tree):
        header = next(heading.iterancestors("header"), None)
        if header is not None and next(header.iterancestors("article"), None) is not None:
            header.drop_tag()
    return tree


def _linked_headings(tree: HtmlElement) -> list[HtmlElement]:
    found: list[HtmlElement] = tree.xpath("(//h2 | //h3 | //h4)[.//a[@href] or ancestor::a[@href]]")
    return found


def teaser_titles(tree: HtmlElement) -> Iterator[str]:
    """Yield the texts of headings with a link."""
    return map(_line, _linked_headings(tree))


def _spaced(text: str) -> str:
    return _NOT_XML.sub("", _SPACES.sub(" ", text))


def whole_page(tree: HtmlElement) -> str:
    """The text of the page without scripts, menus, headers, footers and forms, a line for each block."""
    return "\n".join(line.text for line in lines_of(_content(tree), FURNITURE))


def _content(tree: HtmlElement) -> HtmlElement:
    """Return the element with the page's own text: its <main>, its only or by far longest <article>, or the body."""
    lengths = {article: len(article.text_content()) for article in tree.findall(".//article")}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    if longest is not None and 2 * lengths[longest] < sum(lengths.values()):
        longest = None
    return next((found for found in (tree.find(".//main"), longest, tree.find(".//body")) if found is not None), tree)


def _parts(element: HtmlElement) -> list[HtmlElement | str]:
    parts: list[HtmlElement | str] = [element.text or ""]
    for child in element:
        parts += (child, child.tail or "")
    return parts


def lines_of(
    root: Any,
    without: Collection[str] = UNSEEN,
    *,
    name: Callable[[Any], str] = attrgetter("tag"),
    parts: Callable[[Any], list[Any]] = _parts,
) -> Iterator[Line]:
    """Yield the lines of text below an element, a line for each block, with their links.

    without: names of elements to leave out. name, parts: return the name of an element, and its texts and children in
    order; by default of lxml.
    """
    line, link = Line(), ""
    # The first piece of the open link in the line.
    begin = 0
    # The remaining items, the next one last; None ends a link.
    left: list[Any] = [root]
    while left:
        item = left.pop()
        if item is None:
            line.close(link, begin)
            link = ""
        elif isinstance(item, str):
            for at, part in enumerate(item.split("\n")):
                if at:
                    line.close(link, begin)
                    if line.text:
                        yield line
                    line, begin = Line(), 0
                if part:
                    line.pieces.append(part)
        elif name(item) in without:
            left.append("\n")
        else:
            if name(item) == "a" and item.get("href"):
                line.close(link, begin)
                link, begin = item.get("href"), len(line.pieces)
                left.append(None)
            edge = "" if name(item) in _INLINE else "\n"
            left += [edge, *reversed(parts(item)), edge]
    line.close(link, begin)
    if line.text:
        yield line


def without_comments(tree: HtmlElement) -> HtmlElement | None:
    """Return a copy of the page without its threads of comments; None if it has none."""
    if not any(map(_is_comments, _named_comments(tree))):
        return None
    copy: HtmlElement = deepcopy(tree)
    for element in _named_comments(copy):
        if _is_comments(element):
            element.drop_tree()
    return copy


def _named_comments(tree: HtmlElement) -> list[HtmlElement]:
    names = "concat(@id, @class, @aria-label)"
    found: list[HtmlElement] = tree.xpath(f"//*[contains({names}, 'omment') or contains({names}, 'isqus')]")
    return found


def _is_comments(element: HtmlElement) -> bool:
    if element.tag in ("html", "body", "main") or element.getparent() is None:
        return False
    names = f"{element.get('id') or ''} {element.get('class') or ''} {element.get('aria-label') or ''}".split()
    # The page's own container may have such a name: it contains the <h1>.
    return any(map(_COMMENTS.fullmatch, names)) and element.find(".//h1") is None


def title_of(tree: HtmlElement) -> str:
    """What the browser's window is called."""
    return _line(tree.find(".//title"))


def heading_of(tree: HtmlElement) -> str:
    """The page's first main heading, preferably of its article rather than of the site."""
    found = [*tree.xpath("//main//h1 | //article//h1"), *tree.iter("h1")]
    return next((line for element in found if (line := _line(element))), "")


def base_of(tree: HtmlElement, page: str) -> str:
    """Return the base URL of the page's references (HTML standard, `document base URL`)."""
    base = next((element.get("href") for element in tree.iter("base") if element.get("href")), "")
    return absolute(page, base) or page


def refresh_of(tree: HtmlElement, *, scripts: bool) -> str:
    """Return the reference of the page's refresh within MAX_REFRESH_SECONDS, or "".

    scripts: act like a browser with scripts, which ignores <noscript>.
    """
    for meta in tree.iter("meta"):
        if (meta.get("http-equiv") or "").strip().lower() != "refresh":
            continue
        found = _REFRESH.match(meta.get("content") or "")
        if found is None or float(f"0{found[1]}") > MAX_REFRESH_SECONDS:
            continue
        if not scripts or next(meta.iterancestors("noscript"), None) is None:
            return (found[2] or found[3] or found[4] or "").strip()
    return ""


def frames_of(tree: HtmlElement, *, scripts: bool) -> Iterator[tuple[str, str]]:
    """Yield the title or name, which may be "", and the reference of each frame. scripts: see `refresh_of`."""
    for frame in tree.iter("frame", "iframe"):
        if not scripts or next(frame.iterancestors("noscript"), None) is None:
            names = (" ".join((frame.get(name) or "").split()) for name in ("title", "name"))
            yield next(filter(None, names), ""), frame.get("src") or ""


def json_ld(tree: HtmlElement) -> Iterator[Any]:
    """Yield the JSON-LD objects of the page (https://json-ld.org); malformed ones are skipped."""
    for script in tree.iter("script"):
        if (script.get("type") or "").partition(";")[0].strip().lower() == "application/ld+json":
            with suppress(ValueError, RecursionError):
                yield json.loads(_JSON_WRAPPER.sub("", script.text or ""), strict=False)


def article_bodies(tree: HtmlElement) -> set[str]:
    """Return the texts of articles in the page's JSON-LD (schema.org, `articleBody`)."""
    found: set[str] = set()
    left: list[Any] = list(json_ld(tree))
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            if isinstance(body := value.get("articleBody"), str) and body.strip():
                found.add(_text_of(body))
    return found


def _text_of(body: str) -> str:
    """Return the text of a body that may be HTML, escaped once or twice."""
    if "&lt;" in body or "&amp;" in body:
        body = unescape(body)
    tree = parsed(body) if _HAS_MARKUP.search(body) else None
    return unescape(body) if tree is None else whole_page(tree)


def descriptions(tree: HtmlElement) -> Iterator[str]:
    """What the page says of itself to search engines; many show it as the first paragraph too."""
    for meta in tree.iter("meta"):
        if (meta.get("name") or meta.get("property") or "").lower() in _DESCRIPTIONS:
            yield meta.get("content") or ""


def headings(tree: HtmlElement) -> Iterator[str]:
    """Its headings of all levels; a sentence that is marked as one to make it large is none."""
    lines = (_line(element) for element in tree.iter(*_HEADINGS))
    return (line for line in lines if not line.endswith((".", "。")))


def link_texts(tree: HtmlElement) -> Iterator[str]:
    """The texts that are links; one around a whole teaser has several lines."""
    return map(_line, tree.xpath("//a[@href]/descendant-or-self::*"))


def _line(element: HtmlElement | None) -> str:
    return " ".join(" ".join(element.itertext()).split()) if element is not None else ""
