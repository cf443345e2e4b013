"""The streaming cleaner: think tags and printed tool calls that leak into a model's text.

Markers are found however the text is split into chunks; everything between them stays as it was, to the character.
A marker directly after a quote mark or a backtick, or inside a fenced code block, is talked about and not a leak.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shared.llm.port import TextDelta, ThinkingDelta
from shared.llm.toolcalls import json_call, marked_call, may_become_call


@dataclass(frozen=True, slots=True)
class PrintedCall:
    """A tool call that the model wrote as text."""

    name: str
    args: dict[str, Any]


Piece = TextDelta | ThinkingDelta | PrintedCall

# What opens a thought, and what may close it.
_THOUGHTS: dict[str, tuple[str, ...]] = {
    "<think>": ("</think>",),
    "<|channel>thought": ("<channel|>",),
    "<|think|>": ("<|/think|>", "<|think|>", "</think>", "<channel|>"),
}
# What is left over when the backend already took the opening marker away.
_STRAY = ("</think>", "<channel|>", "<|/think|>")
_CALLS: dict[str, str] = {"<|tool_call>": "<tool_call|>", "<tool_call>": "</tool_call>"}
_QUOTES = "`'\"“‘«"
_BACKTICKS = re.compile(r"`+")


class Cleaner:
    """Feed it the text of one answer; `tools` are the names on offer (none: nothing is taken for a call)."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._tools = frozenset(tools)
        self._markers = (*_THOUGHTS, *_STRAY, *(_CALLS if tools else ()))
        self._held = ""  # not yet known to be text: perhaps the beginning of a marker
        self._opened = ""  # the marker that we are inside of
        self._last = ""  # the last character of text
        self._run = 0  # how many backticks the text ends with
        self._fenced = False
        # A whole answer may be one printed call; None once it is known not to be.
        self._whole: str | None = "" if tools else None

    def feed(self, text: str) -> Iterator[Piece]:
        """What is certain by now."""
        self._held += text
        yield from self._settle(self._scan(final=False))

    def finish(self) -> Iterator[Piece]:
        """The rest, when the answer is complete."""
        yield from self._settle(self._scan(final=True))
        if self._whole:
            call = json_call(self._whole, self._tools)
            yield PrintedCall(*call) if call else TextDelta(self._whole)
        self._whole = None

    def _settle(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Holds the text back as long as all of it together may be one JSON object that is a call."""
        for piece in pieces:
            if self._whole is None or isinstance(piece, ThinkingDelta):
                yield piece
                continue
            if isinstance(piece, TextDelta):
                self._whole += piece.text
                if may_become_call(self._whole):
                    continue
            held, self._whole = self._whole, None
            if held:
                yield TextDelta(held)
            if isinstance(piece, PrintedCall):
                yield piece

    def _scan(self, *, final: bool) -> Iterator[Piece]:
        go_on = True
        while go_on:
            if self._opened in _CALLS:
                go_on = yield from self._in_call(final)
            elif self._opened:
                go_on = yield from self._in_thought(final)
            else:
                go_on = yield from self._in_text(final)

    def _in_text(self, final: bool) -> Generator[Piece, None, bool]:
        at, marker = _first(self._held, self._markers)
        if not marker:
            at = len(self._held) if final else _certain(self._held, self._markers)
        if at:
            yield self._text(self._held[:at])
        self._held = self._held[at + len(marker) :]
        if not marker:
            return False
        if self._fenced or (self._last and self._last in _QUOTES):
            yield self._text(marker)
        elif marker in _THOUGHTS or marker in _CALLS:
            self._opened = marker
        return True

    def _in_thought(self, final: bool) -> Generator[Piece, None, bool]:
        closers = _THOUGHTS[self._opened]
        at, marker = _first(self._held, closers)
        if not marker:
            at = len(self._held) if final else _certain(self._held, closers)
        if at:
            yield ThinkingDelta(self._held[:at])
        self._held = self._held[at + len(marker) :]
        if marker:
            self._opened = ""
        return bool(marker)

    def _in_call(self, final: bool) -> Generator[Piece, None, bool]:
        body, closer, rest = self._held.partition(_CALLS[self._opened])
        if not closer and not final:
            return False
        call = marked_call(body, self._tools)
        yield PrintedCall(*call) if call else self._text(self._opened + body + closer)
        self._opened, self._held = "", rest
        return bool(closer)

    def _text(self, text: str) -> TextDelta:
        """The delta, after noting how the text ends and whether it opened or closed a code fence."""
        for ticks in _BACKTICKS.finditer(text):
            carried = self._run if ticks.start() == 0 else 0
            if carried < 3 <= carried + len(ticks[0]):
                self._fenced = not self._fenced
        trailing = len(text) - len(text.rstrip("`"))
        self._run = trailing + (self._run if trailing == len(text) else 0)
        self._last = text[-1]
        return TextDelta(text)


def _first(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """Where the first marker stands, and which; `(0, "")` without one."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(0, ""))


def _certain(text: str, markers: Iterable[str]) -> int:
    """How much of the text cannot be the beginning of a marker that the next chunk completes."""
    # No marker has a second `<`, so only the last one can begin an unfinished marker.
    at = text.rfind("<")
    if at >= 0 and any(marker.startswith(text[at:]) for marker in markers):
        return at
    return len(text)
