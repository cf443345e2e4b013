"""Which charset a page is read in."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.reading.charset import to_text

META = '<meta charset="{}">'


@pytest.mark.parametrize(
    ("data", "header", "text"),
    [
        ("Grüße".encode(), "text/html; charset=utf-8", "Grüße"),
        ("Grüße".encode("latin-1"), "text/html; charset=ISO-8859-1", "Grüße"),
        ("“quoted” €".encode("cp1252"), "text/html; charset=iso-8859-1", "“quoted” €"),
        ("Привет".encode("koi8-r"), 'text/plain; charset="koi8-r"', "Привет"),
        ("こんにちは".encode("shift_jis"), "text/html; charset=Shift_JIS", "こんにちは"),
        ("你好".encode("gb18030"), "text/html;charset=gb2312", "你好"),
        ("안녕".encode("cp949"), "text/html; charset=ks_c_5601-1987", "안녕"),
        (
            (META.format("windows-1251") + "Привет").encode("cp1251"),
            "text/html",
            META.format("windows-1251") + "Привет",
        ),
        ("<?xml version='1.0' encoding='iso-8859-2'?>ł".encode("iso-8859-2"), "text/xml", None),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=cp1252">\x80', "text/html", None),
        (codecs.BOM_UTF8 + "Grüße".encode(), "text/html; charset=latin-1", "Grüße"),
        (codecs.BOM_UTF16_LE + "Grüße".encode("utf-16-le"), "text/html", "Grüße"),
        (codecs.BOM_UTF16_BE + "Grüße".encode("utf-16-be"), "text/html; charset=utf-8", "Grüße"),
        ("Grüße".encode("utf-16-le"), "text/html; charset=utf-16-le", "Grüße"),
        ("Grüße".encode(), "text/html", "Grüße"),
        ("Grüße".encode(), "", "Grüße"),
        ("Grüße".encode("latin-1"), "text/html", "Grüße"),
        ("Grüße".encode(), "text/html; charset=no-such-thing", "Grüße"),
        ("Grüße".encode(), "text/html; charset=rot13", "Grüße"),
        (b"+ADw-script+AD4-", "text/html; charset=utf-7", "+ADw-script+AD4-"),
        ((META.format("utf-16") + "Grüße").encode(), "text/html", META.format("utf-16") + "Grüße"),
        ((META.format("latin-1") + "Grüße").encode(), "text/html; charset=utf-8", META.format("latin-1") + "Grüße"),
        ("Grüße".encode("latin-1"), "text/html; charset=utf-8", "Grüße"[:2] + "��e"),
    ],
)
def test_the_charset_comes_from_mark_header_page_or_content(data: bytes, header: str, text: str | None) -> None:
    result = to_text(data, header)
    if text is None:
        assert result.endswith(("ł", "€"))
    else:
        assert result == text


def test_a_page_that_was_cut_in_a_character_keeps_its_charset() -> None:
    assert to_text("Grüße".encode()[:3], "text/html; charset=utf-8", cut=True) == "Gr"
    assert to_text("Grüße".encode()[:3], "", cut=True) == "Gr"


@given(st.binary(max_size=200), st.text(max_size=40))
def test_any_bytes_become_text(data: bytes, header: str) -> None:
    assert isinstance(to_text(data, f"text/html; charset={header}"), str)
