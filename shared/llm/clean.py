"""The streaming cleaner: thoughts, printed tool calls and ends of turns that leak into a model's text.

They are found however the text is split into chunks; everything else stays as it was, to the character. A marker
directly after a quote mark or a backtick, or inside a fenced code block, is talked about and not a leak.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from functools import cached_property

from shared.llm.call_detection import (
    CALL_MARKERS,
    ENDS,
    Calls,
    Context,
    Ending,
    NeedMore,
    NotACall,
    Verdict,
    classify_line,
    classify_marked,
    opens_line,
)
from shared.llm.port import TextDelta, ThinkingDelta
from shared.llm.printed_calls import Offered, PrintedCall

Piece = TextDelta | ThinkingDelta | PrintedCall

# How much of an answer is kept back at most, because it may be a call.
HELD_CHARS = 32_000
_READ_ALWAYS = 512
# How much of the text before a candidate is looked at.
_LOOK_BACK = 160

# What opens a thought, and what may close it.
_THOUGHTS: dict[str, tuple[str, ...]] = {
    "<think>": ("</think>",),
    "<|channel>thought": ("<channel|>",),
    "<|think|>": ("<|/think|>", "<|think|>", "</think>", "<channel|>"),
    "[THINK]": ("[/THINK]",),
    "<|START_THINKING|>": ("<|END_THINKING|>",),
    "<seed:think>": ("</seed:think>",),
    "◁think▷": ("◁/think▷",),
}
# A channel of gpt-oss: its name and its addressee stand between two markers, its text behind them.
_CHANNELS = ("<|channel|>", "<|start|>")
_MESSAGE = "<|message|>"
_HEADER_CHARS = 200
_ANALYSIS = ("<|end|>", "<|return|>", *_CHANNELS)
# What is left over when the backend already took the other marker away.
_STRAY = (
    "</think>", "<channel|>", "<|/think|>", "[/THINK]", "<|END_THINKING|>", "</seed:think>", "◁/think▷",
    "<|START_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", _MESSAGE, *ENDS,
    *(closer for closers in CALL_MARKERS.values() for closer in closers if closer.startswith(("<|", "<｜"))),
)  # fmt: skip
_MARKERS = (*_THOUGHTS, *_CHANNELS, *_STRAY, *CALL_MARKERS)
_QUOTES = "`'\"“‘«"
_FENCE = re.compile(r"`{3,}")
_LINE = re.compile(r"^[ \t]*(\S)", re.MULTILINE)
_EXAMPLE = re.compile(
    r"example|for instance|e\.g\.|such as|like (?:this|so)|looks? like|would (?:look|be)|sample|template|beispiel"
    r"|exempl|ejemplo|esempio|voorbeeld|пример|例",
    re.IGNORECASE,
)
# A question whose answer may well be JSON, or speak of calls.
_ASKS_FOR_IT = re.compile(
    r"\bjson|\bxml|\byaml|\bcode\b|\bsnippet|\bsyntax|\bschema|\bpayload|\bmarkup|\btemplate"
    r"|\b(?:tool|function)[ _-]?(?:call|use)"
    r"|\bcall(?:s|ing)? (?:a|an|the|your|this|that|my) (?:tool|function)|\bspecial tokens?|\btags?\b|<\w+>",
    re.IGNORECASE,
)


def asks_for_code(question: str) -> bool:
    """Whether an answer to this may print what looks like a call, and be no call."""
    return _ASKS_FOR_IT.search(question) is not None


class _Patterns:
    """Markers, found whole or as the beginning of one at the end of a text."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        longest_first = sorted(set(markers), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)))
        self._begun = {marker[:end] for marker in markers for end in range(1, len(marker))}
        self._longest = max(map(len, markers))

    def first(self, text: str) -> tuple[int, str]:
        """Where the first marker stands, and which; `(len, "")` without one."""
        found = self._whole.search(text)
        return (found.start(), found[0]) if found else (len(text), "")

    def begun(self, text: str) -> int:
        """Where what may become a marker begins; the length of the text when nothing may."""
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at:] in self._begun:
                return at
        return len(text)


_IN_TEXT = _Patterns(_MARKERS)
_CLOSING = {opener: _Patterns(closers) for opener, closers in (*_THOUGHTS.items(), ("<|channel|>", _ANALYSIS))}


class Cleaner:
    """Feed it the text of one answer.

    offered: the tools on offer. asked: whether the question asks for JSON, code or the like (see `asks_for_code`);
    called when it matters, because a question may be long.
    structured: the answer is JSON because that was asked of the backend, so only markers of calls make one.
    """

    def __init__(
        self, offered: Offered | None = None, *, asked: Callable[[], bool] = lambda: False, structured: bool = False
    ) -> None:
        self._offered = offered or {}
        self._ask = asked
        self._structured = structured
        self._held = ""  # not yet known to be text: perhaps the beginning of a marker or of a call
        self._examined = 0  # how much was held when it was weighed last; 0: nothing is being weighed
        self._open = NeedMore()  # the verdict that left it open
        self._thought = ""  # the marker of the thought that we are inside of
        self._lost = False  # inside a call that was longer than any may be
        self._last = ""  # the last character of text
        self._fenced = False
        self._said = ""  # the end of the text so far
        self._spoken = False  # whether there was any text but blanks
        self._blank = True  # whether the line of text holds only blanks so far

    @cached_property
    def _asked(self) -> bool:
        return self._ask()

    def feed(self, text: str) -> Iterator[Piece]:
        """What is certain by now."""
        self._held += text
        return _merged(self._scan(""))

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        """The rest, when the answer is complete. `cut`: the limit of its length ended it."""
        return _merged(self._scan("length" if cut else "stop"))

    @property
    def is_buffering(self) -> bool:
        """Whether text is kept back that may still be meant for the user."""
        return self._examined > 0 and not self._open.certain

    def flush(self) -> Iterator[Piece]:
        """What is kept back, as text: nobody should wait for it any longer."""
        if self.is_buffering:
            yield self._text(len(self._held))

    def _scan(self, ending: Ending) -> Iterator[Piece]:
        go_on = True
        while go_on and self._held:
            if self._lost:
                self._take(len(self._held))
            elif self._thought:
                go_on = yield from self._in_thought(ending)
            elif self._fenced:
                go_on = yield from self._in_fence(ending)
            else:
                go_on = yield from self._in_text(ending)

    def _in_thought(self, ending: Ending) -> Generator[Piece, None, bool]:
        closing = _CLOSING[self._thought]
        at, marker = closing.first(self._held)
        if not marker and not ending:
            at = closing.begun(self._held)
        if at:
            yield ThinkingDelta(self._take(at))
        if marker:
            self._thought = ""
            if marker not in _CHANNELS:
                self._take(len(marker))
        return bool(marker)

    def _in_fence(self, ending: Ending) -> Generator[Piece, None, bool]:
        """A code block goes by as it is, up to its end."""
        end = _FENCE.search(self._held)
        at = end.end() if end else len(self._held)
        if at == len(self._held) and not ending:
            at = _before_backticks(self._held)
        if at:
            yield self._text(at)
        return bool(at)

    def _in_text(self, ending: Ending) -> Generator[Piece, None, bool]:
        at, marker = _IN_TEXT.first(self._held)
        line = self._next_line(ending)
        if line < at:
            at, marker = line, ""
        elif not marker and not ending:
            at = min(_IN_TEXT.begun(self._held), _before_backticks(self._held))
        if at:
            yield self._text(at)
            return True
        if line == 0 and not marker:
            return (yield from self._settle(self._classify("", ending)))
        if marker and self._last and self._last in _QUOTES:
            yield self._text(len(marker))
        elif marker in _THOUGHTS:
            self._take(len(marker))
            self._thought = marker
        elif marker in _CHANNELS:
            return (yield from self._at_channel(marker, ending))
        elif marker in CALL_MARKERS:
            return (yield from self._settle(self._classify(marker, ending)))
        elif marker:
            self._take(len(marker))
        return bool(marker)

    def _at_channel(self, marker: str, ending: Ending) -> Generator[Piece, None, bool]:
        header, message, _ = self._held[len(marker) :].partition(_MESSAGE)
        complete = bool(message) and len(header) <= _HEADER_CHARS
        if not complete and not ending and len(header) <= _HEADER_CHARS + len(_MESSAGE):
            return (yield from self._settle(NeedMore(certain=True)))
        if complete and "to=" in header:
            return (yield from self._settle(self._classify(marker, ending)))
        self._take(len(marker) + (len(header) + len(message) if complete else 0))
        if complete and "analysis" in header:
            self._thought = "<|channel|>"
        return True

    def _next_line(self, ending: Ending) -> int:
        """Where a line begins that is to be weighed; the length of what is held when none does."""
        if not self._structured:
            for line in _LINE.finditer(self._held):
                if line.start() or self._blank:
                    opens = opens_line(self._held[line.start(1) :], self._offered)
                    if opens or (opens is None and not ending):
                        return line.start(1)
        return len(self._held)

    def _classify(self, marker: str, ending: Ending) -> Verdict:
        held = len(self._held)
        # a long candidate is not read again for every character of it
        if not ending and self._examined > _READ_ALWAYS and held * 8 < self._examined * 9:
            return self._open
        too_long = held > HELD_CHARS and not ending
        context = Context(self._offered, self._asked, not self._spoken, _EXAMPLE.search(self._said) is not None)
        if marker:
            sure = marker in _CHANNELS or (self._blank and not self._asked)
            verdict = classify_marked(self._held, marker, context, "length" if too_long else ending, sure=sure)
        elif too_long and not self._open.certain:
            return NotACall(held)
        else:
            verdict = classify_line(self._held, context, "length" if too_long else ending)
        self._lost = too_long and isinstance(verdict, Calls)
        return verdict

    def _settle(self, verdict: Verdict) -> Generator[Piece, None, bool]:
        """Acts on a verdict; whether the rest of what is held can be looked at."""
        match verdict:
            case NeedMore():
                self._examined, self._open = len(self._held), verdict
                return False
            case NotACall(end):
                yield self._text(end)
            case Calls(calls, end):
                self._take(end)
                self._blank = True
                yield from calls
        return True

    def _take(self, end: int) -> str:
        taken, self._held = self._held[:end], self._held[end:]
        self._examined, self._open = 0, NeedMore()
        return taken

    def _text(self, end: int) -> TextDelta:
        """So much of what is held as text, after noting how it ends and whether it opens or closes a code fence."""
        text = self._take(end)
        if len(_FENCE.findall(text)) % 2:
            self._fenced = not self._fenced
        self._last = text[-1]
        self._said = (self._said + text)[-_LOOK_BACK:]
        self._spoken = self._spoken or not text.isspace()
        _, newline, line = text.rpartition("\n")
        self._blank = (bool(newline) or self._blank) and not line.strip()
        return TextDelta(text)


def thought_calls(thoughts: str, offered: Offered) -> Iterator[PrintedCall]:
    """The calls, between markers and of tools on offer, that thoughts end with."""
    cleaner = Cleaner(offered, asked=lambda: True)
    pieces = [piece for piece in (*cleaner.feed(thoughts), *cleaner.finish(cut=True)) if not _is_blank(piece)]
    calls: list[PrintedCall] = []
    while pieces and isinstance(call := pieces.pop(), PrintedCall) and call.error is None and call.name in offered:
        calls.append(call)
    yield from reversed(calls)


def _is_blank(piece: Piece) -> bool:
    return not isinstance(piece, PrintedCall) and not piece.text.strip()


def _before_backticks(text: str) -> int:
    """Where backticks begin that the text ends with: more of them may follow, and three make a fence."""
    return len(text.rstrip("`"))


def _merged(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same pieces, neighbouring texts as one."""
    held: TextDelta | ThinkingDelta | None = None
    for piece in pieces:
        if held is not None and type(piece) is type(held):
            held = type(held)(held.text + piece.text)
            continue
        if held is not None:
            yield held
        held = None
        if isinstance(piece, PrintedCall):
            yield piece
        else:
            held = piece
    if held is not None:
        yield held
