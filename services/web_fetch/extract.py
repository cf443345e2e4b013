"""The main text of a page: what its author wrote, without menus, banners and footers.

trafilatura finds it on pages that have an article: read carefully it knows where the article begins and ends, read
as it comes it loses less in between, and both together are better than either. On lists, shops and tiny pages it finds
too little; there its generous mode is used, and where even that finds next to nothing the whole page without its
furniture. What is then still there of the page around the text goes: the heading, which has a place of its own, and
links to other pages below it. The rules and numbers were chosen by tests/eval/extraction.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.web_fetch.links import Line, Link, absolute, links_in
from services.web_fetch.plain import PLAIN_CHARS, PlainPage, beginning, too_heavy
from services.web_fetch.tree import (
    article_bodies,
    base_of,
    descriptions,
    frames_of,
    heading_of,
    headings,
    lines_of,
    link_texts,
    parsed,
    refresh_of,
    teaser_titles,
    title_of,
    whole_page,
    without_comments,
)
from services.web_fetch.words import count, joined

if TYPE_CHECKING:
    from lxml.html import HtmlElement

# A text with so many words is taken for the article, however much else is on the page.
ENOUGH_WORDS = 100
# A shorter one must be this share of the page's words.
ENOUGH_SHARE = 0.7
# Less than both of these is next to nothing.
FEW_WORDS, FEW_SHARE = 25, 0.4
# Nearly all of the page.
ALL_SHARE = 0.9
# A page with more elements is read once: the second reading would take as long again.
FILLED_ELEMENTS = 4_000
# Kept lines of which fewer stand in the other reading are no places in it.
SAME_SHARE = 0.5
# The most sentences of an article in JSON-LD that are searched on the page.
COMPARED_SENTENCES = 200
# A page is a list of stories when its text lacks this many titles, and has at most this many words for each of them.
LOST_TITLES, STORY_WORDS = 3, 80
# Less than this share of a text is no text with links below it, but a list of links.
KEPT_SHARE = 0.5
# A description with fewer words may stand anywhere.
LEAD_WORDS = 8
# How much of the extracted text is searched for the heading before it is put in front.
HEADING_WITHIN = 400

HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})

_LOOKS_LIKE_HTML = re.compile(
    r"\s*+(?:(?><!--.*?-->)\s*+)*+<(?:!doctype html|html|head|body)", re.IGNORECASE | re.DOTALL
)
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])
# Few texts have any, and finding none is quicker than looking each character up.
_CONTROL = re.compile(f"[{''.join(map(chr, _CONTROLS))}]")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]]*\s*$")
_SENTENCES = re.compile(r"\n|(?<=[.!?…。！？])\s+")
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


@dataclass(frozen=True, slots=True)
class Extract:
    """text: the main text alone. heading: the heading above it, if the text does not begin with it. cut: only the
    beginning of the page was read. links: of the main text. refresh: the URL of the page's refresh, or ""."""

    title: str
    text: str
    cut: bool = False
    heading: str = ""
    links: tuple[Link, ...] = ()
    refresh: str = ""

    @property
    def headed(self) -> str:
        """The text as a reader wants it: below its heading."""
        return f"{self.heading}\n{self.text}".strip() if self.heading else self.text


def extract(body: str, content_type: str, *, plain: bool = False, url: str = "", offset: int = 0) -> Extract:
    """Title, main text and links of an HTML page; any other text as it is.

    The time and memory for a page have no bound: call this in a process that can be killed (child.py).
    plain: read only the beginning, without extraction; a page that is too heavy for it is always read so.
    url: of the page; without it there are no links. offset: in characters of the text; links behind it come first.
    """
    is_html = content_type in HTML_TYPES or (not content_type and _LOOKS_LIKE_HTML.match(body[:2_000]))
    plain = plain or bool(is_html and too_heavy(body))
    if not is_html:
        cut = plain and len(body) > PLAIN_CHARS
        return Extract("", tidy(body[:PLAIN_CHARS] if cut else body), cut)
    if not plain:
        return _from_html(body, url, offset)
    body, cut = beginning(body)
    page = PlainPage(body)
    texts: list[str] = []
    linked: list[Line] = []
    for line in page.lines():
        texts.append(line.text)
        if line.anchors:
            linked.append(line)
    text = tidy("\n".join(texts))
    found = Extract(page.title, text, cut, _above(page.title, text))
    return _with_links(found, linked, url, absolute(url, page.base) or url, offset)


def _with_links(
    found: Extract, lines: Iterable[Line], url: str, base: str, offset: int, frames: Iterable[tuple[str, str]] = ()
) -> Extract:
    return replace(found, links=tuple(links_in(lines, found.headed, offset, url, base, frames))) if url else found


def tidy(text: str) -> str:
    """No control characters, no spaces at the ends of lines, at most one blank line in a row."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    if _CONTROL.search(plain):
        plain = plain.translate(_CONTROLS)
    lines = "\n".join(line.rstrip() for line in plain.split("\n"))
    return _BLANK_LINES.sub("\n\n", lines).strip()


def _from_html(html: str, url: str, offset: int) -> Extract:
    tree = parsed(html)
    if tree is None:
        return Extract("", "")
    heading, title = heading_of(tree), title_of(tree)
    whole = whole_page(tree)
    text = hidden_article(tree, whole) or ended(led(main_text(tree, whole), whole, tree), tree)
    text = tidy(text)
    first, _, rest = text.partition("\n")
    if rest and joined(first) == joined(heading or title):
        found = Extract(title or heading, rest.lstrip("\n"), heading=first)
    else:
        found = Extract(title or heading, text, heading=_above(heading or title, text))
    base = base_of(tree, url)
    refresh = refresh_of(tree, scripts=bool(text))
    found = replace(found, refresh=absolute(base, refresh) or refresh if refresh else "")
    return _with_links(found, lines_of(tree), url, base, offset, frames_of(tree, scripts=bool(text)))


def _above(heading: str, text: str) -> str:
    """The heading, unless it stands somewhere in the beginning of the text."""
    return "" if joined(heading) in joined(text[: HEADING_WITHIN + 2 * len(heading)]) else heading


def hidden_article(tree: HtmlElement, whole: str) -> str:
    """Return the article from the page's JSON-LD if the page does not show it, else ""."""
    bodies = article_bodies(tree)
    if len(bodies) != 1:
        return ""
    (body,) = bodies
    lines = [words for line in _SENTENCES.split(body) if len(words := joined(line)) > 2][:COMPARED_SENTENCES]
    shown = joined(whole)
    seen = sum(len(words) for words in lines if words in shown)
    return body if count(body) >= FEW_WORDS and seen < SAME_SHARE * sum(map(len, lines)) else ""


def main_text(tree: HtmlElement, whole: str) -> str:
    """Return the page's main text. whole: all of its text without furniture, for comparison.

    A thread of comments is left out, unless the page has no other sentence: then the page is the thread.
    """
    bare = without_comments(tree)
    if bare is None:
        return _main_text(tree, whole)
    text = _main_text(bare, whole_page(bare))
    linked = set(map(joined, link_texts(bare)))
    return text if any(_is_prose(line) and joined(line) not in linked for line in text.split("\n")) else whole


def _is_prose(line: str) -> bool:
    """Return whether a line is a sentence, or too long for a label. Thai sentences end without a mark."""
    words = count(line)
    return words >= FEW_WORDS or (words >= LEAD_WORDS and _SENTENCE_END.search(line) is not None)


def _main_text(tree: HtmlElement, whole: str) -> str:
    text = _article(tree, whole)
    lost = lost_titles(text, whole, tree)
    # The extraction took the titles of a list of stories for furniture.
    return whole if lost >= LOST_TITLES and count(text) <= STORY_WORDS * lost else text


def lost_titles(text: str, whole: str, tree: HtmlElement) -> int:
    """Return the number of story titles that the text lacks although it has the line below them."""
    titles = set(map(joined, teaser_titles(tree)))
    kept = set(map(joined, text.split("\n")))
    lines = list(map(joined, whole.split("\n"))) if titles - kept else []
    return sum(
        line in titles and line not in kept and not kept.isdisjoint(lines[at + 1 : at + 3])
        for at, line in enumerate(lines)
    )


def _article(tree: HtmlElement, whole: str) -> str:
    import trafilatura

    def reading(**options: bool) -> str:
        # it takes from the tree what it does not want
        return trafilatura.extract(deepcopy(tree), **options) or ""

    words = count(whole)
    careful = reading(favor_precision=True, include_comments=False)
    if count(careful) >= min(ENOUGH_WORDS, ENOUGH_SHARE * words):
        if sum(1 for _ in tree.iter()) > FILLED_ELEMENTS:
            return careful
        return filled(careful, reading(include_comments=False))
    for comments in (False, True):
        generous = reading(favor_recall=True, include_comments=comments)
        if count(generous) >= ALL_SHARE * words and tree.find(".//pre") is None:
            # The same words, but a line for each block; code would lose its indentation.
            return whole
        if count(generous) >= min(FEW_WORDS, FEW_SHARE * words):
            return generous
    return whole


def filled(careful: str, usual: str) -> str:
    """The usual reading from the first to the last line that the careful one kept; the careful one where its lines are
    not found there."""
    kept = {joined(line): count(line) for line in careful.split("\n") if count(line)}
    lines = usual.split("\n")
    places = [(at, kept[words]) for at, line in enumerate(lines) if (words := joined(line)) in kept]
    if sum(found for _, found in places) < SAME_SHARE * sum(kept.values()) or not places:
        return careful
    return "\n".join(lines[places[0][0] : places[-1][0] + 1])


def led(text: str, whole: str, tree: HtmlElement) -> str:
    """The text with its standfirst, where that was taken for furniture: a line of the page that the page also gives as
    its own description."""
    told = {joined(line) for line in descriptions(tree) if count(line) >= LEAD_WORDS}
    inside = joined(text) if told else ""
    lead = next((line for line in whole.split("\n") if (words := joined(line)) in told and words not in inside), None)
    return f"{lead}\n{text}" if lead else text


def ended(text: str, tree: HtmlElement) -> str:
    """The text without what stands below its end: links to other pages and the headings above them, a line that ends
    with a colon. A text that is mostly that stays as it is: then the page is a list of links."""
    announcing = {joined(line) for found in (headings(tree), link_texts(tree)) for line in found}
    lines = text.split("\n")
    end = len(lines)
    while end and _is_end(lines[end - 1], announcing):
        end -= 1
    kept = "\n".join(lines[:end])
    return kept if count(kept) >= KEPT_SHARE * count(text) else text


def _is_end(line: str, announcing: set[str]) -> bool:
    return not count(line) or joined(line) in announcing or line.rstrip().endswith((":", "："))
