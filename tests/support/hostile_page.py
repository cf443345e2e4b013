"""Reads one hostile page of five megabytes as web_fetch does, and prints what that took: `KIND` on the command line."""

from __future__ import annotations

import asyncio
import json
import resource
import sys

from services.web_fetch.errors import FetchError
from services.web_fetch.page import Page
from services.web_fetch.reader import open_reader
from services.web_fetch.url import parse

SIZE = 5_000_000


def filled(piece: str, start: str = "") -> bytes:
    data = piece.encode()
    return (start.encode() + data * (SIZE // len(data) + 1))[:SIZE]


PAGES = {
    "paragraphs": lambda: filled("<p>"),
    "paragraphs with text": lambda: filled("<p>Some words of a row."),
    "nested": lambda: filled("<div>"),
    "nested inside the bounds": lambda: filled("text of a page ", "<div>" * 900),
    "attributes": lambda: b"<p " + b" ".join(b"a%d=b" % n for n in range(600_000)),
    "hidden attributes": lambda: b'<p x="<" ' + b" ".join(b"a%d=b" % n for n in range(600_000))[: SIZE - 9],
    "zeros": lambda: bytes(SIZE),
    "brackets": lambda: filled("<"),
    "open comments": lambda: filled("<!--"),
    "open scripts": lambda: filled("<script>"),
    "references": lambda: filled("&amp;&lt;&#x1F600;", "<p>"),
    "one paragraph": lambda: filled("Long words without an end. ", "<article><p>"),
    "wide characters": lambda: filled("\U0001f600 \n", "<article><p>"),
    "lines": lambda: filled("中 \n", "<p>"),
    "spaces": lambda: filled(" ", "<p>x"),
    "line breaks": lambda: filled("<br>\n"),
    "a table": lambda: filled("<tr><td>a<td>b", "<table>"),
    "links inside the bounds": lambda: b"<ul>" + b"<li><a href=x>Link text</a>" * 9_900,
    "links": lambda: filled("<li><a href=x>Link text</a>", "<ul>"),
    "links in links": lambda: b"<div><a href=x>" * 450 + b"<b>word</b>" * 14_000,
    "headings in headings": lambda: b"<div><h2>" * 450 + b"<b>word</b>" * 14_000,
    "just inside the bounds": lambda: (b"<article>" + b"<p>" + b"words of a row " * 22) * 14_900,
    "comments before": lambda: filled("<!---->"),
}
PLAIN_TEXT = {"text lines": lambda: filled("中 \n"), "text zeros": lambda: bytes(SIZE)}


async def main(kind: str) -> None:
    made = PAGES.get(kind) or PLAIN_TEXT[kind]
    declared = "text/html; charset=utf-8" if kind in PAGES else "text/plain; charset=utf-8"
    if kind == "comments before":
        declared = ""
    page = Page(parse("http://a.example/"), 200, declared.partition(";")[0], declared, made()[:SIZE], True, 0)
    async with open_reader() as reader:
        try:
            reading = await reader.read(page, 0, 3_000)
            said = reading.text[:60]
        except FetchError as exc:
            said = str(exc)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * unit, "said": said}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
