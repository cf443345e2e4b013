"""Which charset a page is read in."""

from __future__ import annotations

import codecs
import time

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
        ("Grüße".encode("latin-1"), "text/html; charset=utf-8", "Grüße"),
    ],
)
def test_the_charset_comes_from_mark_header_page_or_content(data: bytes, header: str, text: str | None) -> None:
    result = to_text(data, header)
    if text is None:
        assert result.endswith(("ł", "€"))
    else:
        assert result == text


RUSSIAN = "<p>Сегодня жители города встретились с администрацией и обсудили ремонт дорог.</p>"
CHINESE = "<p>今天上午市政府召开会议，讨论新的地铁线路和学校建设问题。</p>"
TAIWANESE = "<p>今天上午市政府召開會議，討論新的捷運路線和學校建設問題。</p>"
JAPANESE = "<p>今日の午前中、市役所で会議が開かれ、新しい地下鉄の路線について話し合いました①。</p>"
KOREAN = "<p>오늘 오전 시청에서 회의가 열려 새로운 지하철 노선에 대해 논의했습니다.</p>"
GERMAN = "<p>Die Bürger trafen sich für ein Gespräch über die Straße – „endlich“.</p>"
POLISH = "<p>Mieszkańcy spotkali się dziś, żeby omówić nową szkołę.</p>"


@pytest.mark.parametrize(
    ("label", "codec", "text", "detected"),
    [
        ("utf-8", "utf-8", RUSSIAN, True),
        ("gb2312", "gb2312", CHINESE, True),
        ("gbk", "gbk", CHINESE + "镕", True),
        ("gb18030", "gb18030", CHINESE + "㐀", True),
        ("big5", "cp950", TAIWANESE, True),
        ("shift_jis", "cp932", JAPANESE, True),
        ("euc-jp", "euc_jis_2004", JAPANESE, True),
        ("iso-2022-jp", "iso2022_jp_2004", JAPANESE.replace("①", ""), True),
        ("euc-kr", "euc_kr", KOREAN, True),
        ("windows-1251", "cp1251", RUSSIAN, True),
        ("koi8-r", "koi8-r", RUSSIAN, True),
        ("windows-1252", "cp1252", GERMAN, True),
        ("iso-8859-1", "cp1252", GERMAN, True),
        ("iso-8859-2", "iso8859-2", POLISH, False),
        ("utf-16", "utf-16", RUSSIAN, True),
        ("utf-16", "utf-16-le", RUSSIAN, False),
        ("utf-16le", "utf-16-le", GERMAN, True),
        ("utf-16be", "utf-16-be", GERMAN, True),
    ],
)
def test_charset_is_found_by_header_late_meta_or_content(label: str, codec: str, text: str, detected: bool) -> None:
    assert to_text(text.encode(codec), f"text/html; charset={label}") == text
    late = f"<html><head><style>{'a{b:c} ' * 3_000}</style><meta charset={label}></head><body>{text}"
    assert to_text(late.encode(codec), "text/html") == late
    if detected:
        assert to_text(text.encode(codec), "text/html") == text


@pytest.mark.parametrize(
    ("data", "header", "text"),
    [
        (RUSSIAN.encode(), "text/html; charset=ISO-8859-1", RUSSIAN),
        ((META.format("gb2312") + RUSSIAN).encode(), "text/html; charset=koi8-r", META.format("gb2312") + RUSSIAN),
        (b"<p>only ASCII</p>", "text/html; charset=utf-16", "<p>only ASCII</p>"),
        (b"<p>only ASCII</p>", "text/html; charset=gb2312", "<p>only ASCII</p>"),
        # one broken byte in a long page does not change its charset
        (RUSSIAN.encode() + b"\xff", "text/html; charset=utf-8", RUSSIAN + "\ufffd"),
        (RUSSIAN.encode() + b"\xff", "", RUSSIAN + "\ufffd"),
        (CHINESE.encode("gbk") + b"\xff", "text/html; charset=gbk", CHINESE + "\ufffd"),
        # the header is wrong, the page is right
        (f"{META.format('gbk')}{CHINESE}".encode("gbk"), "text/html; charset=utf-8", META.format("gbk") + CHINESE),
        # a declaration in a comment or in the body is none
        (f"<!--{META.format('koi8-r')}-->{RUSSIAN}".encode("cp1251"), "", f"<!--{META.format('koi8-r')}-->{RUSSIAN}"),
        (f"<body>{META.format('koi8-r')}{RUSSIAN}".encode("cp1251"), "", f"<body>{META.format('koi8-r')}{RUSSIAN}"),
    ],
)
def test_charset_with_false_evidence_is_found(data: bytes, header: str, text: str) -> None:
    assert to_text(data, header) == text


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        (RUSSIAN, "utf-8"), (CHINESE, "gb18030"), (TAIWANESE, "cp950"), (JAPANESE, "cp932"), (JAPANESE, "euc_jis_2004"),
        (KOREAN, "cp949"), (GERMAN, "utf-16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("declared", [True, False])
def test_charset_of_text_cut_in_a_character_stays(text: str, codec: str, declared: bool) -> None:
    for lost in range(5, 9):
        data = (text * 3).encode(codec)[:-lost]
        found = to_text(data, f"text/html; charset={codec}" if declared else "text/html", cut=True)
        assert (text * 3).startswith(found)
        assert len(found) > 2 * len(text)


def test_charset_of_five_megabytes_is_found_within_a_second() -> None:
    for piece in ("<meta ", "<!--", "<meta charset=", "é<", "\x1b$B", "\u4e2d"):
        data = (piece * (5_000_000 // len(piece.encode("cp936", "ignore") or b" "))).encode("cp936", "ignore")
        started = time.process_time()
        to_text(data, "text/html")
        assert time.process_time() - started < 1, piece


@given(st.binary(max_size=200), st.text(max_size=40))
def test_any_bytes_become_text(data: bytes, header: str) -> None:
    assert isinstance(to_text(data, f"text/html; charset={header}"), str)
