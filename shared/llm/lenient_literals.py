"""Values as models print them: JSON, Python's literals and Gemma's notation, with what they get wrong.

Read besides strict JSON: single and triple quotes, bare keys and words, `True` and `None`, trailing commas, line breaks
and unescaped quotes inside strings, and strings between `<|"|>` (Gemma 4) or `<escape>` (FunctionGemma). Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Levels of brackets: no tool has more, and what encodes arguments on their way has limits of its own.
DEEPEST = 100

_STRICT = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*")
_BARE_KEY = re.compile(r"[\w.$-]+")
_WORD = re.compile(r"[^,}\])]+")
_STOP = re.compile(r"""["'\\]""")
# Between two of the same; the longest first.
_PAIRED = ('<|"|>', "<escape>", '"""', "'''")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CODE = re.compile(r"u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})")
_WORDS = {"True": True, "False": False, "None": None}
# What may stand behind a string: a quote that is followed by anything else belongs to the text.
_AFTER_STRING = ",:=}])"


class UnfinishedError(ValueError):
    """The text ends inside a value."""


def value_at(text: str, at: int, *, cut: bool = False) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. Raises ValueError, UnfinishedError at the text's end.

    cut: nothing more will come, so brackets that are still open at the end of the text are taken for closed.
    """
    if text[at : at + 1] in ("{", "["):
        try:
            return _STRICT.raw_decode(text, at)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except json.JSONDecodeError:
            pass
    return _Reader(text, cut).value(at, 0)


def arguments_at(text: str, at: int, *, cut: bool = False) -> tuple[list[Any], dict[str, Any], int]:
    """Positional and named arguments of a call in Python's notation whose bracket stands at `at`, and its end.

    Raises as `value_at` does.
    """
    return _Reader(text, cut).arguments(at)


class _Reader:
    def __init__(self, text: str, cut: bool) -> None:
        self._text = text
        self._cut = cut

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        text, at = self._text, self._skip(at)
        if at >= len(text):
            raise UnfinishedError("a value is missing")
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        for quote in _PAIRED:
            if text.startswith(quote, at):
                end = text.find(quote, at + len(quote))
                if end < 0:
                    raise UnfinishedError("a string has no end")
                return text[at + len(quote) : end], end + len(quote)
        match text[at]:
            case '"' | "'":
                return self._string(at)
            case "{":
                return self._object(at, depth)
            case "[":
                return self._array(at, depth)
            case _:
                return self._word(at)

    def arguments(self, at: int) -> tuple[list[Any], dict[str, Any], int]:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        at = self._skip(at + 1)
        while (closed := self._closed(at, ")")) is None:
            key = _BARE_KEY.match(self._text, at)
            after = self._skip(key.end()) if key else at
            if key and self._text[after : after + 1] == "=":
                named[key[0]], at = self.value(after + 1, 1)
            else:
                value, at = self.value(at, 1)
                positional.append(value)
            at = self._next(at, ")")
        return positional, named, closed

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._skip(at + 1)
        while (closed := self._closed(at, "}")) is None:
            key, at = self._key(at)
            at = self._skip(at)
            if at >= len(self._text):
                raise UnfinishedError("a value is missing")
            if self._text[at] not in ":=":
                raise ValueError("a colon is missing")
            found[key], at = self.value(at + 1, depth + 1)
            at = self._next(at, "}")
        return found, closed

    def _key(self, at: int) -> tuple[str, int]:
        if self._text[at] in "\"'<":
            key, end = self.value(at, DEEPEST)
            if isinstance(key, str):
                return key, end
        bare = _BARE_KEY.match(self._text, at)
        if bare is None:
            raise ValueError("a key is missing")
        return bare[0], bare.end()

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._skip(at + 1)
        while (closed := self._closed(at, "]")) is None:
            value, at = self.value(at, depth + 1)
            found.append(value)
            at = self._next(at, "]")
        return found, closed

    def _closed(self, at: int, closer: str) -> int | None:
        """Where the brackets end when they are closed at `at`, else None."""
        if at >= len(self._text):
            if self._cut:
                return at
            raise UnfinishedError("a bracket is not closed")
        return at + 1 if self._text[at] == closer else None

    def _next(self, at: int, closer: str) -> int:
        """Behind the comma, or before what closes the brackets."""
        at = self._skip(at)
        if at >= len(self._text) or self._text[at] == closer:
            return at
        if self._text[at] != ",":
            raise ValueError("a comma is missing")
        return self._skip(at + 1)

    def _string(self, start: int) -> tuple[str, int]:
        text, quote, at = self._text, self._text[start], start + 1
        pieces: list[str] = []
        while (stop := _STOP.search(text, at)) is not None:
            here = stop.start()
            pieces.append(text[at:here])
            if text[here] == "\\":
                piece, at = self._escape(here + 1)
                pieces.append(piece)
                continue
            at = here + 1
            after = self._skip(at)
            if text[here] == quote and (after >= len(text) or text[after] in _AFTER_STRING):
                return "".join(pieces), at
            pieces.append(text[here])
        raise UnfinishedError("a string has no end")

    def _escape(self, at: int) -> tuple[str, int]:
        if at >= len(self._text):
            raise UnfinishedError("a string has no end")
        if code := _CODE.match(self._text, at):
            return chr(int(code[1] or code[2], 16)), code.end()
        return _ESCAPES.get(self._text[at], self._text[at]), at + 1

    def _word(self, at: int) -> tuple[Any, int]:
        word = _WORD.match(self._text, at)
        if word is None:
            raise ValueError("a value is missing")
        said = word[0].strip()
        if said in _WORDS:
            return _WORDS[said], word.end()
        try:
            value: Any = json.loads(said)
        except (ValueError, RecursionError):
            if word.end() >= len(self._text):
                # half a word at the end of the text is no value
                raise UnfinishedError("a value is not complete") from None
            return said, word.end()
        return value, word.end()

    def _skip(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        return space.end() if space else at
