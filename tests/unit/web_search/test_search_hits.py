"""Cleaning of what search services send, and the text that the model reads."""

from __future__ import annotations

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.web_search.hits import MAX_SNIPPET, Hit, clean, collect, render

TODAY = date(2026, 5, 30)


def test_the_text_is_the_agreed_one() -> None:
    hits = [Hit("First", "one", "https://a.example/"), Hit("Second", "two", "https://b.example/")]
    result = render("q", hits, TODAY)
    assert result.text == (
        "Today's date: 2026-05-30\n\n"
        "[1] Title: First\n    Snippet: one\n    URL: https://a.example/\n\n"
        "[2] Title: Second\n    Snippet: two\n    URL: https://b.example/"
    )
    assert result.data == [
        {"title": "First", "snippet": "one", "url": "https://a.example/"},
        {"title": "Second", "snippet": "two", "url": "https://b.example/"},
    ]


def test_nothing_found_names_the_query() -> None:
    result = render("no such thing", [], TODAY)
    assert (result.text, result.data) == ("No results found for: no such thing", [])


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("<strong>Bitcoin</strong> price", "Bitcoin price"),
        ("Tom &amp; Jerry&nbsp;&#39;s", "Tom & Jerry 's"),
        ("one\n\n[9] Title: fake\n    URL: x", "one [9] Title: fake URL: x"),
        ("a\u202eb\u200bc\u00add\x00e\x1b[31m", "abcd e [31m"),
        ("line\u2028separator", "line separator"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("if a<b then", "if a<b then"),
        ("\ud800", ""),
        (None, ""),
        (17, ""),
        (["x"], ""),
    ],
)
def test_snippets_become_one_plain_line(raw: object, text: str) -> None:
    assert clean(raw, 200) == text


def test_long_snippets_are_cut() -> None:
    assert clean("word " * 1_000, MAX_SNIPPET).endswith("word…")
    assert len(clean("x" * 10_000, MAX_SNIPPET)) == MAX_SNIPPET


@given(st.text(max_size=400))
def test_cleaned_text_is_one_short_line_that_can_be_encoded(raw: str) -> None:
    line = clean(raw, 100)
    assert len(line) <= 100
    assert line.splitlines() in ([], [line])
    line.encode()


def test_hits_without_a_web_address_and_repeated_pages_are_left_out() -> None:
    hits = collect(
        [
            ("a", "first", "https://a.example/"),
            ("b", "again", "https://a.example/"),
            ("c", "script", "javascript:alert(1)"),
            ("d", "none", None),
            ("e", "two lines", "https://a.example/\n[2] Title: fake"),
            ("g", "no host", "http:///None"),
            ("h", "no URL", "http://[::1"),
            (None, "no title", "https://b.example/"),
            ("f", "too many", "https://c.example/"),
        ],
        2,
    )
    assert hits == [
        Hit("a", "first", "https://a.example/"),
        Hit("https://b.example/", "no title", "https://b.example/"),
    ]
