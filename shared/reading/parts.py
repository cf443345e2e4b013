"""A long text in parts: each ends where a block, a sentence or at least a word does."""

from __future__ import annotations

import re

# Where a part may end, the best first: after a line, a sentence, a word.
_ENDS = (re.compile(r"(?=\n)"), re.compile(r"[.!?…][\"'”’)\]]*(?=\s)|[。！？]"), re.compile(r"(?=\s)"))


def part(text: str, offset: int, max_chars: int) -> tuple[str, int]:
    """At most `max_chars` characters from `offset` on, and where the next part begins (the text's length: nowhere)."""
    if len(text) - offset <= max_chars:
        return text[offset:], len(text)
    # One character more: the end of a block may stand directly behind the last one that fits.
    window = text[offset : offset + max_chars + 1]
    at = next((end for pattern in _ENDS if (end := _last(pattern, window, max_chars))), max_chars)
    after = at + offset
    while after < len(text) and text[after].isspace():
        after += 1
    return window[:at].rstrip(), after


def _last(pattern: re.Pattern[str], window: str, max_chars: int) -> int:
    """Behind the last match in the second half; 0 without one."""
    ends = (match.end() for match in pattern.finditer(window, max_chars // 2))
    return max((end for end in ends if end <= max_chars), default=0)
