"""The main text of pages of different kinds (tests/eval/extraction.py measures how well)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.web_fetch.extract import FILLED_TAGS, extract, filled, tidy
from services.web_fetch.plain import MAX_TAGS

PAGES = Path(__file__).parents[2] / "eval" / "pages"


def page(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "heading", "kept"),
    [
        ("article.html", "River bridge reopens after two years", "strengthened with concrete collars"),
        ("docs.html", "Configuring retries", "deliveries before the message is set aside"),
        ("forum.html", "Sourdough does not rise in winter", "Doubled in five hours"),
        ("table.html", "Tide tables, harbour of Norhaven", "07:17"),
        ("product.html", "Alder 2 camping stove", "Weight: 1.9 kg"),
        ("wiki.html", "Lenn (river)", "two hydroelectric plants"),
        ("tiny.html", "Status page", "All systems operational."),
        ("code.html", "slug.py", 'return "-".join(words)'),
        ("front.html", "Today", "Local team reaches the final"),
        ("faq.html", "Questions and answers", "Four weeks. You can extend twice"),
    ],
)
def test_heading_and_text_are_kept_and_furniture_is_not(name: str, heading: str, kept: str) -> None:
    text = extract(page(name), "text/html").headed
    assert heading in text[:200]
    assert kept in text
    assert not re.search(r"cookies to improve|All rights reserved|Privacy policy|Pricing", text)


@pytest.mark.parametrize("name", ["data.json", "plain.txt"])
def test_text_that_is_not_html_stays_as_it_is(name: str) -> None:
    kind = {"data.json": "application/json", "plain.txt": "text/plain"}[name]
    assert extract(page(name), kind).text == page(name).strip()


def test_a_heading_in_the_articles_own_header_stands_above_the_text() -> None:
    html = "<title>Site</title><h1>Site name</h1><article><header><h1>The real heading</h1></header><p>" + "word " * 150
    result = extract(html, "text/html")
    assert result.headed.startswith("The real heading\nword word")
    assert result.text.startswith("word word")


def test_the_title_stands_in_for_a_missing_heading() -> None:
    result = extract("<title>Only a title</title><body><p>A short text.</p>", "text/html")
    assert result.title == "Only a title"
    assert (result.text, result.headed) == ("A short text.", "Only a title\nA short text.")


def test_a_heading_that_is_there_is_not_repeated() -> None:
    text = extract(page("tiny.html"), "text/html").headed
    assert text.count("Status page") == 1


def test_what_the_careful_reading_lost_in_between_comes_from_the_usual_one() -> None:
    careful = "First words of it.\nThe last words."
    usual = "Menu and teaser\nFirst words of it.\nA table: 1 2\n\nThe last words.\nMore stories for you"
    assert filled(careful, usual) == "First words of it.\nA table: 1 2\n\nThe last words."


@pytest.mark.parametrize("usual", ["", "Something else", "Short one.\nother lines\nother lines"])
def test_a_usual_reading_of_something_else_is_not_taken(usual: str) -> None:
    careful = "Short one.\nA much longer line, which is the larger part of the text."
    assert filled(careful, usual) == careful


def test_an_article_is_whole_between_its_first_and_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever trafilatura makes of a page: both readings are asked for, a page with very many tags is read once."""
    asked: list[bool] = []

    def reading(_html: str, *, favor_precision: bool = False, **_options: bool) -> str:
        asked.append(favor_precision)
        return "begin " + "word " * 120 + "\n" + ("" if favor_precision else "between\n") + "end of it"

    monkeypatch.setattr("trafilatura.extract", reading)
    assert "\nbetween\n" in extract("<p>" + "word " * 120, "text/html").text
    assert asked == [True, False]
    assert "between" not in extract("<p>" * FILLED_TAGS + "<p>" + "word " * 120, "text/html").text
    assert asked == [True, False, True]


def test_a_page_with_too_many_tags_is_still_read() -> None:
    html = "<h1>Long list</h1><main>" + "<p>row</p>" * (MAX_TAGS // 2) + "</main>"
    text = extract(html, "text/html").headed
    assert text.startswith("Long list\nrow")


@pytest.mark.parametrize(
    "html",
    [
        "",
        "<",
        "<!--",
        "\0",
        "<div>" * 20_000 + "x",
        "<b>" * 5_000,
        "<table><tr><td>" * 2_000,
        "<h1></h1><title></title>",
    ],
    ids=["empty", "bracket", "comment", "nul", "nested", "unclosed", "tables", "empty heading"],
)
def test_malformed_html_is_no_error(html: str) -> None:
    assert len(extract(html, "text/html").text) <= 1


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="<>/abh1p \n&;=\"'!-", max_size=300))
def test_any_text_can_be_extracted(html: str) -> None:
    extract(html, "text/html")


@given(st.text(max_size=300))
def test_tidy_text_has_no_control_characters_and_no_gaps(text: str) -> None:
    result = tidy(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\n\s*\n\s*\n", result)
    assert result == tidy(result)
