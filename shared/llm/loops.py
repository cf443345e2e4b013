"""Models that repeat themselves without end: seen by how little new their text holds. Pure.

Text that goes in circles compresses to almost nothing, whatever it is that returns: a word, a line, a paragraph, a list
of the same point under new numbers. Tables, code, lists and poems with refrains do not come near: the rows of a table
differ, and a refrain has verses. What has few letters (rulers, matrices) or stands in a code fence is given more room.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

# (characters looked at, what they compress to at most when they are a loop, whether it must be plain words)
_WINDOWS = ((2_048, 0.036, True), (8_192, 0.030, False))
_EVERY = 512
# A part as long as this, three times in a row and to the letter, is a loop; longer ones are not looked for.
_PART, _LONGEST_PART = 1_024, 4_096
_LONGEST = 3 * _LONGEST_PART
# Of a text that comes at once so much of the end is looked at; a megabyte takes more than a second.
_AT_ONCE = 64_000
# Numbers of a list's points: they change while the model goes in circles.
_NUMBERING = re.compile(r"^[ \t]*(?:[-*+]|\(?\d+[.):])[ \t]*(?:\d+[.)][ \t]*)?", re.MULTILINE)
_FEWEST_LETTERS = 0.5


# A question that wants the same thing many times.
_ASKS_TO_REPEAT = re.compile(
    r"\brepeat|\b\d{2,}[ -]*(?:times|lines|copies|x\b|mal\b|fois|veces|volte|vezes|keer|раз)"
    r"|\bhundred times|\bover and over",
    re.IGNORECASE,
)


def asks_to_repeat(question: str) -> bool:
    """Whether an answer to this may say the same again and again."""
    return _ASKS_TO_REPEAT.search(question) is not None


class LoopWatch:
    """Feed it one text as it comes; `looping` stays true once it was. `patient`: whether repetitions are wanted; asked
    when there are some, because a question may be long."""

    def __init__(self, *, patient: Callable[[], bool] = lambda: False) -> None:
        self._ask = patient
        self._patient = self.looping = False
        self._tail = ""
        self._new = 0

    def feed(self, text: str) -> bool:
        """Whether the text goes in circles by now."""
        text = text[-_AT_ONCE:]
        # in steps, so that the verdict does not depend on how the text is cut
        while text and not self.looping and not self._patient:
            step, text = text[: _EVERY - self._new], text[_EVERY - self._new :]
            self._tail = (self._tail + step)[-_LONGEST:]
            self._new += len(step)
            if self._new == _EVERY:
                self._new = 0
                if _goes_in_circles(self._tail):
                    self._patient = self._ask()
                    self.looping = not self._patient
        return self.looping


def _goes_in_circles(text: str) -> bool:
    for characters, share, words in _WINDOWS:
        if len(text) < characters:
            break
        part = text[-characters:]
        if words and ("```" in part or "|" in part or sum(map(str.isalpha, part)) < _FEWEST_LETTERS * characters):
            continue
        said = _NUMBERING.sub("", part).encode(errors="replace")
        if len(zlib.compress(said, 6)) < share * len(part.encode(errors="replace")):
            return True
    return _period(text) >= _PART


def without_loop(text: str) -> str:
    """A text that ends in circles, cut back to where the returning part has been said once."""
    plain = text[-_LONGEST:]
    period = _period(plain)
    if not period:
        return text
    # the circle as far back as it goes
    begin = len(text) - period
    while begin > 0 and text[begin - 1] == text[begin - 1 + period]:
        begin -= 1
    # not in the middle of a line
    end = text.find("\n", begin + period - 1, begin + 2 * period)
    return text[: begin + period if end < 0 else end].rstrip()


def _period(text: str) -> int:
    """How long the part is that the text ends with at least three times in a row; 0 when there is none."""
    backwards = text[::-1]
    # the shortest border of the end is where it was said before
    probe = backwards[: min(64, len(backwards) // 4)]
    if not probe:
        return 0
    at = backwards.find(probe, 1)
    while 0 < at <= _LONGEST_PART:
        if backwards[: 2 * at] == backwards[at : 3 * at]:
            return at
        at = backwards.find(probe, at + 1)
    return 0
