"""Text out of a file's bytes, in paragraphs with their places. It runs in a process that may be killed.

Raises FileRefused for a file that says something, but nothing that can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

from services.memory.chunks import Block
from services.memory.formats import FileRefused, Kind
from shared.reading.charset import to_text
from shared.reading.lines import one_line, without_controls
from shared.reading.pdf import PdfUnreadable, read_pdf

# Beyond, a document's text is left out, and its listing says so.
MOST_CHARS = 4_000_000
MOST_BLOCKS = 100_000
_BLANK = re.compile(r"\n[ \t]*\n")
_HEADING = re.compile(r"(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$")
_FENCE = re.compile(r"[ \t]{0,3}(```+|~~~+)")
_SETEXT = re.compile(r"[ \t]{0,3}(=+|-+)[ \t]*$")
_MOST_HEADING = 120


@dataclass(frozen=True, slots=True)
class DocumentText:
    """cut: the text was longer than MOST_CHARS, or had more paragraphs than MOST_BLOCKS."""

    title: str
    blocks: list[Block]
    cut: bool


def text_of(data: bytes, kind: Kind, name: str) -> DocumentText:
    match kind:
        case "pdf":
            found = _pdf(data, name)
        case "html":
            found = _html(to_text(data, ""))
        case "markdown":
            found = _markdown(without_controls(to_text(data, "")))
        case "text":
            found = "", _lines(without_controls(to_text(data, "")))
        case _:
            raise FileRefused("no_text", f"{name} is an image: there is no text in it to search")
    title, blocks = found
    kept: list[Block] = []
    chars, cut = 0, False
    for block in blocks:
        if chars + len(block.text) > MOST_CHARS or len(kept) == MOST_BLOCKS:
            cut = True
            break
        chars += len(block.text)
        kept.append(block)
    if not kept:
        raise FileRefused("no_text", f"{name} has no text")
    return DocumentText(title[:_MOST_HEADING], kept, cut)


# ── plain text ───────────────────────────────────────────────────────────────────────────────────────────────


def _lines(text: str) -> Iterator[Block]:
    number = 1
    for part in _paragraphs(text):
        if part.strip():
            before = len(part) - len(part.lstrip("\n"))
            yield Block(f"line {number + before}", part.strip("\n"))
        number += part.count("\n")


def _paragraphs(text: str) -> Iterator[str]:
    """Everything, cut behind blank lines."""
    begin = 0
    for blank in _BLANK.finditer(text):
        yield text[begin : blank.end()]
        begin = blank.end()
    yield text[begin:]


# ── Markdown ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Headings:
    """The headings above where the reader stands, and the first of all."""

    title: str = ""
    above: list[tuple[int, str]] = field(default_factory=list)

    def add(self, level: int, text: str) -> None:
        text = one_line(text)[:_MOST_HEADING]
        if not text:
            return
        self.title = self.title or text
        self.above = [one for one in self.above if one[0] < level] + [(level, text)]

    @property
    def place(self) -> str:
        return " > ".join(text for _, text in self.above)


def _markdown(text: str) -> tuple[str, Iterator[Block]]:
    headings, blocks = _Headings(), list[Block]()
    lines, fence = list[str](), ""

    def end() -> None:
        blocks.extend(
            Block(headings.place, said) for part in _BLANK.split("\n".join(lines)) if (said := part.strip("\n"))
        )
        lines.clear()

    for line in text.split("\n"):
        if fence or (mark := _FENCE.match(line)):
            if fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            elif not fence:
                assert mark is not None
                fence = mark[1]
            lines.append(line)
        elif found := _HEADING.match(line):
            end()
            headings.add(len(found[1]), found[2])
        elif lines and lines[-1].strip() and (under := _SETEXT.match(line)) and _alone(lines):
            heading = lines.pop()
            end()
            headings.add(1 if under[1][0] == "=" else 2, heading)
        else:
            lines.append(line)
    end()
    return headings.title, iter(blocks)


def _alone(lines: list[str]) -> bool:
    """Whether the last line is a paragraph of its own that is no list, quotation or table."""
    return (len(lines) == 1 or not lines[-2].strip()) and not lines[-1].lstrip().startswith(("-", "*", ">", "|", "+"))


# ── HTML ─────────────────────────────────────────────────────────────────────────────────────────────────────

_SILENT = frozenset({"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "select", "nav"})
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "dialog", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li",
    "main", "ol", "p", "pre", "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul",
})  # fmt: skip


class _Page(HTMLParser):
    """Never fails, whatever it is fed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.headings = _Headings()
        self.blocks: list[Block] = []
        self.named = ""
        self._texts: list[str] = []
        self._silent: list[str] = []
        self._heading = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent.append(tag)
        elif tag == "title" and not self._silent:
            self._in_title = True
        elif tag in _BLOCKS:
            self.end()
            if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
                self._heading = int(tag[1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.end()

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            if tag in self._silent:
                del self._silent[self._silent.index(tag) :]
        elif tag == "title":
            self._in_title = False
        elif tag in _BLOCKS:
            self.end()

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.named = (self.named + data)[:_MOST_HEADING]
        elif not self._silent:
            self._texts.append(data)

    def end(self) -> None:
        said = one_line(without_controls("".join(self._texts)))
        self._texts.clear()
        level, self._heading = self._heading, 0
        if said and level:
            self.headings.add(level, said)
        elif said:
            self.blocks.append(Block(self.headings.place, said))


def _html(text: str) -> tuple[str, Iterator[Block]]:
    page = _Page()
    page.feed(text)
    page.close()
    page.end()
    return one_line(page.named) or page.headings.title, iter(page.blocks)


# ── PDF ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _pdf(data: bytes, name: str) -> tuple[str, Iterator[Block]]:
    try:
        found = read_pdf(data, most_chars=MOST_CHARS)
    except PdfUnreadable as exc:
        match exc.why:
            case "password":
                text = f"{name} is protected by a password: save it without one, and add it again"
            case "encryption":
                text = f"{name} is encrypted in a way that is not understood: {exc.detail}"
            case "damaged":
                text = f"{name} cannot be read as PDF: {exc.detail}"
            case "no_text":
                text = (
                    f"{name} has no text on its {exc.detail} pages, only pictures: have a program recognise the text "
                    "(OCR), and add what it makes"
                )
        raise FileRefused(exc.why, text) from exc
    return found.title, (Block(f"page {page}", text) for page, text in found.blocks)
