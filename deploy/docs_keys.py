"""Writes the table of keys into docs/bus.md, between its two marks."""

from __future__ import annotations

import re
from pathlib import Path

from shared.bus.keys import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "bus.md"
_BETWEEN = re.compile(r"(?<=<!-- made by `make docs-keys` -->\n).*?(?=<!-- until here -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with the table as it is now."""
    text, number = _BETWEEN.subn(lambda _: table(), page)
    assert number == 1, "docs/bus.md has one place for the table"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
