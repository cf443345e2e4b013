"""Pages that are too heavy for the extraction."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.web_fetch.extract import extract
from services.web_fetch.plain import (
    MAX_ATTRIBUTES,
    MAX_BRACKETS,
    MAX_DEPTH,
    MAX_TAGS,
    PLAIN_CHARS,
    PLAIN_TAGS,
    too_heavy,
)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One <b>bold</b> w<i>or</i>d<p>Two", "One bold word\nTwo"),
        ("<nav><a>Menu</a></nav>text<script>if (a<b) run('<p>')</script>", "text"),
        ("<SCRIPT>run()</SCRIPT\n>text<!-- no <p> -->more", "textmore"),
        ("<nav>never closed<p>text", "never closed\ntext"),
        ("<nav>Menu</nav><nav>never closed<p>text", "Menu\nnever closed\ntext"),
        ("text<!-- never closed <p>rest", "text"),
        ("<pre>one\ntwo</pre>", "one\ntwo"),
        ("a &lt;b&gt; &amp;amp; &#x41;&#66; &nosuch; &#xD800; &#9999999;", "a <b> &amp; AB &nosuch; \ufffd \ufffd"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("<asidelong>x</asidelong>", "x"),
        ("text <p cla", "text"),
    ],
)
def test_tags_and_furniture_are_left_out(html: str, text: str) -> None:
    assert extract(html, "text/html", plain=True).text == text


def test_the_title_is_found() -> None:
    found = extract("<head><title lang=en>Tom &amp;\n Jerry</title></head>x", "text/html", plain=True)
    assert (found.title, found.text) == ("Tom & Jerry", "x")


@pytest.mark.parametrize(
    ("html", "heavy"),
    [
        ("<p>" * MAX_TAGS, False),
        ("<p>" * (MAX_TAGS + 1), True),
        ("<div>" * MAX_DEPTH, False),
        ("<div>" * (MAX_DEPTH + 1), True),
        ("<div></div>" * (MAX_DEPTH + 1), False),
        ("<br/><p>" * (MAX_DEPTH + 1), False),
        ("<p" + " a=b" * MAX_ATTRIBUTES + ">", False),
        ("<p" + " a=b" * (MAX_ATTRIBUTES + 1) + ">", True),
        ("<p" + " a" * 5 * MAX_ATTRIBUTES + ">", True),
        ("<script>for(i=0;i<n;i++){" + " a=b" * 5 * MAX_ATTRIBUTES + "}</SCRIPT >text", False),
        ("<style>" + "<p>" * (MAX_TAGS + 1) + "</style>", False),
        ("<script>" + "<p>" * (MAX_TAGS + 1), True),
        ("<script>" + "<" * MAX_BRACKETS + "</script>", True),
        ("<script></script>" + "<p>" * (MAX_TAGS + 1) + "<script></script>", True),
        ('<path d="' + "M 1 2 " * 5_000 + '"/>', False),
        ("<path d='" + "M 1 2 " * 5_000 + "'/>", False),
        ('<img src = "data:image/png;base64,' + "AA==" * 5_000 + '">', False),
        ('<div data-state="' + "a > b; c='d' < e " * 5_000 + '">', False),
        ('<div data-html="' + "<p>" * (MAX_TAGS + 1) + '">', False),
        ('<p x="a b"' + " a=b" * (MAX_ATTRIBUTES + 1) + ">", True),
        ("<p" + ' a="b c"' * (MAX_ATTRIBUTES + 1) + ">", True),
        ('<p x="never closed' + " a=b" * (MAX_ATTRIBUTES + 1) + ">", True),
        ("<scripted><p" + " a=b" * (MAX_ATTRIBUTES + 1) + "></scripted>", True),
    ],
)
def test_tags_depth_and_attributes_are_counted_before_any_parsing(html: str, heavy: bool) -> None:
    assert too_heavy(html) is heavy


def test_page_with_large_attribute_values_is_parsed() -> None:
    drawing = f'<svg viewBox="0 0 9 9"><path d="{"M 1 2 " * 5_000}"/></svg>'
    image = f'<img src="data:image/png;base64,{"AAAA " * 5_000}" alt="map">'
    html = f"<h1>Boats</h1>{drawing}<article data-state='{'a b ' * 5_000}'>{image}<p>Two <b>boats</b>.</article>"
    assert extract(html, "text/html").text == "Two boats."


def test_too_heavy_takes_linear_time() -> None:
    for piece in ('<p a="', "<p a='", '="', "= ", "<p a=\"'", "<p ='\"> "):
        started = time.process_time()
        too_heavy((piece * (5_000_000 // len(piece)))[: MAX_BRACKETS * 30])
        assert time.process_time() - started < 1, piece


def test_a_script_does_not_take_the_place_of_the_text() -> None:
    large = "<script>let a = '" + "x" * PLAIN_CHARS + "'</script>"
    found = extract(f"<h1>Heading</h1>{large}<p>word{large}<p>end", "text/html", plain=True)
    assert (found.text, found.cut) == ("Heading\nword\nend", False)
    assert extract(f"<h1>Heading</h1>{large}<p>" + "a b " * PLAIN_CHARS, "text/html", plain=True).cut


def test_of_a_heavy_page_the_beginning_is_read() -> None:
    found = extract("<h1>Heading</h1>" + "<p>word" * (PLAIN_CHARS // 7 + 1), "text/html")
    assert found.headed.startswith("Heading\nword\nword\n")
    assert found.cut


def test_heavy_page_with_very_many_tags_is_cut() -> None:
    found = extract("<p>word" * (PLAIN_TAGS + 1), "text/html")
    assert (found.text.count("word"), found.cut) == (PLAIN_TAGS, True)
    assert not extract("<p>word" * PLAIN_TAGS, "text/html").cut


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="<>/abhnv1p \n&;=\"'!-#x", max_size=300))
def test_any_text_can_be_read(html: str) -> None:
    extract(html, "text/html", plain=True)
    too_heavy(html)
