"""The main text of pages of different kinds (tests/eval/extraction.py measures how well)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.web_fetch.extract import FILLED_ELEMENTS, ended, extract, filled, tidy
from services.web_fetch.plain import MAX_TAGS
from services.web_fetch.tree import parsed, whole_page

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


def article(*blocks: str, head: str = "") -> str:
    """A page with a menu and a footer around these blocks."""
    menu, body = "<nav><a href=/>Front page</a></nav>", "".join(blocks)
    return f"<title>Paper</title>{head}{menu}<article>{body}</article><footer>Imprint</footer>"


STORY = "<p>" + "The lock keepers opened the gates at noon and the barges left. " * 12 + "</p>"
LAST = "<p>Nobody had seen so many boats on the canal since the mill closed, said the oldest of them.</p>"


def test_a_heading_with_which_the_text_begins_is_no_part_of_it() -> None:
    result = extract(article("<h1>Boats on the\n canal</h1>", STORY, LAST), "text/html")
    assert result.heading == "Boats on the canal"
    assert result.text.startswith("The lock keepers")
    assert result.headed.startswith("Boats on the canal\nThe lock keepers")


@pytest.mark.parametrize("block", ["p", "div", "li", "td", "blockquote", "dd", "h2"])
def test_a_line_break_in_the_source_is_a_space(block: str) -> None:
    words = "Nobody had seen\n\t\tso many <b>boats\r\non</b> the canal\nsince the mill\n closed."
    html = article(STORY, f"<{block}>{words}</{block}>", STORY)
    assert "Nobody had seen so many boats on the canal since the mill closed." in extract(html, "text/html").text


@pytest.mark.parametrize("code", ["<pre>{}</pre>", "<pre><code>{}</code></pre>", "<p><code>{}</code></p>"])
def test_the_lines_of_code_stay(code: str) -> None:
    html = article(STORY, code.format("for boat in canal:\n    boat.leave()"), STORY, LAST)
    assert "for boat in canal:\n    boat.leave()" in extract(html, "text/html").text


MORE = ("The mill is for sale", "Ice on the canal", "A bridge is painted")


@pytest.mark.parametrize(
    "below",
    [
        "<h3>More from the paper</h3><ul>{}</ul>".format(
            "".join(f"<li><a href=/{n}>{t}</a>" for n, t in enumerate(MORE))
        ),
        "<p>Read on:</p>" + "".join(f"<div><a href=/{n}>{t}</a></div>" for n, t in enumerate(MORE)),
        "<h2>Read on</h2>" + "".join(f"<div><a href=/{n}><h4>{t}</h4></a></div>" for n, t in enumerate(MORE)),
        "<h2>Comments</h2>",
        "<p>See also: </p>",
    ],
    ids=["list", "blocks", "teasers", "heading of nothing", "colon"],
)
def test_links_below_the_end_of_a_text_are_no_part_of_it(below: str) -> None:
    text = extract(article(STORY, STORY, LAST, below), "text/html").text
    assert text.endswith("said the oldest of them.")


def test_links_and_headings_in_the_middle_stay() -> None:
    tree = parsed(
        "<p>Boats<h2>The mill</h2><a href=/1>The mill is for sale</a><p>Nobody buys it.<p><a href=/2>More</a>"
    )
    assert tree is not None
    text = "Boats\nThe mill\nThe mill is for sale\nNobody buys it."
    assert ended(f"{text}\n\nMore", tree) == text


def test_a_page_that_is_mostly_links_keeps_them() -> None:
    links = [f"<li><a href=/{n}>Number {n} of the list of boats on the canal</a>" for n in range(40)]
    text = extract(article("<p>All the boats of the year.</p><ul>", *links, "</ul>"), "text/html").text
    assert "Number 0 of the list" in text
    assert "Number 39 of the list" in text


def test_a_sentence_that_is_marked_as_a_heading_ends_a_text() -> None:
    text = extract(article(STORY, STORY, "<h3>Nobody wants the old times back.</h3>"), "text/html").text
    assert text.endswith("Nobody wants the old times back.")


LEAD = "For the first time in thirty years barges pass the old canal, and the town looks on."


def test_a_standfirst_outside_the_body_is_read() -> None:
    html = (
        f'<head><meta property="og:description" content="{LEAD}"></head><body><h1>Boats</h1>'
        f"<div class=intro>{LEAD}</div><div class=article-body>{STORY * 3}{LAST}</div>"
    )
    assert extract(html, "text/html").text.count(LEAD) == 1


def test_a_description_that_is_not_on_the_page_is_not_read() -> None:
    html = article(STORY, LAST, head=f'<meta name="description" content="{LEAD}">')
    assert LEAD not in extract(html, "text/html").headed


@pytest.mark.parametrize("root", ["<html lang=en />", "<html><head/>", '<html><body class="a" />'])
def test_a_root_that_closes_itself_hides_nothing(root: str) -> None:
    assert "lock keepers" in extract(f"<!doctype html>{root}<p>{STORY}", "text/html").text


@pytest.mark.parametrize(
    "reference", ["&#0;", "&#1;", "&#11;", "&#xFFFE;", "&#xD800;", "\x01", "\x0c", "\ufffe", "\ud800"]
)
def test_a_character_that_no_parser_takes_back_does_no_harm(reference: str) -> None:
    html = article(STORY, f"<p>Nobody {reference}had seen <i>them</i> {reference}before.</p>", STORY, LAST)
    assert "had seen them" in extract(html, "text/html").text


@pytest.mark.parametrize("levels", [255, 300, 900])
def test_what_stands_very_deep_is_read(levels: int) -> None:
    assert "lock keepers" in extract("<div>" * levels + STORY, "text/html").text


def test_the_whole_page_has_a_line_for_each_block() -> None:
    tree = parsed("<nav>Menu</nav><main>One <b>bold</b> word<div>two<br>three</div>four<form>x</form> five</main>six")
    assert tree is not None
    assert whole_page(tree) == "One bold word\ntwo\nthree\nfour\nfive"


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

    def reading(_tree: object, *, favor_precision: bool = False, **_options: bool) -> str:
        asked.append(favor_precision)
        return "begin " + "word " * 120 + "\n" + ("" if favor_precision else "between\n") + "end of it"

    monkeypatch.setattr("trafilatura.extract", reading)
    assert "\nbetween\n" in extract("<p>" + "word " * 120, "text/html").text
    assert asked == [True, False]
    assert "between" not in extract("<p>" * FILLED_ELEMENTS + "<p>" + "word " * 120, "text/html").text
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
@given(st.text(alphabet="<>/abh1p \n&;=\"'!-", max_size=300), st.booleans(), st.integers(0, 50))
def test_any_text_can_be_extracted(html: str, plain: bool, offset: int) -> None:
    extract(html, "text/html", plain=plain, url="https://a.example/", offset=offset)


@given(st.text(max_size=300))
def test_tidy_text_has_no_control_characters_and_no_gaps(text: str) -> None:
    result = tidy(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\n\s*\n\s*\n", result)
    assert result == tidy(result)
