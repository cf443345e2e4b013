from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.memory.text import dense_text, keyword_text, query_tokens, rare_words, tokens

AT = datetime(2026, 3, 14, 22, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "forms",
    [
        ("move", "moves", "moved", "moving"),
        ("city", "cities"),
        ("stop", "stopped", "stopping", "stops"),
        ("box", "boxes"),
        ("watch", "watches", "watched"),
        ("party", "parties"),
        ("house", "houses"),
        ("call", "calls", "called", "calling"),
        ("quick", "quickly"),
        ("buy", "buys", "buying", "bought"),
        ("go", "goes", "going", "went", "gone"),
        ("write", "writes", "writing", "wrote", "written"),
        ("child", "children", "Children"),
        ("wolf", "wolves"),
        ("lay", "lays", "laid"),
        ("café", "CAFÉ", "cafe"),
        ("Malmö", "malmo"),
    ],
)
def test_forms_of_a_word_are_the_same_word(forms: tuple[str, ...]) -> None:
    assert len({tuple(tokens(form)) for form in forms}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("bus", "bu"), ("glass", "glas"), ("red", "r"), ("42", "420"), ("sing", "s"), ("lives", "life"), ("rose", "rise")],
)
def test_different_words_stay_different(one: str, other: str) -> None:
    assert tokens(one) != tokens(other)


def test_a_question_is_searched_by_what_it_is_about() -> None:
    assert query_tokens("What do you remember about my coffee?") == tokens("coffee") != []


def test_a_question_of_stop_words_alone_keeps_them() -> None:
    assert query_tokens("what is it") == tokens("what is it") != []


def test_words_are_searched_once() -> None:
    assert query_tokens("coffee, Coffee and more coffees") == tokens("coffee more") != []


def test_scripts_without_spaces_are_found_by_parts_of_a_run() -> None:
    assert set(tokens("京都")) <= set(tokens("去年我去了东京都旅行"))


def test_names_and_numbers_are_kept_whole() -> None:
    assert tokens("error E119 on 06:40") == ["error", "e119", "on", "06", "40"]


def test_a_turn_is_embedded_with_its_date_where_a_cut_leaves_it() -> None:
    assert dense_text("How?", "So.", AT) == "How?\n(14 March 2026)\nSo."
    assert dense_text("", "A note", AT) == "(14 March 2026)\nA note"


def test_a_turn_is_indexed_under_its_day() -> None:
    found = set(tokens(keyword_text("How?", "So.", AT)))
    for asked in ("14 March", "on a Saturday in March 2026", "2026-03-14"):
        assert set(query_tokens(asked)) <= found


RARE = [(0, 10, False), (1, 1, True), (2, 2, True), (2, 12, True), (3, 12, False), (3, 30, True), (4, 30, False),
        (60, 600, True), (61, 600, False)]  # fmt: skip


@pytest.mark.parametrize(("count", "total", "rare"), RARE)
def test_word_is_rare_in_a_tenth_of_the_engrams(count: int, total: int, rare: bool) -> None:
    assert rare_words({"word": count}, total) == ({"word"} if rare else set())


@given(st.text(max_size=200))
def test_any_text_has_words_that_are_plain(text: str) -> None:
    for word in tokens(text):
        assert word
        assert not word.isspace()
        assert '"' not in word


@pytest.mark.parametrize(
    "query",
    [
        "What did we plan in May 2023?",
        "what happened on 3 may",
        "the 3rd of may",
        "May 14, the meeting",
        "Who visited us last May?",
        "before may",
    ],
)
def test_a_month_that_is_a_common_word_too_is_searched_as_a_month(query: str) -> None:
    assert "may" in query_tokens(query)


@pytest.mark.parametrize("query", ["May I have the recipe?", "What may the dog eat?", "you may find 3 keys"])
def test_the_common_word_is_not_searched(query: str) -> None:
    assert "may" not in query_tokens(query)
