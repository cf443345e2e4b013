"""Read hostile pages of five megabytes as web_fetch does, each in a process of its own.

Prints a line of JSON about each: its text and the memory that it took. A program of its own, whose child processes read
these pages only.
"""

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
    "paragraphs with text": lambda: filled("<p>Some words of a row."),
    "nested inside the bounds": lambda: filled("text of a page ", "<div>" * 900),
    "hidden attributes": lambda: b'<p x="<" ' + b" ".join(b"a%d=b" % n for n in range(600_000))[: SIZE - 9],
    "open comments": lambda: filled("<!--"),
    "references": lambda: filled("&amp;&lt;&#x1F600;", "<p>"),
    "one paragraph": lambda: filled("Long words without an end. ", "<article><p>"),
    "lines": lambda: filled("中 \n", "<p>"),
    "line breaks": lambda: filled("<br>\n"),
    "links": lambda: filled("<li><a href=x>Link text</a>", "<ul>"),
    "links in links": lambda: b"<div><a href=x>" * 450 + b"<b>word</b>" * 14_000,
    "just inside the bounds": lambda: (b"<article>" + b"<p>" + b"words of a row " * 22) * 14_900,
    "comments before": lambda: filled("<!---->"),
}
PLAIN_TEXT = {"text lines": lambda: filled("中 \n")}


async def read(kind: str) -> str:
    """What is told of it."""
    made = PAGES.get(kind) or PLAIN_TEXT[kind]
    declared = "text/html; charset=utf-8" if kind in PAGES else "text/plain; charset=utf-8"
    if kind == "comments before":
        declared = ""
    url = parse("http://a.example/")
    page = Page(url, 200, declared.partition(";")[0], declared, made()[:SIZE], True, (url,))
    async with open_reader() as reader:
        try:
            return (await reader.read(page, 0, 3_000)).text[:60]
        except FetchError as exc:
            return str(exc)


def main() -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    for kind in (*PAGES, *PLAIN_TEXT):
        said = asyncio.run(read(kind))
        # the most that any page has taken until now
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
        print(json.dumps({"kind": kind, "memory": memory, "said": said}))


if __name__ == "__main__":
    main()
