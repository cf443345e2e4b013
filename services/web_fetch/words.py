"""The words of a text, for comparing texts with each other. Pure."""

from __future__ import annotations

import re

# Thai, Lao, Burmese, Khmer, Japanese and Chinese have no spaces between words: each character counts as a word.
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def count(text: str) -> int:
    return len(_WORD.findall(text))


def joined(text: str) -> str:
    """Return the words between single spaces, with one at both ends: `joined(a) in joined(b)` compares whole words."""
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "
