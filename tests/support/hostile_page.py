"""Reads hostile pages of five megabytes as web_fetch does, each in a process of its own, and prints a line of JSON
about each: which processor time and memory it took. In a program of its own, where nothing else has been waited for."""

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
    before = 0.0
    for kind in (*PAGES, *PLAIN_TEXT):
        said = asyncio.run(read(kind))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        # the most that any has taken until now
        memory = used.ru_maxrss * unit
        print(json.dumps({"kind": kind, "cpu": cpu - before, "memory": memory, "said": said}))
        before = cpu


if __name__ == "__main__":
    main()
