"""Odd pages from a real server on loopback: one row for each, so that the next case is one row."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import brotli
import pytest

from services.web_fetch.service import WebFetch
from shared.errors import ToolError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Case:
    """A page and what must come of it.

    headers: of the response, as `content_type="…"`. has, lacks: texts in the result. error: the whole error, a regular
    expression.
    """

    name: str
    body: str | bytes
    headers: dict[str, str] = field(default_factory=dict)
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    error: str = ""


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


def thread(opening: str, comment: str, closing: str, above: str = f"<h1>Lock closed</h1>{NOTE}") -> str:
    return f"<title>Lock</title><main><article>{above}</article>{opening}{comment.format(COMMENT) * 60}{closing}</main>"


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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{kind}-{case.name}")
        for kind, cases in {"encoding": ENCODINGS, "comments": COMMENTS, "json-ld": JSON_LD, "heavy": HEAVY}.items()
        for case in cases
    ],
)
async def test_odd_page_gives_the_expected_result(case: Case, site: Any, reply: Any, fetcher: Any) -> None:
    site.replies["/a/page"] = reply(case.body, **{"content_type": "text/html; charset=utf-8", **case.headers})
    run = fetcher([f"127.0.0.1:{site.port}"], max_chars=100_000)
    if case.error:
        with pytest.raises(ToolError, match=rf"^{case.error}$"):
            await run(WebFetch(url=site.url("/a/page")))
        return
    result = await run(WebFetch(url=site.url("/a/page")))
    for text in case.has:
        assert text in result.text
    for text in case.lacks:
        assert text not in result.text
