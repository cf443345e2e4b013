"""Where a long text is cut, and where it goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.reading.parts import part


@pytest.mark.parametrize(
    ("text", "limit", "first"),
    [
        ("One block.\nAnother one.\nA third.", 26, "One block.\nAnother one."),
        ("One block.\nAnother one.\nA third.", 23, "One block.\nAnother one."),
        ("A sentence of it. Another begins and goes on", 30, "A sentence of it."),
        ("He said \"so.\" Then he went away for ever", 22, 'He said "so."'),
        ("これは文です。これはとても長い文です", 10, "これは文です。"),
        ("only words and no end of a sentence here", 20, "only words and no"),
        ("x" * 50, 20, "x" * 20),
        ("a\n" + "word " * 20, 30, "a\nword word word word word"),
        ("short", 5, "short"),
    ],
)  # fmt: skip
def test_a_part_ends_where_a_reader_would_pause(text: str, limit: int, first: str) -> None:
    assert part(text, 0, limit)[0] == first


@given(st.text(alphabet="ab.\n \u3002\u00e9", max_size=200), st.integers(1, 40))
def test_the_parts_together_are_the_text(text: str, limit: int) -> None:
    offset, shown = 0, []
    while True:
        piece, after = part(text, offset, limit)
        assert len(piece) <= limit
        shown.append(piece)
        if after == len(text):
            break
        assert after > offset
        offset = after
    assert "".join("".join(shown).split()) == "".join(text.split())
