"""Text from outside, as a terminal may have it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Without control characters: a page that the model quotes must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or ((c.isprintable() or c.isspace()) and c not in "\r\x0b\x0c\x85"))
