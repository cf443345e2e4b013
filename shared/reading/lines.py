"""Text without what is no text in it."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def without_controls(text: str) -> str:
    """The text with `\\n` at the ends of its lines, and without other control characters than tabs."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(text: str) -> str:
    return " ".join(text.split())
