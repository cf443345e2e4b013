"""Odd pages from a real server on loopback: one row for each, so that the next case is one row."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import sys
import zlib
from dataclasses import dataclass, field
from typing import Any

import brotli
import psutil
import pytest
from support.made_files import bomb, pdf

from services.web_fetch.service import WebFetch
from shared.errors import ToolError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Case:
    """A page and its expected result.

    headers: of the response, as `content_type="…"`. has, lacks: texts in the result. links: all links in `data`, as
    text and URL. others: further pages of the site, by path; bytes are a picture. error: the whole error, a regular
    expression. truncated: the value in `data`.
    The page is at /a/page; ORIGIN in a body, a text or a link stands for the site's scheme, host and port.
    """

    name: str
    body: str | bytes
    headers: dict[str, str] = field(default_factory=dict)
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] | None = None
    others: dict[str, str | bytes] = field(default_factory=dict)
    error: str = ""
    truncated: bool | None = None


STORY = "".join(
    f"<p>The lock keepers opened gate {n} at noon, and the barges left the basin for the sea.</p>" for n in range(12)
)
NOTE = "<p>The mill lock is closed from Monday to Friday. Boats can use the upper lock.</p>"
COMMENT = "<p>I think that this is a bad idea, because boats are slow.</p>"
BODY = "\n\n".join(f"On day {n} the barges left the basin. Nobody had expected {n * 7} of them." for n in range(20))
GERMAN = "<h1>Boote</h1><p>Die Bürger grüßen die Kähne für fünf Tage.</p>"
CHINESE = "<h1>船闸</h1><p>今天上午市政府召开会议，讨论新的地铁线路和学校建设问题。</p>"


def ld(value: Any, visible: str = "<div id=app></div>", kind: str = "application/ld+json") -> str:
    script = f"<script type='{kind}'>{json.dumps(value)}</script>"
    return f"<title>Boats</title>{script}<body><nav><a href=/>Home</a></nav>{visible}"


def hash_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def thread(opening: str, comment: str, closing: str, above: str = f"<h1>Lock closed</h1>{NOTE}") -> str:
    return f"<title>Lock</title><main><article>{above}</article>{opening}{comment.format(COMMENT) * 60}{closing}</main>"


THREAD_ROW = (
    "<tr><td><div><span class=comhead><a href=/u>ann</a></span></div><div class=comment><div>I think that this is a "
    "bad idea.<p>See <a href=//c.example/>https://c.example/</a></div><a href=/r>reply</a></div>"
)

ENCODINGS = [
    Case("latin-1 header over UTF-8", GERMAN, {"content_type": "text/html; charset=ISO-8859-1"}, has=("fünf Tage",)),
    Case(
        "gb2312 named after 20 kB of head",
        f"<head><style>{'a{b:c} ' * 3_000}</style><meta charset=gb2312></head>{CHINESE}".encode("gb2312"),
        {"content_type": "text/html"},
        has=("讨论新的地铁线路",),
    ),
    Case("UTF-16 without a content type", CHINESE.encode("utf-16"), {"content_type": ""}, has=("讨论新的地铁线路",)),
    Case(
        "UTF-16 without a mark and a type",
        f"<html><body>{GERMAN}".encode("utf-16-be"),
        {"content_type": ""},
        has=("fünf Tage",),
    ),
    Case("unknown charset", GERMAN, {"content_type": "text/html; charset=nonsense"}, has=("fünf Tage",)),
    Case("Brotli", brotli.compress(GERMAN.encode()), {"content_encoding": "br"}, has=("fünf Tage",)),
    Case("Zstandard", zstd.compress(GERMAN.encode()), {"content_encoding": "zstd"}, has=("fünf Tage",)),
    Case(
        "broken Brotli",
        b"no compression at all",
        {"content_encoding": "br"},
        error="fetch error: the page's compression is broken",
    ),
    Case(
        "broken Zstandard",
        b"no compression at all",
        {"content_encoding": "zstd"},
        error="fetch error: the page's compression is broken",
    ),
]

COMMENTS = [
    Case(
        "blog",
        thread("<ol class='comment-list'>", "<li class='comment even'>{}</li>", "</ol>"),
        has=("upper lock",),
        lacks=("bad idea",),
    ),
    Case(
        "news",
        thread("<section id=comments>", "<div class=c>{}</div>", "</section>"),
        has=("upper lock",),
        lacks=("bad idea",),
    ),
    Case(
        "widget",
        thread("<div id=disqus_thread>", "<div class=post>{}</div>", "</div>"),
        has=("upper lock",),
        lacks=("bad idea",),
    ),
    Case(
        "section",
        thread("<section aria-label=Comments>", "<div>{}</div>", "</section>"),
        has=("upper lock",),
        lacks=("bad idea",),
    ),
    Case(
        "article each",
        thread("<div class=comments>", "<article class=comment>{}</article>", "</div>"),
        has=("upper lock",),
        lacks=("bad idea",),
    ),
    Case(
        "thread of nothing but comments",
        thread("<div id=comments>", "<div class=comment>{}</div>", "</div>", above="<h1>Lock</h1>"),
        has=("bad idea",),
    ),
    Case(
        "thread in a table",
        f"<table><tr><td><a href=//b.example/>Old boats</a> (b.example)<tr><td>9 points by ann</table>"
        f"<table class=comment-tree>{THREAD_ROW * 30}</table><center><a href=/apply>Apply for a place in the next "
        "class of boats today.</a></center>",
        has=("Old boats (b.example)", "bad idea", "See https://c.example/"),
    ),
    Case(
        "page that is named so",
        f"<body class='comments'><main class=comments><h1>Lock</h1>{STORY}</main>",
        has=("gate 0", "gate 11"),
    ),
    Case(
        "forum",
        f"<div id=thread><h1>Lock</h1>{f'<div class=post><b>ann</b><div>{COMMENT}</div></div>' * 9}</div>",
        has=("bad idea",),
    ),
]

JSON_LD = [
    Case("article", ld({"@type": "NewsArticle", "articleBody": BODY}), has=("Boats\nOn day 0", "On day 19")),
    Case(
        "graph", ld({"@graph": [{"@type": "WebPage"}, {"@type": "Article", "articleBody": BODY}]}), has=("On day 19",)
    ),
    Case("list", ld([{"@type": "Article", "articleBody": BODY}]), has=("On day 19",)),
    Case(
        "markup",
        ld({"articleBody": "".join(f"<p>{part}</p>" for part in BODY.split("\n\n"))}),
        has=("133 of them",),
        lacks=("<p>",),
    ),
    Case(
        "escaped markup",
        ld({"articleBody": "".join(f"&lt;p&gt;{part}&lt;/p&gt;" for part in BODY.split("\n\n"))}),
        has=("On day 19",),
        lacks=("p>",),
    ),
    Case(
        "teaser",
        ld({"articleBody": BODY}, f"<article><h1>Boats</h1><p>{BODY[:150]}…</p><p>Subscribe to read on.</p></article>"),
        has=("On day 19",),
    ),
    Case(
        "the page has it too",
        ld({"articleBody": BODY}, f"<article><h1>Boats</h1><p>{BODY}</p><p>And a line more.</p></article>"),
        has=("a line more",),
    ),
    Case("short", ld({"articleBody": "Buy it."}, f"<article>{NOTE}</article>"), has=("upper lock",), lacks=("Buy it",)),
    Case(
        "malformed",
        f'<script type=application/ld+json>{{"articleBody": {"[" * 9_000}</script>{NOTE}',
        has=("upper lock",),
    ),
    Case("no object", ld({"articleBody": ["x"]}, NOTE), has=("upper lock",)),
]

HEAVY = [
    Case(
        "large attribute values",
        f"<nav>Menu</nav><svg><path d='{'M 1 2 ' * 5_000}'/></svg><div data-state='{'a b ' * 5_000}'>{STORY}</div>",
        has=("gate 11",),
        lacks=("Menu",),
    ),
]


def hacker_news(story: int) -> str:
    title = (
        f"<span><a href='https://s{story}.example/'>Story {story} about the old boats</a> (<a href=/from>s{story}</a>)"
    )
    votes = f"<a id=up href='vote?id={story}'><div class=votearrow></div></a>"
    below = f"{story}0 points by <a href=user?id=ann{story}>ann{story}</a> | <a href=hide?{story}>hide</a>"
    return f"<tr><td>{story}.<td>{votes}<td>{title}</span></tr><tr><td colspan=2><td>{below}</tr>"


TEASER = (
    "<article><header><h3><a href=/{0}>Mayor {0} opens the old bridge</a></h3></header><p>It was shut for {0} years."
)
CARD = "<a class=card href=/{0}><div>Politics</div><h3>Mayor {0} opens the old bridge</h3><p>It was shut.</p></a>"
STORIES = tuple((f"Mayor {n} opens the old bridge", f"ORIGIN/{n}") for n in range(9))

LINKS = [
    Case(
        "in an article",
        f"<nav><a href=/home>Front page</a></nav><article>{STORY}<p>Read the <a href='../report.html#top'>full\nreport"
        "</a> of <a href=//other.example/x>the town</a>.</p></article><footer><a href=/imprint>Imprint</a></footer>",
        links=(("full report", "ORIGIN/report.html"), ("the town", "http://other.example/x")),
    ),
    Case(
        "base",
        f"<base href=/dir/sub/>{STORY}<p>Read the whole <a href=next>next report</a> of the town.</p>",
        links=(("next report", "ORIGIN/dir/sub/next"),),
    ),
    Case(
        "base that is no address",
        f"<base href='javascript:x/'>{STORY}<p>Read the whole <a href=next>next report</a> of the town.</p>",
        links=(("next report", "ORIGIN/a/next"),),
    ),
    Case(
        "addresses that are no links",
        f"{STORY}<p>See <a href=#top>above</a>, <a href=page>here</a>, <a href=page#x>below</a>, <a href=''>it</a>, "
        "<a href=mailto:a@b.example>mail</a>, <a href='javascript:go()'>script</a>, <a href=ftp://a.example/>ftp</a>, "
        "<a href='http://a b/'>bad</a>, <a href=//u:p@a.example/>user</a>, <a name=x>name</a>, <a href=x></a>.</p>",
        links=(),
    ),
    Case(
        "twice",
        f"{STORY}<p>Go on to <a href=x>more</a> of it, or to <a href='x#part'>the whole story</a> of the boats.</p>",
        links=(("the whole story", "ORIGIN/a/x"),),
    ),
    Case("table of stories", f"<table>{''.join(map(hacker_news, range(30)))}</table>", has=("Story 7 about the old",)),
    Case(
        "front page",
        f"<nav><a href=/s>Sport</a></nav><main>{''.join(TEASER.format(n) for n in range(9))}</main>",
        has=("Mayor 8 opens", "shut for 8 years"),
        links=STORIES,
    ),
    Case("cards", f"<div class=grid>{''.join(CARD.format(n) for n in range(9))}</div>", links=STORIES),
    Case(
        "list",
        "<ul>" + "".join(f"<li><a href=/{n}>Boat {n}</a>" for n in range(9)) + "</ul>",
        links=tuple((f"Boat {n}", f"ORIGIN/{n}") for n in range(9)),
    ),
    Case(
        "page that is too heavy",
        f"<base href=/dir/><nav><a href=/s>Sport news of today</a></nav>{'<p>' * 31_000}"
        "<a href='x?a=1&amp;b=2'>The <b>whole</b> old story</a>",
        links=(("The whole old story", "ORIGIN/dir/x?a=1&b=2"),),
    ),
    Case(
        "frameset",
        "<title>Boats</title><frameset cols='20%,*'><frame src=menu.html name=menu title='All  boats'>"
        "<frame src=//s.example/main#top name=main><frameset><frame src='/c'><frame src=about:blank><frame></frameset>"
        "</frameset>",
        links=(("All boats", "ORIGIN/a/menu.html"), ("main", "http://s.example/main"), ("ORIGIN/c", "ORIGIN/c")),
    ),
    Case(
        "frames in a page",
        f"<iframe src=/film title='The film of the boats'></iframe>{STORY}<p>Read the <a href=/report>full report</a>."
        "<iframe src=/report></iframe><iframe src=page></iframe><iframe src='javascript:go()'></iframe>"
        "<noscript><iframe src=//count.example/></iframe></noscript>",
        links=(("full report", "ORIGIN/report"), ("The film of the boats", "ORIGIN/film")),
    ),
    Case("text", "See https://a.example/ for more", {"content_type": "text/plain"}, links=()),
]


def refresh(content: str, rest: str = "") -> str:
    return f'<head><meta http-equiv="Refresh" content="{content}">{rest}</head><body><p>Moved.</p>'


ONLY_HTTP = "blocked: only http:// and https:// URLs can be fetched"
THERE = {"/a/there": f"<h1>There</h1>{STORY}", "/b/there": f"<h1>There</h1>{STORY}"}
REFRESH = [
    *(
        Case(content, refresh(content), has=("There\n",), lacks=("Moved",), others=THERE)
        for content in (
            "0; url=there",
            "0;URL='/a/there'",
            "5, there",
            "0 url=there",
            "; url=there",
            "0.9;url=ORIGIN/a/there",
            "0; url = there",
            "3; url='there' x",
        )
    ),
    Case("base", refresh("0; url=there", "<base href=/b/>"), has=("There\n",), others=THERE),
    *(
        Case(f"not {content}", refresh(content), has=("Moved",), others=THERE)
        for content in (
            "0",
            "5;",
            "600; url=there",
            "6; url=there",
            "0; url=",
            "x; url=there",
            "0; url=page",
            "0; url=page#x",
        )
    ),
    Case("twice", refresh("0; url=b"), has=("There\n",), others={"/a/b": refresh("0; url=there"), **THERE}),
    *(
        Case(
            f"{name}, {'title alone' if not text else 'text'}",
            f"<title>Boats</title>{refresh(f'0; url={target}').replace('<p>Moved.</p>', text)}",
            has=(text and "gate 11", f"\n[the page sends its reader on to {shown}, which was not followed: {error}]"),
            lacks=("Moved",),
            others={
                "/a/boat.png": b"\x89PNG",
                "/a/back": refresh("0; url=page").replace("<p>Moved.</p>", ""),
                **{f"/a/{n}": refresh(f"0; url={n + 1}").replace("<p>Moved.</p>", "") for n in range(9)},
            },
            error=re.escape(error) if not text else "",
        )
        for name, target, shown, error in (
            ("script", "javascript:go()", "javascript:go()", ONLY_HTTP),
            ("long script", f"javascript:{'x' * 900}", f"javascript:{'x' * 189}…", ONLY_HTTP),
            ("file", "file:///etc/passwd", "file:///etc/passwd", ONLY_HTTP),
            ("app", "twitter://user?id=1", "twitter://user?id=1", ONLY_HTTP),
            ("private", "http://10.0.0.1/", "http://10.0.0.1/", "blocked: 10.0.0.1 is not on the public internet"),
            ("gone", "gone", "ORIGIN/a/gone", "fetch failed: 404"),
            ("picture", "boat.png", "ORIGIN/a/boat.png", "fetch error: the content type 'image/png' is not text"),
            ("circle", "back", "ORIGIN/a/back", "fetch error: the page redirects in a circle"),
            ("endless", "1", "ORIGIN/a/1", "fetch error: more than 5 redirects"),
        )
        for text in (STORY, "")
    ),
    Case(
        "gone behind a page with text",
        refresh("0; url=b"),
        has=("There\n", "on to ORIGIN/a/gone, which was not followed: fetch failed: 404]"),
        others={"/a/b": refresh("0; url=gone").replace("Moved.", f"<h1>There</h1>{STORY}")},
    ),
    Case(
        "to a page without text",
        refresh("3; url=app").replace("<p>Moved.</p>", STORY),
        has=("gate 11", "reader on to ORIGIN/a/app, which was not followed: that page has no readable text]"),
        others={"/a/app": "<title>Sign in</title><form><input name=user></form>"},
    ),
    Case("comment", f"<!-- {refresh('0; url=there')} --><p>Here.", has=("Here.",), others=THERE),
    Case(
        "noscript beside text", f"<noscript>{refresh('0; url=there')}</noscript><p>Here.", has=("Here.",), others=THERE
    ),
    Case(
        "noscript alone",
        '<head><noscript><meta http-equiv="refresh" content="0; url=there"></noscript></head><div id=app></div>',
        has=("There\n",),
        others=THERE,
    ),
]


PAPER = pdf(["The lock keepers opened the gates.", "The barges left the ba-\nsin at noon."], "On locks")
PDF_TYPE = {"content_type": "application/pdf"}
PDF = [
    Case(
        "page numbers",
        PAPER,
        PDF_TYPE,
        has=("[page 1]\nThe lock keepers opened the gates.\n\n[page 2]\nThe barges left the basin",),
        links=(),
    ),
    Case("type with parameter", PAPER, {"content_type": "Application/PDF; qs=0.001"}, has=("[page 2]",)),
    Case("octet stream", PAPER, {"content_type": "application/octet-stream"}, has=("[page 2]",)),
    Case("download", PAPER, {"content_type": "application/force-download"}, has=("[page 2]",)),
    Case("no type", PAPER, {"content_type": ""}, has=("[page 2]",)),
    Case("named HTML", PAPER, {"content_type": "text/html"}, has=("[page 2]",)),
    Case("named plain text", b"\n" + PAPER, {"content_type": "text/plain"}, has=("[page 2]",)),
    Case("bytes before it", b"\n\0\xff" + PAPER, {"content_type": "application/octet-stream"}, has=("[page 2]",)),
    Case("compressed", gzip.compress(PAPER), {**PDF_TYPE, "content_encoding": "gzip"}, has=("[page 2]",)),
    Case("page without text", pdf(["One.", "", "Three."]), PDF_TYPE, has=("[page 1]\nOne.\n\n[page 3]\nThree.",)),
    Case(
        "text about PDF", "A file begins with %PDF-1.7.", {"content_type": "text/plain"}, has=("begins with %PDF-1.7.",)
    ),
    Case("password", pdf(["x"], password="secret"), PDF_TYPE, error="fetch error: the PDF is protected by a password"),
    Case(
        "unknown encryption",
        pdf(["x"], password="secret").replace(b"/Standard", b"/StandarX"),
        PDF_TYPE,
        error="fetch error: the PDF is encrypted in a way that is not understood: .+",
    ),
    Case(
        "scan",
        pdf(["", ""]),
        PDF_TYPE,
        error=r"fetch error: the PDF has no text on its 2 pages, only pictures \(a scan\)",
    ),
    Case("damaged", PAPER[:200], PDF_TYPE, error="fetch error: the PDF is damaged and cannot be read: .+"),
    Case(
        "garbage",
        b"%PDF-1.4\n" + b"\0garbage" * 99,
        PDF_TYPE,
        error="fetch error: the PDF is damaged and cannot be read: .+",
    ),
    Case("HTML named PDF", f"\ufeff\n<!doctype html>{STORY}", PDF_TYPE, has=("gate 11",), lacks=("<p>",)),
    Case("bytes before it, named PDF", b"<\n" + PAPER, PDF_TYPE, has=("[page 2]",)),
    *(
        Case(
            f"{name} named PDF",
            body,
            PDF_TYPE,
            error="fetch error: the file is not a PDF, although its content type is 'application/pdf'",
        )
        for name, body in (("text", "Sign in first."), ("program", b"MZ\x90\0" * 999), ("nothing", b""))
    ),
    Case("bomb", bomb(100, b" "), PDF_TYPE, error="fetch error: the PDF (is damaged|takes more time or memory).+"),
    Case(
        "octet stream that is none",
        b"MZ\x90\0" * 999,
        {"content_type": "application/octet-stream"},
        error="fetch error: the content type 'application/octet-stream' is not text",
    ),
    Case(
        "short octet stream",
        b"MZ",
        {"content_type": "application/octet-stream"},
        error="fetch error: the content type 'application/octet-stream' is not text",
    ),
]


def deflated(data: bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(data) + packer.flush()


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", lambda data: deflated(data, -zlib.MAX_WBITS)),
    "brotli": ("br", brotli.compress),
    "zstd": ("zstd", zstd.compress),
}
# Attributes that compress badly: the first blocks are complete when the last one breaks off.
LOG = "".join(f"<p id='{hash_of(n)}{hash_of(-n)}'>Boat {n} left the basin.</p>" for n in range(1_200))
CUT = [
    case
    for name, (coding, packed) in PACKED.items()
    for case in (
        Case(
            f"{name} broken off",
            packed(LOG.encode())[:-600],
            {"content_encoding": coding},
            has=("Boat 9 left", "[the page's compressed data breaks off before its end]"),
            truncated=True,
        ),
        Case(
            f"{name} without its last byte",
            packed(LOG.encode())[:-1],
            {"content_encoding": coding},
            has=("Boat 9 left", "[the page's compressed data breaks off before its end]"),
            truncated=True,
        ),
        Case(
            f"{name} whole",
            packed(LOG.encode()),
            {"content_encoding": coding},
            has=("Boat 1199 left",),
            truncated=False,
        ),
        Case(f"{name} of nothing", b"", {"content_encoding": coding}, has=("no readable text",), truncated=False),
        Case(
            f"{name} PDF broken off",
            packed(PAPER)[:-1],
            {**PDF_TYPE, "content_encoding": coding},
            error="fetch error: the page's compressed data breaks off before its end",
        ),
    )
]


KINDS = {
    "cut": CUT,
    "pdf": PDF,
    "encoding": ENCODINGS,
    "comments": COMMENTS,
    "json-ld": JSON_LD,
    "heavy": HEAVY,
    "links": LINKS,
    "refresh": REFRESH,
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{kind}-{case.name}") for kind, cases in KINDS.items() for case in cases],
)
async def test_odd_page_gives_the_expected_result(case: Case, site: Any, reply: Any, fetcher: Any) -> None:
    origin = site.url("").removesuffix("/")
    body = case.body.replace("ORIGIN", origin) if isinstance(case.body, str) else case.body
    site.replies["/a/page"] = reply(body, **{"content_type": "text/html; charset=utf-8", **case.headers})
    for path, page in case.others.items():
        site.replies[path] = reply(page) if isinstance(page, str) else reply(page, content_type="image/png")
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=100_000)
    if case.error:
        with pytest.raises(ToolError, match=rf"^{case.error}$"):
            await run(WebFetch(url=site.url("/a/page")))
        return
    result = await run(WebFetch(url=site.url("/a/page")))
    for text in case.has:
        assert text.replace("ORIGIN", origin) in result.text
    for text in case.lacks:
        assert text not in result.text
    if case.truncated is not None:
        assert result.data["truncated"] is case.truncated
    if case.links is not None:
        links = [
            {"text": text.replace("ORIGIN", origin), "url": url.replace("ORIGIN", origin)} for text, url in case.links
        ]
        assert result.data["links"] == links


@pytest.mark.parametrize("text", [STORY, ""], ids=["text", "no text"])
async def test_refresh_that_times_out_gives_the_page_itself(text: str, site: Any, reply: Any, fetcher: Any) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    site.replies |= {"/": reply(refresh("0; url=late").replace("<p>Moved.</p>", text)), "/late": silent}
    run = fetcher([f"127.0.0.1:{site.port}"], timeout=2)
    error = f"fetch timeout after 2s: {site.url()}"
    if text:
        note = f"[the page sends its reader on to {site.url('/late')}, which was not followed: {error}]"
        assert (await run(WebFetch(url=site.url()))).text.endswith(
            f"gate 11 at noon, and the barges left the basin for the sea.\n{note}"
        )
    else:
        with pytest.raises(ToolError, match=rf"^{re.escape(error)}$"):
            await run(WebFetch(url=site.url()))


async def test_links_of_a_long_list_are_the_titles_first(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/"] = reply(f"<table>{''.join(map(hacker_news, range(60)))}</table>")
    result = await fetcher([f"127.0.0.1:{site.port}"])(WebFetch(url=site.url()))
    titles = [link for link in result.data["links"] if link["text"].startswith("Story ")]
    assert titles == [{"text": f"Story {n} about the old boats", "url": f"https://s{n}.example/"} for n in range(60)]
    assert len(result.data["links"]) == 100


async def test_links_of_a_later_part_come_with_that_part(site: Any, reply: Any, fetcher: Any) -> None:
    items = [f"<li><a href=/{n}>The story of boat {n}</a></li>" for n in range(300)]
    site.replies["/"] = reply(f"<ul>{''.join(items)}</ul>")
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=1_000)
    first = await run(WebFetch(url=site.url()))
    late = await run(WebFetch(url=site.url(), offset=first.data["chars"] - 1_000))
    assert [link["url"] for link in first.data["links"]] == [site.url(f"/{n}") for n in range(100)]
    assert late.data["links"][-1]["url"] == site.url("/299")
    assert len(late.data["links"]) == 100


async def test_links_are_listed_behind_the_text_when_asked(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/"] = reply(f"{STORY}<p>Read the full <a href=/report>report</a> of the town.</p>")
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=80)
    plain, listed = await run(WebFetch(url=site.url())), await run(WebFetch(url=site.url(), links=True))
    assert listed.text == f"{plain.text}\nLinks:\n- report: {site.url('/report')}"
    assert plain.text.endswith("]")
    assert plain.data["links"] == listed.data["links"] == [{"text": "report", "url": site.url("/report")}]
    site.replies["/"] = reply(STORY)
    assert (await run(WebFetch(url=site.url(), links=True))).text.endswith("\n[the page's text has no links]")


@pytest.mark.parametrize(
    ("letters", "max_chars", "listed", "end"),
    [
        (900, 3_000, 9, "[91 more links are in data.links]"),
        (900, 200, 0, "[100 more links are in data.links]"),
        (60, 2_950, 99, "[1 more link is in data.links]"),
        (50, 3_000, 100, ""),
    ],
    ids=["long addresses", "address longer than the list", "one link too many", "usual addresses"],
)
async def test_links_listed_are_bounded_by_max_chars(
    letters: int, max_chars: int, listed: int, end: str, site: Any, reply: Any, fetcher: Any
) -> None:
    items = [f"<li><a href='http://s.example/{n:x<{letters}}'>Boat {n:02}</a></li>" for n in range(100)]
    site.replies["/"] = reply(f"<ul>{''.join(items)}</ul>")
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=max_chars)
    result = await run(WebFetch(url=site.url(), links=True))
    lines = [f"- {link['text']}: {link['url']}" for link in result.data["links"]]
    assert len(lines) == 100
    below = result.text.partition("\nLinks:\n")[2]
    assert below.split("\n") == [*lines[:listed], *([end] if end else [])]
    assert len(below.removesuffix(end)) <= 3 * max_chars


async def test_pdf_is_read_part_by_part(site: Any, reply: Any, fetcher: Any) -> None:
    pages = [f"Page {n} tells of the lock. " * 20 for n in range(5)]
    site.replies["/"] = reply(pdf(pages, "On locks"), content_type="application/pdf")
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=700)
    offset, seen = 0, ""
    while offset is not None:
        result = await run(WebFetch(url=site.url(), offset=offset))
        offset = result.data["next_offset"]
        seen += result.text.partition("Extracted text:\n")[2]
    assert [f"[page {n}]" in seen for n in range(1, 6)] == [True] * 5
    assert seen.count("tells of the lock") == 100
    assert result.data["title"] == "On locks"
    assert result.data["content_type"] == "application/pdf"


async def test_pdf_over_the_size_limit_is_refused(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/"] = reply(PAPER, content_type="application/pdf")
    allowed = [f"127.0.0.1:{site.port}"]
    with pytest.raises(ToolError, match=r"^fetch error: the PDF is larger than the limit of 500 bytes$"):
        await fetcher(allowed, max_pdf_bytes=500)(WebFetch(url=site.url()))
    assert "[page 2]" in (await fetcher(allowed, max_bytes=500)(WebFetch(url=site.url()))).text


async def test_pdf_of_many_pages_is_read_until_half_of_the_time(site: Any, reply: Any, fetcher: Any) -> None:
    page = "\n".join(f"Line {n} of a page." for n in range(60))
    site.replies["/"] = reply(pdf([page] * 3_000), content_type="application/pdf")
    result = await fetcher([f"127.0.0.1:{site.port}"], timeout=12)(WebFetch(url=site.url()))
    assert re.search(r"left out; go on with offset \d+; the PDF has 3000 pages, of which \d+ were read\]$", result.text)
    assert result.data["truncated"] is True


async def test_pdf_that_is_slow_is_left_and_others_are_read(site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/slow"] = reply(bomb(8, b"BT (a) Tj ET "), content_type="application/pdf")
    site.replies["/"] = reply(PAPER, content_type="application/pdf")
    allowed = [f"127.0.0.1:{site.port}"]
    slow = [fetcher(allowed, timeout=4)(WebFetch(url=site.url("/slow"))) for _ in range(3)]
    for failed in await asyncio.gather(*slow, return_exceptions=True):
        assert re.match(r"fetch (timeout after 4s|error: the PDF takes more time or memory)", str(failed))
    assert "[page 2]" in (await fetcher(allowed)(WebFetch(url=site.url()))).text
    readers = [child.cmdline() for child in psutil.Process().children()]
    assert not [command for command in readers if "shared.reading.pdf_child" in command]
