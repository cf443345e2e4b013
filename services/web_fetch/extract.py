"""The main text of a page: what its author wrote, without menus, banners and footers.

trafilatura finds it on pages that have an article: read carefully it knows where the article begins and ends, read
as it comes it loses less in between, and both together are better than either. On lists, shops and tiny pages it finds
too little; there its generous mode is used, and where even that finds next to nothing the whole page without its
furniture. What is then still there of the page around the text goes: the heading, which has a place of its own, and
links to other pages below it. The rules and numbers were chosen by tests/eval/extraction.py.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.web_fetch.plain import lean, plain_text, too_heavy
from services.web_fetch.tree import (
    article_bodies,
    descriptions,
    heading_of,
    headings,
    links,
    parsed,
    title_of,
    whole_page,
    without_comments,
)

if TYPE_CHECKING:
    from lxml.html import HtmlElement

# A text with so many words is taken for the article, however much else is on the page.
ENOUGH_WORDS = 100
# A shorter one must be this share of the page's words.
ENOUGH_SHARE = 0.7
# Less than both of these is next to nothing.
FEW_WORDS, FEW_SHARE = 25, 0.4
# A page with more elements is read once: the second reading would take as long again.
FILLED_ELEMENTS = 4_000
# Kept lines of which fewer stand in the other reading are no places in it.
SAME_SHARE = 0.5
# So many sentences of an article in JSON-LD are searched on the page.
COMPARED_SENTENCES = 200
# Less than this share of a text is no text with links below it, but a list of links.
KEPT_SHARE = 0.5
# A description with fewer words may stand anywhere.
LEAD_WORDS = 8
# How much of the extracted text is searched for the heading before it is put in front.
HEADING_WITHIN = 400

# So much is read of a page that is too heavy.
PLAIN_CHARS = 1_000_000

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
# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces.
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")


@dataclass(frozen=True, slots=True)
class Extract:
    """text: the main text alone. heading: what stands above it on the page, where the text does not begin with it.
    cut: only the beginning of the page was read."""

    title: str
    text: str
    cut: bool = False
    heading: str = ""

    @property
    def headed(self) -> str:
        """The text as a reader wants it: below its heading."""
        return f"{self.heading}\n{self.text}".strip() if self.heading else self.text


def extract(body: str, content_type: str, *, plain: bool = False) -> Extract:
    """Title and main text of an HTML page; any other text as it is.

    Nobody knows how much time and memory a stranger's page takes: it is called where it can be stopped (child.py).
    plain: only the beginning is read, and never parsed; a page that is too heavy for a parser is always read so.
    """
    is_html = content_type in HTML_TYPES or (not content_type and _LOOKS_LIKE_HTML.match(body[:2_000]))
    plain = plain or bool(is_html and too_heavy(body))
    if plain and is_html and len(body) > PLAIN_CHARS:
        body = lean(body)
    cut = plain and len(body) > PLAIN_CHARS
    if cut:
        body = body[:PLAIN_CHARS]
    if not is_html:
        return Extract("", tidy(body), cut)
    if plain:
        title, text = plain_text(body)
        text = tidy(text)
        return Extract(title, text, cut, _above(title, text))
    return _from_html(body)


def tidy(text: str) -> str:
    """No control characters, no spaces at the ends of lines, at most one blank line in a row."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    if _CONTROL.search(plain):
        plain = plain.translate(_CONTROLS)
    lines = "\n".join(line.rstrip() for line in plain.split("\n"))
    return _BLANK_LINES.sub("\n\n", lines).strip()


def _from_html(html: str) -> Extract:
    tree = parsed(html)
    if tree is None:
        return Extract("", "")
    heading, title = heading_of(tree), title_of(tree)
    whole = whole_page(tree)
    text = hidden_article(tree, whole) or ended(led(main_text(tree, whole), whole, tree), tree)
    text = tidy(text)
    first, _, rest = text.partition("\n")
    if rest and _words(first) == _words(heading or title):
        return Extract(title or heading, rest.lstrip("\n"), heading=first)
    return Extract(title or heading, text, heading=_above(heading or title, text))


def _above(heading: str, text: str) -> str:
    """The heading, unless it stands somewhere in the beginning of the text."""
    return "" if _words(heading) in _words(text[: HEADING_WITHIN + 2 * len(heading)]) else heading


def hidden_article(tree: HtmlElement, whole: str) -> str:
    """The article that stands in the page's JSON-LD and not on the page itself, or ""."""
    bodies = article_bodies(tree)
    if len(bodies) != 1:
        return ""
    (body,) = bodies
    lines = [words for line in _SENTENCES.split(body) if len(words := _words(line)) > 2][:COMPARED_SENTENCES]
    shown = _words(whole)
    seen = sum(len(words) for words in lines if words in shown)
    return body if _count(body) >= FEW_WORDS and seen < SAME_SHARE * sum(map(len, lines)) else ""


def main_text(tree: HtmlElement, whole: str) -> str:
    """The page's main text; `whole` is all of its text without furniture, to compare with.

    A thread of comments is read only where the page has no sentence beside it.
    """
    bare = without_comments(tree)
    if bare is not None:
        text = _main_text(bare, whole_page(bare))
        if any(_count(line) >= LEAD_WORDS and _SENTENCE_END.search(line) for line in text.split("\n")):
            return text
    return _main_text(tree, whole)


def _main_text(tree: HtmlElement, whole: str) -> str:
    import trafilatura

    def reading(**options: bool) -> str:
        # it takes from the tree what it does not want
        return trafilatura.extract(deepcopy(tree), **options) or ""

    words = _count(whole)
    careful = reading(favor_precision=True, include_comments=False)
    if _count(careful) >= min(ENOUGH_WORDS, ENOUGH_SHARE * words):
        if sum(1 for _ in tree.iter()) > FILLED_ELEMENTS:
            return careful
        return filled(careful, reading(include_comments=False))
    for comments in (False, True):
        generous = reading(favor_recall=True, include_comments=comments)
        if _count(generous) >= min(FEW_WORDS, FEW_SHARE * words):
            return generous
    return whole


def filled(careful: str, usual: str) -> str:
    """The usual reading from the first to the last line that the careful one kept; the careful one where its lines are
    not found there."""
    kept = {_words(line): _count(line) for line in careful.split("\n") if _count(line)}
    lines = usual.split("\n")
    places = [(at, kept[words]) for at, line in enumerate(lines) if (words := _words(line)) in kept]
    if sum(count for _, count in places) < SAME_SHARE * sum(kept.values()) or not places:
        return careful
    return "\n".join(lines[places[0][0] : places[-1][0] + 1])


def led(text: str, whole: str, tree: HtmlElement) -> str:
    """The text with its standfirst, where that was taken for furniture: a line of the page that the page also gives as
    its own description."""
    told = {_words(line) for line in descriptions(tree) if _count(line) >= LEAD_WORDS}
    inside = _words(text) if told else ""
    lead = next((line for line in whole.split("\n") if (words := _words(line)) in told and words not in inside), None)
    return f"{lead}\n{text}" if lead else text


def ended(text: str, tree: HtmlElement) -> str:
    """The text without what stands below its end: links to other pages and the headings above them, a line that ends
    with a colon. A text that is mostly that stays as it is: then the page is a list of links."""
    announcing = {_words(line) for found in (headings(tree), links(tree)) for line in found}
    lines = text.split("\n")
    end = len(lines)
    while end and _is_end(lines[end - 1], announcing):
        end -= 1
    kept = "\n".join(lines[:end])
    return kept if _count(kept) >= KEPT_SHARE * _count(text) else text


def _is_end(line: str, announcing: set[str]) -> bool:
    return not _count(line) or _words(line) in announcing or line.rstrip().endswith((":", "："))


def _words(text: str) -> str:
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def _count(text: str) -> int:
    """Words; in scripts without spaces a character counts for one."""
    return len(_WORD.findall(text))
